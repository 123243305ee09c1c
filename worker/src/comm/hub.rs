//! Rank 0's side of the control plane as a pure state machine: joining, agreement, liveness, and
//! the one root cause of a failure. `step(event, now)` returns the actions; [`super::server`]
//! performs them.
//!
//! ```text
//! Gathering --all joined--> Running --all left--> Done
//!     |  a rank is missing     |  lost, silent or aborting rank
//!     +------------------------+------------------------> Failed (first cause only, sent to all)
//! ```

use super::{
    auth::{Gate, GateStep, Nonce},
    ballot::{Ballot, Exchange, decode_value, encode_values, tally},
    error::{Cause, CauseKind, format_members, plural},
    frame::{self, Header, Kind},
    gpu_health::gpu_trouble,
    hang::{RankReport, deadlock, describe_others, stuck},
    pulse::Pulse,
    roster::{Member, Roster},
};
use crate::recorder::Vitals;
use std::{collections::BTreeMap, time::Instant};
use switchyard_worker_contract::event::{GpuTrouble, Stuck};

pub(super) enum Event<'a> {
    /// A connection was accepted.
    Opened(u64, Nonce),
    /// A complete frame arrived.
    Frame(u64, Header, &'a [u8]),
    /// The connection ended, or sent something other than frames.
    Closed(u64),
    /// Time passed. Comes after all frames that could be read.
    Tick,
    /// Rank 0 itself contributes a value.
    Value(Ballot),
    /// Rank 0 itself fails.
    Abort(Cause),
    /// Rank 0 itself leaves.
    Leave,
}

/// An action. Frames to peers precede notifications for rank 0 itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Output {
    Send(u64, Vec<u8>),
    /// Close after the peer has read everything sent.
    Close(u64),
    /// Close at once.
    Drop(u64),
    /// Raise the frame size limit.
    Trust(u64),
    Formed(Roster),
    Missing(Vec<u32>),
    /// The gathered values, in rank order.
    Agreed(Result<Vec<Vec<u8>>, String>),
    Failed(Cause),
    /// The longest-hung rank has changed.
    Stuck(Option<Stuck>),
    /// The job's worst GPU problem has changed.
    Gpu(Option<GpuTrouble>),
    Left,
    /// A connection was refused; for diagnostics.
    Refused(u64, String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Gathering,
    Running,
    Done,
    Failed,
}

#[derive(Default)]
struct Seat {
    conn: Option<u64>,
    member: Option<Member>,
    last_seen: Option<Instant>,
    /// Set while the rank waits for the others.
    ballot: Option<Ballot>,
    left: bool,
    /// Content of the last heartbeat.
    vitals: Option<Vitals>,
}

pub(super) struct Hub {
    gate: Gate,
    attempt: u32,
    join_time: JoinTime,
    /// Ranks, which exchange values and end the group, then parameter servers.
    seats: Vec<Seat>,
    world: usize,
    ranks: BTreeMap<u64, u32>,
    phase: Phase,
    pulse: Pulse,
    activity: Box<dyn Fn() -> String + Send>,
    vitals: Box<dyn Fn() -> Option<Vitals> + Send>,
    wall: fn() -> i64,
    /// Last reported value.
    stuck: Option<Stuck>,
    gpu: Option<GpuTrouble>,
    out: Vec<Output>,
}

/// Join window.
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinTime {
    pub start: Instant,
    /// If ranks are missing at this time, the group fails.
    pub deadline: Instant,
}

/// The hub's access to rank 0's own process.
pub(super) struct RankZero {
    pub member: Member,
    /// Describes what rank 0 is doing; called only when a failure is reported.
    pub activity: Box<dyn Fn() -> String + Send>,
    /// What a heartbeat of rank 0 would contain.
    pub vitals: Box<dyn Fn() -> Option<Vitals> + Send>,
    /// Wall clock in nanoseconds.
    pub wall: fn() -> i64,
}

/// Failure text for a lost control connection; the same on every rank.
pub(super) const CONNECTION_CLOSED: &str = "connection closed: the process ended or its network failed";

