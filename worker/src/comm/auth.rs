//! Mutual handshake that opens every connection, control and data alike. Pure state machines, no
//! I/O.
//!
//! ```text
//! connector -> acceptor  Hello      nonce, claims (purpose, from, to, world, attempt, lane)
//! acceptor  -> connector Challenge  nonce
//! connector -> acceptor  Proof      HMAC(key, "connector", claims, both nonces)
//! acceptor  -> connector Verdict    code, HMAC(key, "acceptor", claims, nonces, code, text), text
//! ```
//!
//! The key is derived with HKDF-SHA256 from the token, the job name and the attempt: a process of
//! an older attempt has a different key, even if one token serves all attempts. A peer that cannot
//! prove the key only learns that it was refused. A peer that can, but does not belong here (wrong
//! purpose, rank already present), learns the reason. Every frame carries its sender's attempt, so
//! that processes of different attempts can report the mismatch; the attempt number by itself
//! admits no one. The handshake only authenticates connections; later traffic is neither encrypted
//! nor signed.

use super::{
    config::Token,
    frame::{self, Header, Kind},
};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use subtle::ConstantTimeEq;

/// Time limit for an unauthenticated connection to prove that it has the key.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum concurrent handshakes; a further connection displaces the oldest.
pub(super) const MAX_HANDSHAKES: usize = 64;

pub(super) type Nonce = [u8; 32];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Purpose {
    Control = 1,
    /// A stream of operations in one direction.
    Data = 2,
    SharedMemory = 3,
}

/// Connection key for one attempt of a job.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub fn derive(token: &Token, job: &str, attempt: u32) -> Key {
        let mut key = [0; 32];
        // The name comes last: everything before it has a fixed length, so two different inputs
        // cannot encode to the same bytes.
        Hkdf::<Sha256>::new(None, token.bytes())
            .expand_multi_info(&[b"switchyard comm v3", &attempt.to_le_bytes(), job.as_bytes()], &mut key)
            .expect("invariant: 32 bytes are a valid length of HKDF-SHA256");
        Key(key)
    }

    fn mac(&self, role: &str, claims: &Claims, nonces: (&Nonce, &Nonce), verdict: &[u8]) -> [u8; 32] {
        let mut mac =
            <Hmac<Sha256> as KeyInit>::new_from_slice(&self.0).expect("invariant: HMAC takes a key of any length");
        // Every part has a fixed length except the last, so two different inputs cannot encode to
        // the same bytes.
        mac.update(&[role.len() as u8]);
        mac.update(role.as_bytes());
        mac.update(&claims.encode());
        mac.update(nonces.0);
        mac.update(nonces.1);
        mac.update(verdict);
        mac.finalize().into_bytes().into()
    }
}

/// The identity a connector claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Claims {
    pub purpose: Purpose,
    pub from: u32,
    pub to: u32,
    pub world: u32,
    pub attempt: u32,
    /// Of a data connection; otherwise 0.
    pub lane: u32,
}

const CLAIMS: usize = 1 + 5 * 4;
const HELLO: usize = 32 + CLAIMS;

impl Claims {
    fn encode(&self) -> [u8; CLAIMS] {
        let mut out = [0; CLAIMS];
        out[0] = self.purpose as u8;
        for (i, value) in [self.from, self.to, self.world, self.attempt, self.lane].into_iter().enumerate() {
            out[1 + 4 * i..5 + 4 * i].copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    fn decode(bytes: &[u8]) -> Option<Claims> {
        if bytes.len() != CLAIMS {
            return None;
        }
        let purpose = match bytes[0] {
            1 => Purpose::Control,
            2 => Purpose::Data,
            3 => Purpose::SharedMemory,
            _ => return None,
        };
        let field = |i: usize| frame::le32(&bytes[1 + 4 * i..]);
        Some(Claims { purpose, from: field(0), to: field(1), world: field(2), attempt: field(3), lane: field(4) })
    }
}

const ADMITTED: u8 = 0;
const REFUSED: u8 = 1;

/// Why a handshake was refused, from the connector's side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The acceptor reports an older attempt. Worth a retry: that group is about to end.
    StaleAcceptor,
    Reason(String),
}

/// The side that connects.
pub(super) struct Connector {
    key: Key,
    claims: Claims,
    nonce: Nonce,
    theirs: Option<Nonce>,
}

pub(super) enum ConnectorStep {
    Send(Vec<u8>),
    Admitted,
    Refused(Refusal),
}

impl Connector {
    pub fn new(key: Key, claims: Claims, nonce: Nonce) -> (Connector, Vec<u8>) {
        let mut hello = Vec::with_capacity(HELLO);
        hello.extend_from_slice(&nonce);
        hello.extend_from_slice(&claims.encode());
        let bytes = frame::encode(Kind::Hello, claims.attempt, 0, &hello);
        (Connector { key, claims, nonce, theirs: None }, bytes)
    }

