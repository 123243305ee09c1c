//! The mutual handshake that opens every connection, control and data alike, as pure functions and states.
//!
//! ```text
//! connector -> acceptor  Hello      nonce, claims (purpose, from, to, world, attempt, lane)
//! acceptor  -> connector Challenge  nonce
//! connector -> acceptor  Proof      HMAC(key, "connector", claims, both nonces)
//! acceptor  -> connector Verdict    code, HMAC(key, "acceptor", claims, both nonces, code, text), text
//! ```
//!
//! The key is derived by HKDF-SHA256 from the token, the name of the job and the attempt: a process of an older attempt
//! has another key, even if one token serves all attempts. A peer that cannot prove the key learns nothing but
//! "refused". A peer that can, but does not belong here (another purpose, a rank that is already present), learns the
//! reason. Every frame carries the attempt of its sender, so that two attempts that meet can say so; this admits
//! nobody. The handshake authenticates connections; what follows is neither encrypted nor signed.

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

/// Longest time a stranger may take to prove that it has the key.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Most strangers at a time; another one displaces the oldest.
pub(super) const MAX_STRANGERS: usize = 64;

pub(super) type Nonce = [u8; 32];

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Purpose {
    Control = 1,
    Ring = 2,
    SharedMemory = 3,
}

/// The key of the connections of one attempt of a job.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub fn derive(token: &Token, job: &str, attempt: u32) -> Key {
        let mut key = [0; 32];
        // The name comes last: all before it has a fixed length, so no two inputs run together.
        Hkdf::<Sha256>::new(None, token.bytes())
            .expand_multi_info(&[b"switchyard comm v3", &attempt.to_le_bytes(), job.as_bytes()], &mut key)
            .expect("invariant: 32 bytes are a valid length of HKDF-SHA256");
        Key(key)
    }

    fn mac(&self, role: &str, claims: &Claims, nonces: (&Nonce, &Nonce), verdict: &[u8]) -> [u8; 32] {
        let mut mac =
            <Hmac<Sha256> as KeyInit>::new_from_slice(&self.0).expect("invariant: HMAC takes a key of any length");
        // Every part has a fixed length except the last one, so no two inputs run together.
        mac.update(&[role.len() as u8]);
        mac.update(role.as_bytes());
        mac.update(&claims.encode());
        mac.update(nonces.0);
        mac.update(nonces.1);
        mac.update(verdict);
        mac.finalize().into_bytes().into()
    }
}

/// What a connector claims to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Claims {
    pub purpose: Purpose,
    pub from: u32,
    pub to: u32,
    pub world: u32,
    pub attempt: u32,
    /// Of a ring; otherwise 0.
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
            2 => Purpose::Ring,
            3 => Purpose::SharedMemory,
            _ => return None,
        };
        let field = |i: usize| frame::le32(&bytes[1 + 4 * i..]);
        Some(Claims { purpose, from: field(0), to: field(1), world: field(2), attempt: field(3), lane: field(4) })
    }
}

const ADMITTED: u8 = 0;
const REFUSED: u8 = 1;

/// Why a handshake did not end in admission, as the connector sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The other side says that it belongs to an older attempt. Worth a retry: that group is about to end.
    StaleAcceptor,
    Because(String),
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
        let because = |text: &str| ConnectorStep::Refused(Refusal::Because(text.to_owned()));
        match (header.kind, self.theirs) {
            // Unproven, but neither side could prove its key to the other anyway.
            (Kind::Challenge, None) if header.attempt < self.claims.attempt => {
                ConnectorStep::Refused(Refusal::StaleAcceptor)
            }
            (Kind::Challenge, None) if header.attempt > self.claims.attempt => {
                because(&format!("attempt {} is over, this is attempt {}", self.claims.attempt, header.attempt))
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
                let mut said = vec![code];
                said.extend_from_slice(text);
                let mac = self.key.mac("acceptor", &self.claims, (&self.nonce, &theirs), &said);
                if !bool::from(mac.ct_eq(&payload[1..33])) {
                    return because(
                        "the handshake failed; both sides must have the same job token and belong to the same job",
                    );
                }
                match code {
                    ADMITTED => ConnectorStep::Admitted,
                    _ => because(&String::from_utf8_lossy(text)),
                }
            }
            _ => because("the other side does not follow the handshake"),
        }
    }
}

/// Whom an acceptor admits.
#[derive(Debug, Clone)]
pub(super) struct Doorkeeper {
    pub purpose: Purpose,
    pub me: u32,
    pub world: u32,
    pub attempt: u32,
}