impl Hub {
    /// Creates a hub for the members of a group: `world` ranks, including rank 0, then servers.
    /// `attempt` is in every frame; peers of another attempt are refused.
    pub fn new(
        gate: Gate,
        (world, members, attempt): (u32, u32, u32),
        join_time: JoinTime,
        pulse: Pulse,
        zero: RankZero,
    ) -> Hub {
        let RankZero { member, activity, vitals, wall } = zero;
        let mut seats: Vec<Seat> = (0..members).map(|_| Seat::default()).collect();
        seats[0].member = Some(member);
        Hub {
            gate,
            attempt,
            join_time,
            seats,
            world: world as usize,
            ranks: BTreeMap::new(),
            phase: Phase::Gathering,
            pulse,
            activity,
            vitals,
            wall,
            stuck: None,
            gpu: None,
            out: Vec::new(),
        }
    }

    pub fn step(&mut self, event: Event<'_>, now: Instant) -> Vec<Output> {
        match event {
            Event::Opened(conn, nonce) => {
                if let Some(displaced) = self.gate.opened(conn, nonce, now) {
                    self.out.push(Output::Drop(displaced));
                }
            }
            Event::Frame(conn, header, payload) => match self.ranks.get(&conn).copied() {
                Some(rank) => self.member_frame(rank, header, payload, now),
                None => self.handshake_frame(conn, header, payload, now),
            },
            Event::Closed(conn) => self.closed(conn),
            Event::Tick => self.tick(now),
            Event::Value(ballot) => {
                self.seats[0].ballot = Some(ballot);
                self.settle_values();
            }
            Event::Abort(cause) => self.fail(cause),
            Event::Leave => {
                self.seats[0].left = true;
                self.settle_leave();
            }
        }
        std::mem::take(&mut self.out)
    }

    fn frame(&self, kind: Kind, payload: &[u8]) -> Vec<u8> {
        frame::encode(kind, self.attempt, 0, payload)
    }

    /// Sends to every connected member.
    fn broadcast(&mut self, kind: Kind, payload: &[u8]) {
        self.send(kind, payload, self.seats.len());
    }

    /// Sends to the first members that are connected.
    fn send(&mut self, kind: Kind, payload: &[u8], members: usize) {
        let bytes = self.frame(kind, payload);
        self.out.extend(
            self.seats[..members].iter().filter_map(|seat| seat.conn).map(|conn| Output::Send(conn, bytes.clone())),
        );
    }

    fn handshake_frame(&mut self, conn: u64, header: Header, payload: &[u8], now: Instant) {
        let seats = &self.seats;
        let step = self.gate.frame(conn, header, payload, &|peer| {
            seats.get(peer.rank as usize).is_some_and(|seat| seat.conn.is_some() || seat.member.is_some())
        });
        match step {
            GateStep::Send(bytes) => self.out.push(Output::Send(conn, bytes)),
            GateStep::Admit(bytes, peer) => {
                self.ranks.insert(conn, peer.rank);
                let seat = &mut self.seats[peer.rank as usize];
                seat.conn = Some(conn);
                seat.last_seen = Some(now);
                self.out.extend([Output::Send(conn, bytes), Output::Trust(conn)]);
            }
            GateStep::Refuse(bytes, why) => {
                self.out.extend([Output::Send(conn, bytes), Output::Close(conn), Output::Refused(conn, why)]);
            }
            GateStep::Drop(why) => self.out.extend([Output::Refused(conn, why), Output::Drop(conn)]),
        }
    }