    pub fn frame(&mut self, header: Header, payload: &[u8]) -> ConnectorStep {
        let refused = |text: &str| ConnectorStep::Refused(Refusal::Reason(text.to_owned()));
        match (header.kind, self.theirs) {
            // The attempt number is unauthenticated, but with different attempts neither side could
            // prove its key anyway.
            (Kind::Challenge, None) if header.attempt < self.claims.attempt => {
                ConnectorStep::Refused(Refusal::StaleAcceptor)
            }
            (Kind::Challenge, None) if header.attempt > self.claims.attempt => {
                refused(&format!("attempt {} is over, this is attempt {}", self.claims.attempt, header.attempt))
            }
            (Kind::Challenge, None) if payload.len() == 32 => {
                let mut theirs = [0; 32];
                theirs.copy_from_slice(payload);
                self.theirs = Some(theirs);
                let mac = self.key.mac("connector", &self.claims, (&self.nonce, &theirs), &[]);
                ConnectorStep::Send(frame::encode(Kind::Proof, self.claims.attempt, 0, &mac))
            }
            (Kind::Verdict, Some(theirs)) if payload.len() >= 33 => {
                let (code, text) = (payload[0], &payload[33..]);
                let mut signed = vec![code];
                signed.extend_from_slice(text);
                let mac = self.key.mac("acceptor", &self.claims, (&self.nonce, &theirs), &signed);
                if !bool::from(mac.ct_eq(&payload[1..33])) {
                    return refused(
                        "the handshake failed; both sides must have the same job token and belong to the same job",
                    );
                }
                match code {
                    ADMITTED => ConnectorStep::Admitted,
                    _ => refused(&String::from_utf8_lossy(text)),
                }
            }
            _ => refused("the other side does not follow the handshake"),
        }
    }
}

/// Which connectors an acceptor admits.
#[derive(Debug, Clone)]
pub(super) struct GatePolicy {
    pub purpose: Purpose,
    pub me: u32,
    pub world: u32,
    pub attempt: u32,
}

enum Stage {
    Hello,
    Proof(Claims, Nonce),
}

struct Handshake {
    since: Instant,
    nonce: Nonce,
    stage: Stage,
}

/// A connecting rank and the lane it connects for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Peer {
    pub rank: u32,
    /// Of a data connection; otherwise 0.
    pub lane: u32,
}

/// The acceptor's next action for a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GateStep {
    Send(Vec<u8>),
    /// Send these bytes; the connection now belongs to this peer.
    Admit(Vec<u8>, Peer),
    /// Send these bytes and close. The text is only logged on this side.
    Refuse(Vec<u8>, String),
    /// Close without a reply.
    Drop(String),
}

/// The accepting side, for many connections at once: at most [`MAX_HANDSHAKES`], each for at most
/// [`HANDSHAKE_TIMEOUT`].
pub(super) struct Gate {
    key: Key,
    policy: GatePolicy,
    handshakes: BTreeMap<u64, Handshake>,
}

impl Gate {
    pub fn new(key: Key, policy: GatePolicy) -> Gate {
        Gate { key, policy, handshakes: BTreeMap::new() }
    }

    /// Registers a new connection. Returns the oldest one, for the caller to close, if there are
    /// too many.
    pub fn opened(&mut self, conn: u64, nonce: Nonce, now: Instant) -> Option<u64> {
        // Ids are assigned in increasing order, so the first one is the oldest.
        let displaced =
            if self.handshakes.len() >= MAX_HANDSHAKES { self.handshakes.keys().next().copied() } else { None };
        if let Some(old) = displaced {
            self.handshakes.remove(&old);
        }
        self.handshakes.insert(conn, Handshake { since: now, nonce, stage: Stage::Hello });
        displaced
    }

    pub fn closed(&mut self, conn: u64) {
        self.handshakes.remove(&conn);
    }