enum Stage {
    Hello,
    Proof(Claims, Nonce),
}

struct Stranger {
    since: Instant,
    nonce: Nonce,
    stage: Stage,
}

/// A rank that connects, and the lane it connects for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Peer {
    pub rank: u32,
    /// Of a ring; otherwise 0.
    pub lane: u32,
}

/// What the acceptor does next with a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GateStep {
    Send(Vec<u8>),
    /// Send these bytes; the connection now belongs to this peer.
    Admit(Vec<u8>, Peer),
    /// Send these bytes and close. The text is for this side's own diagnostics.
    Refuse(Vec<u8>, String),
    /// Close without a reply.
    Drop(String),
}

/// The side that accepts, for many connections at once: at most [`MAX_STRANGERS`], each for at most [`HANDSHAKE_TIME`].
pub(super) struct Gate {
    key: Key,
    door: Doorkeeper,
    strangers: BTreeMap<u64, Stranger>,
}

impl Gate {
    pub fn new(key: Key, door: Doorkeeper) -> Gate {
        Gate { key, door, strangers: BTreeMap::new() }
    }

    /// A new connection; returns one to close if there are too many.
    pub fn opened(&mut self, conn: u64, nonce: Nonce, now: Instant) -> Option<u64> {
        // Ids grow, so the first one is the oldest.
        let displaced =
            if self.strangers.len() >= MAX_STRANGERS { self.strangers.keys().next().copied() } else { None };
        if let Some(old) = displaced {
            self.strangers.remove(&old);
        }
        self.strangers.insert(conn, Stranger { since: now, nonce, stage: Stage::Hello });
        displaced
    }

    pub fn closed(&mut self, conn: u64) {
        self.strangers.remove(&conn);
    }

    /// Connections that have run out of time; they are forgotten here, and the caller must close them.
    pub fn expired(&mut self, now: Instant) -> Vec<u64> {
        let late: Vec<u64> = self
            .strangers
            .iter()
            .filter(|(_, stranger)| now.saturating_duration_since(stranger.since) >= HANDSHAKE_TIME)
            .map(|(conn, _)| *conn)
            .collect();
        for conn in &late {
            self.strangers.remove(conn);
        }
        late
    }

    /// A frame of a stranger. `present` says whether this peer is already connected.
    pub fn frame(&mut self, conn: u64, header: Header, payload: &[u8], present: &dyn Fn(Peer) -> bool) -> GateStep {
        let Some(stranger) = self.strangers.remove(&conn) else {
            return GateStep::Drop("unknown connection".to_owned());
        };
        match (header.kind, stranger.stage) {
            (Kind::Hello, Stage::Hello) if payload.len() == HELLO => {
                let Some(claims) = Claims::decode(&payload[32..]) else {
                    return GateStep::Drop("malformed hello".to_owned());
                };
                let mut theirs = [0; 32];
                theirs.copy_from_slice(&payload[..32]);
                let challenge = frame::encode(Kind::Challenge, self.door.attempt, 0, &stranger.nonce);
                self.strangers.insert(conn, Stranger { stage: Stage::Proof(claims, theirs), ..stranger });
                GateStep::Send(challenge)
            }
            (Kind::Proof, Stage::Proof(claims, theirs)) if payload.len() == 32 => {
                let nonces = (&theirs, &stranger.nonce);
                let expected = self.key.mac("connector", &claims, nonces, &[]);
                if !bool::from(expected.ct_eq(payload)) {
                    // Nothing beyond "refused" for a peer without the key, and no MAC it could learn from.
                    let mut blank = vec![0; 33];
                    blank[0] = REFUSED;
                    let why = if claims.attempt == self.door.attempt {
                        "wrong job token".to_owned()
                    } else {
                        format!("claims to be of attempt {}, this is attempt {}", claims.attempt, self.door.attempt)
                    };
                    return GateStep::Refuse(frame::encode(Kind::Verdict, self.door.attempt, 0, &blank), why);
                }
                let (code, text) = self.judge(&claims, present);
                let mut said = vec![code];
                said.extend_from_slice(text.as_bytes());
                let mut verdict = vec![code];
                verdict.extend_from_slice(&self.key.mac("acceptor", &claims, nonces, &said));
                verdict.extend_from_slice(text.as_bytes());
                let bytes = frame::encode(Kind::Verdict, self.door.attempt, 0, &verdict);
                match code {
                    ADMITTED => GateStep::Admit(bytes, Peer { rank: claims.from, lane: claims.lane }),
                    _ => GateStep::Refuse(bytes, text),
                }
            }
            _ => GateStep::Drop(format!("unexpected {:?} in the handshake", header.kind)),
        }
    }