    fn member_frame(&mut self, rank: u32, header: Header, payload: &[u8], now: Instant) {
        self.seats[rank as usize].last_seen = Some(now);
        let expected = match (header.kind, self.phase) {
            (Kind::Heartbeat, _) => {
                if let Ok(vitals) = serde_json::from_slice(payload) {
                    self.seats[rank as usize].vitals = Some(vitals);
                }
                true
            }
            (_, Phase::Failed | Phase::Done) => true,
            (Kind::Abort, _) => match serde_json::from_slice::<Cause>(payload) {
                Ok(cause) if (cause.origin_rank as usize) < self.seats.len() => {
                    self.fail(cause);
                    true
                }
                _ => false,
            },
            (Kind::Join, Phase::Gathering) => match serde_json::from_slice::<Member>(payload) {
                Ok(member) => {
                    self.join(rank, member);
                    true
                }
                Err(_) => false,
            },
            (Kind::Agree | Kind::Gather | Kind::AllGather, Phase::Running) if (rank as usize) < self.world => {
                match (Exchange::of(header.kind), decode_value(payload)) {
                    (Some(exchange), Some((subject, value))) if self.seats[rank as usize].ballot.is_none() => {
                        let sequence = header.sequence;
                        self.seats[rank as usize].ballot = Some(Ballot { exchange, sequence, subject, value });
                        self.settle_values();
                        true
                    }
                    _ => false,
                }
            }
            (Kind::Clock, Phase::Running) if payload.is_empty() => {
                if let Some(conn) = self.seats[rank as usize].conn {
                    let time = (self.wall)().to_le_bytes();
                    let response = frame::encode(Kind::Clock, self.attempt, header.sequence, &time);
                    self.out.push(Output::Send(conn, response));
                }
                true
            }
            (Kind::Leave, Phase::Running) if (rank as usize) < self.world => {
                self.seats[rank as usize].left = true;
                self.settle_leave();
                true
            }
            _ => false,
        };
        if !expected {
            self.fail(Cause::failed(rank, format!("sent an unexpected {:?}", header.kind)));
        }
    }

    fn join(&mut self, rank: u32, member: Member) {
        self.seats[rank as usize].member = Some(member);
        let members: Option<Vec<Member>> = self.seats.iter().map(|seat| seat.member.clone()).collect();
        let Some(members) = members else { return };
        let roster = Roster { members };
        let bytes = serde_json::to_vec(&roster).expect("invariant: a roster is plain data");
        self.phase = Phase::Running;
        self.broadcast(Kind::Roster, &bytes);
        self.out.push(Output::Formed(roster));
    }

    fn closed(&mut self, conn: u64) {
        self.gate.closed(conn);
        let Some(rank) = self.ranks.remove(&conn) else { return };
        let seat = &mut self.seats[rank as usize];
        seat.conn = None;
        if !seat.left {
            self.fail(Cause::failed(rank, CONNECTION_CLOSED));
        }
    }

    fn tick(&mut self, now: Instant) {
        for conn in self.gate.expired(now) {
            self.out.extend([Output::Refused(conn, "no proof of the token in 5 s".to_owned()), Output::Drop(conn)]);
        }
        let beat = self.pulse.tick(now);
        if matches!(self.phase, Phase::Done | Phase::Failed) {
            return;
        }
        if beat.send {
            self.broadcast(Kind::Heartbeat, &[]);
        }
        if beat.was_asleep {
            // This process was suspended for a while, so the silence says nothing about the others.
            self.seats.iter_mut().filter(|seat| seat.conn.is_some()).for_each(|seat| seat.last_seen = Some(now));
        }
        self.seats[0].vitals = (self.vitals)();
        let silent = self.seats.iter().position(|seat| {
            seat.conn.is_some()
                && !seat.left
                && seat.last_seen.is_some_and(|seen| now.saturating_duration_since(seen) > self.pulse.timeout())
        });
        if let Some(rank) = silent {
            let mut cause = Cause::failed(rank as u32, self.pulse.silence());
            if let Some(Vitals { doing, pid, .. }) = &self.seats[rank].vitals {
                let others = describe_others(&self.rank_reports(), cause.origin_rank);
                let others = if others.is_empty() { others } else { format!("; {others}") };
                cause.during = format!("last heard in {doing} (process {pid}){others}");
            }
            return self.fail(cause);
        }
        let reports = self.rank_reports();
        let (stuck, deadlock, gpu) = (stuck(&reports), deadlock(&reports), gpu_trouble(&reports));
        if self.stuck != stuck {
            self.stuck = stuck;
            self.out.push(Output::Stuck(stuck));
        }
        if self.gpu != gpu {
            self.gpu = gpu;
            self.out.push(Output::Gpu(gpu));
        }
        if let Some(cause) = deadlock {
            return self.fail(cause);
        }
        if self.phase == Phase::Gathering && now >= self.join_time.deadline {
            let missing: Vec<u32> =
                (0u32..).zip(&self.seats).filter(|(_, seat)| seat.member.is_none()).map(|(rank, _)| rank).collect();
            let text = format!(
                "did not arrive within {:.0} s ({} of {} {} missing: {})",
                (self.join_time.deadline - self.join_time.start).as_secs_f64(),
                missing.len(),
                self.seats.len(),
                plural(self.seats.len() as u32, self.world as u32),
                format_members(&missing, self.world as u32)
            );
            self.out.push(Output::Missing(missing.clone()));
            self.fail(Cause::failed(missing[0], text));
        }
    }