    /// Removes and returns the connections that have timed out; the caller must close them.
    pub fn expired(&mut self, now: Instant) -> Vec<u64> {
        let expired: Vec<u64> = self
            .handshakes
            .iter()
            .filter(|(_, handshake)| now.saturating_duration_since(handshake.since) >= HANDSHAKE_TIMEOUT)
            .map(|(conn, _)| *conn)
            .collect();
        for conn in &expired {
            self.handshakes.remove(conn);
        }
        expired
    }

    /// Handles a frame of an unauthenticated connection. `present` returns whether a peer is
    /// already connected.
    pub fn frame(&mut self, conn: u64, header: Header, payload: &[u8], present: &dyn Fn(Peer) -> bool) -> GateStep {
        let Some(handshake) = self.handshakes.remove(&conn) else {
            return GateStep::Drop("unknown connection".to_owned());
        };
        match (header.kind, handshake.stage) {
            (Kind::Hello, Stage::Hello) if payload.len() == HELLO => {
                let Some(claims) = Claims::decode(&payload[32..]) else {
                    return GateStep::Drop("malformed hello".to_owned());
                };
                let mut theirs = [0; 32];
                theirs.copy_from_slice(&payload[..32]);
                let challenge = frame::encode(Kind::Challenge, self.policy.attempt, 0, &handshake.nonce);
                self.handshakes.insert(conn, Handshake { stage: Stage::Proof(claims, theirs), ..handshake });
                GateStep::Send(challenge)
            }
            (Kind::Proof, Stage::Proof(claims, theirs)) if payload.len() == 32 => {
                let nonces = (&theirs, &handshake.nonce);
                let expected = self.key.mac("connector", &claims, nonces, &[]);
                if !bool::from(expected.ct_eq(payload)) {
                    // A peer without the key learns only that it was refused, and gets no MAC to
                    // analyse.
                    let mut blank = vec![0; 33];
                    blank[0] = REFUSED;
                    let why = if claims.attempt == self.policy.attempt {
                        "wrong job token".to_owned()
                    } else {
                        format!("claims to be of attempt {}, this is attempt {}", claims.attempt, self.policy.attempt)
                    };
                    return GateStep::Refuse(frame::encode(Kind::Verdict, self.policy.attempt, 0, &blank), why);
                }
                let (code, text) = self.verdict(&claims, present);
                let mut signed = vec![code];
                signed.extend_from_slice(text.as_bytes());
                let mut verdict = vec![code];
                verdict.extend_from_slice(&self.key.mac("acceptor", &claims, nonces, &signed));
                verdict.extend_from_slice(text.as_bytes());
                let bytes = frame::encode(Kind::Verdict, self.policy.attempt, 0, &verdict);
                match code {
                    ADMITTED => GateStep::Admit(bytes, Peer { rank: claims.from, lane: claims.lane }),
                    _ => GateStep::Refuse(bytes, text),
                }
            }
            _ => GateStep::Drop(format!("unexpected {:?} in the handshake", header.kind)),
        }
    }