    fn judge(&self, claims: &Claims, present: &dyn Fn(Peer) -> bool) -> (u8, String) {
        let door = &self.door;
        let refused = |text: String| (REFUSED, text);
        if claims.world != door.world {
            return refused(format!(
                "rank {} expects {} ranks, rank {} {}",
                claims.from, claims.world, door.me, door.world
            ));
        }
        if claims.purpose != door.purpose || claims.to != door.me {
            return refused(format!(
                "a {:?} connection for rank {} reached rank {}, which expects {:?}",
                claims.purpose, claims.to, door.me, door.purpose
            ));
        }
        if claims.from >= door.world || claims.from == door.me {
            return refused(format!("rank {} is not a peer of rank {} of {}", claims.from, door.me, door.world));
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
        let door = Doorkeeper { purpose: Purpose::Control, me: 0, world: 4, attempt: 2 };
        Gate::new(key(token, 2), door)
    }

    fn shake(gate: &mut Gate, key: Key, claims: Claims) -> (GateStep, Result<(), Refusal>) {
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
        let (step, result) = shake(&mut gate(1), key(1, 2), claims(2));
        assert!(matches!(step, GateStep::Admit(_, Peer { rank: 2, lane: 0 })));
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn a_wrong_token_learns_nothing() {
        let (step, result) = shake(&mut gate(1), key(2, 2), claims(2));
        let GateStep::Refuse(bytes, why) = step else { panic!() };
        assert_eq!(why, "wrong job token");
        assert!(open(&bytes).1[1..].iter().all(|b| *b == 0));
        assert!(matches!(result, Err(Refusal::Because(text)) if text.contains("same job token")));
    }

    #[test]
    fn whoever_does_not_belong_is_told_why() {
        let cases = [
            (Claims { world: 8, ..claims(2) }, "expects 8 ranks"),
            (Claims { purpose: Purpose::Ring, ..claims(2) }, "Ring connection"),
            (claims(3), "rank 3 is already present"),
            (claims(4), "not a peer"),
            (claims(0), "not a peer"),
        ];
        for (claims, expected) in cases {
            let (_, result) = shake(&mut gate(1), key(1, 2), claims);
            let Err(Refusal::Because(text)) = result else { panic!("{result:?}") };
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn two_attempts_that_meet_say_so() {
        let (_, result) = shake(&mut gate(1), key(1, 3), Claims { attempt: 3, ..claims(2) });
        assert_eq!(result, Err(Refusal::StaleAcceptor));
        let (_, result) = shake(&mut gate(1), key(1, 1), Claims { attempt: 1, ..claims(2) });
        assert!(matches!(result, Err(Refusal::Because(text)) if text == "attempt 1 is over, this is attempt 2"));
    }

    #[test]
    fn with_the_key_of_another_attempt_or_job_no_claim_helps() {
        let other_job = Key::derive(&Token::new([1; 32]), "other", 2);
        for key in [key(1, 1), key(1, 3), other_job] {
            let (step, result) = shake(&mut gate(1), key, claims(2));
            assert!(matches!(step, GateStep::Refuse(_, why) if why == "wrong job token"));
            assert!(matches!(result, Err(Refusal::Because(text)) if text.contains("same job token")));
        }
    }

    #[test]
    fn strangers_are_bounded_in_number_and_time() {
        let (mut gate, start) = (gate(1), Instant::now());
        for conn in 0..MAX_STRANGERS as u64 {
            assert_eq!(gate.opened(conn, [0; 32], start), None);
        }
        assert_eq!(gate.opened(1000, [0; 32], start + Duration::from_secs(1)), Some(0));
        let late = gate.expired(start + HANDSHAKE_TIME);
        assert_eq!(late.len(), MAX_STRANGERS - 1);
        assert!(gate.strangers.contains_key(&1000));
    }

    #[test]
    fn an_answer_cannot_be_reflected() {
        let mut gate = gate(1);
        gate.opened(1, [9; 32], Instant::now());
        let (header, _) = open(&frame::encode(Kind::Proof, 2, 0, &[0; 32]));
        assert!(matches!(gate.frame(1, header, &[0; 32], &|_| false), GateStep::Drop(_)));
    }
}