    fn rank_reports(&self) -> Vec<RankReport<'_>> {
        let node = |seat: &Seat| seat.member.as_ref().map_or(0, |member| member.node);
        self.seats[..self.world]
            .iter()
            .map(|seat| RankReport { node: node(seat), vitals: seat.vitals.as_ref() })
            .collect()
    }

    fn settle_values(&mut self) {
        let waiting = self.seats.iter().position(|seat| seat.ballot.is_some());
        let gone = self.seats.iter().position(|seat| seat.left);
        if let (Some(waiting), Some(gone)) = (waiting, gone) {
            let subject = self.seats[waiting].ballot.as_ref().map_or("", |ballot| &ballot.subject);
            let text = format!("left the group while rank {waiting} waits for agreement on {subject}");
            return self.fail(Cause::failed(gone as u32, text));
        }
        if !self.seats[..self.world].iter().all(|seat| seat.ballot.is_some()) {
            return;
        }
        let ballots: Vec<Ballot> = self.seats.iter_mut().filter_map(|seat| seat.ballot.take()).collect();
        let exchange = ballots[0].exchange;
        let result = tally(ballots);
        match &result {
            Ok(values) if exchange == Exchange::AllGather => {
                self.send(Kind::Gathered, &encode_values(values), self.world);
            }
            Ok(_) => self.send(Kind::Agreed, &[], self.world),
            Err(text) => self.send(Kind::Agreed, text.as_bytes(), self.world),
        }
        self.out.push(Output::Agreed(result));
    }

    fn settle_leave(&mut self) {
        self.settle_values();
        // Parameter servers stay for as long as there are ranks.
        if self.phase == Phase::Running && self.seats[..self.world].iter().all(|seat| seat.left) {
            self.phase = Phase::Done;
            self.broadcast(Kind::Goodbye, &[]);
            self.close_members();
            self.out.push(Output::Left);
        }
    }

    fn close_members(&mut self) {
        self.out.extend(self.seats.iter().filter_map(|seat| seat.conn).map(Output::Close));
    }

    fn fail(&mut self, mut cause: Cause) {
        if matches!(self.phase, Phase::Done | Phase::Failed) {
            return;
        }
        self.phase = Phase::Failed;
        if cause.kind == CauseKind::Hung {
            self.seats[0].vitals = (self.vitals)();
            cause.during = describe_others(&self.rank_reports(), cause.origin_rank);
        } else if cause.during.is_empty() {
            cause.during = (self.activity)();
        }
        if cause.host.is_empty()
            && let Some(member) = self.seats.get(cause.origin_rank as usize).and_then(|seat| seat.member.as_ref())
        {
            cause.host.clone_from(&member.host);
        }
        cause.text = cause.text.chars().take(4096).collect();
        let bytes = serde_json::to_vec(&cause).expect("invariant: a cause is plain data");
        self.broadcast(Kind::Failed, &bytes);
        self.close_members();
        self.out.push(Output::Failed(cause));
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