    fn verdict(&self, claims: &Claims, present: &dyn Fn(Peer) -> bool) -> (u8, String) {
        let policy = &self.policy;
        let refused = |text: String| (REFUSED, text);
        if claims.world != policy.world {
            return refused(format!(
                "rank {} expects {} ranks, rank {} {}",
                claims.from, claims.world, policy.me, policy.world
            ));
        }
        if claims.purpose != policy.purpose || claims.to != policy.me {
            return refused(format!(
                "a {:?} connection for rank {} reached rank {}, which expects {:?}",
                claims.purpose, claims.to, policy.me, policy.purpose
            ));
        }
        if claims.from >= policy.world || claims.from == policy.me {
            return refused(format!("rank {} is not a peer of rank {} of {}", claims.from, policy.me, policy.world));
        }
        if present(Peer { rank: claims.from, lane: claims.lane }) {
            return refused(format!("rank {} is already present", claims.from));
        }
        (ADMITTED, String::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::frame::FrameReader;

    fn open(bytes: &[u8]) -> (Header, Vec<u8>) {
        let mut reader = FrameReader::new(1 << 16);
        reader.push(&bytes[..32]).unwrap().or_else(|| reader.push(&bytes[32..]).unwrap()).unwrap()
    }

    fn claims(from: u32) -> Claims {
        Claims { purpose: Purpose::Control, from, to: 0, world: 4, attempt: 2, lane: 0 }
    }

    fn key(token: u8, attempt: u32) -> Key {
        Key::derive(&Token::new([token; 32]), "job", attempt)
    }

    fn gate(token: u8) -> Gate {
        let policy = GatePolicy { purpose: Purpose::Control, me: 0, world: 4, attempt: 2 };
        Gate::new(key(token, 2), policy)
    }

    fn handshake(gate: &mut Gate, key: Key, claims: Claims) -> (GateStep, Result<(), Refusal>) {
        let now = Instant::now();
        gate.opened(1, [9; 32], now);
        let (mut connector, mut bytes) = Connector::new(key, claims, [5; 32]);
        loop {
            let (header, payload) = open(&bytes);
            let step = gate.frame(1, header, &payload, &|peer| peer.rank == 3);
            let reply = match &step {
                GateStep::Send(reply) | GateStep::Admit(reply, _) | GateStep::Refuse(reply, _) => reply.clone(),
                GateStep::Drop(why) => panic!("dropped: {why}"),
            };
            let (header, payload) = open(&reply);
            match connector.frame(header, &payload) {
                ConnectorStep::Send(next) => bytes = next,
                ConnectorStep::Admitted => return (step, Ok(())),
                ConnectorStep::Refused(why) => return (step, Err(why)),
            }
        }
    }

    #[test]
    fn a_peer_with_the_token_is_admitted() {
        let (step, result) = handshake(&mut gate(1), key(1, 2), claims(2));
        assert!(matches!(step, GateStep::Admit(_, Peer { rank: 2, lane: 0 })));
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn a_wrong_token_learns_nothing() {
        let (step, result) = handshake(&mut gate(1), key(2, 2), claims(2));
        let GateStep::Refuse(bytes, why) = step else { panic!() };
        assert_eq!(why, "wrong job token");
        assert!(open(&bytes).1[1..].iter().all(|b| *b == 0));
        assert!(matches!(result, Err(Refusal::Reason(text)) if text.contains("same job token")));
    }

    #[test]
    fn an_authenticated_peer_learns_why_it_is_refused() {
        let cases = [
            (Claims { world: 8, ..claims(2) }, "expects 8 ranks"),
            (Claims { purpose: Purpose::Data, ..claims(2) }, "Data connection"),
            (claims(3), "rank 3 is already present"),
            (claims(4), "not a peer"),
            (claims(0), "not a peer"),
        ];
        for (claims, expected) in cases {
            let (_, result) = handshake(&mut gate(1), key(1, 2), claims);
            let Err(Refusal::Reason(text)) = result else { panic!("{result:?}") };
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn different_attempts_report_the_mismatch() {
        let (_, result) = handshake(&mut gate(1), key(1, 3), Claims { attempt: 3, ..claims(2) });
        assert_eq!(result, Err(Refusal::StaleAcceptor));
        let (_, result) = handshake(&mut gate(1), key(1, 1), Claims { attempt: 1, ..claims(2) });
        assert!(matches!(result, Err(Refusal::Reason(text)) if text == "attempt 1 is over, this is attempt 2"));
    }

    #[test]
    fn keys_of_other_attempts_and_jobs_are_rejected() {
        let other_job = Key::derive(&Token::new([1; 32]), "other", 2);
        for key in [key(1, 1), key(1, 3), other_job] {
            let (step, result) = handshake(&mut gate(1), key, claims(2));
            assert!(matches!(step, GateStep::Refuse(_, why) if why == "wrong job token"));
            assert!(matches!(result, Err(Refusal::Reason(text)) if text.contains("same job token")));
        }
    }

    #[test]
    fn handshakes_are_bounded_in_number_and_time() {
        let (mut gate, start) = (gate(1), Instant::now());
        for conn in 0..MAX_HANDSHAKES as u64 {
            assert_eq!(gate.opened(conn, [0; 32], start), None);
        }
        assert_eq!(gate.opened(1000, [0; 32], start + Duration::from_secs(1)), Some(0));
        let expired = gate.expired(start + HANDSHAKE_TIMEOUT);
        assert_eq!(expired.len(), MAX_HANDSHAKES - 1);
        assert!(gate.handshakes.contains_key(&1000));
    }

    #[test]
    fn a_proof_before_a_hello_is_dropped() {
        let mut gate = gate(1);
        gate.opened(1, [9; 32], Instant::now());
        let (header, _) = open(&frame::encode(Kind::Proof, 2, 0, &[0; 32]));
        assert!(matches!(gate.frame(1, header, &[0; 32], &|_| false), GateStep::Drop(_)));
    }
}
