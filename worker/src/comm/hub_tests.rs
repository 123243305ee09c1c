//! Tests the hub without sockets: events in, outputs out, time as a parameter.

use super::*;
use crate::comm::{
    auth::{Claims, Connector, ConnectorStep, GatePolicy, Key, Purpose},
    ballot::{decode_values, encode_value},
    config::Token,
    error::CauseKind,
    frame::FrameReader,
};
use crate::recorder::Stall;
use std::time::Duration;
use switchyard_worker_contract::config::OnHang;
use switchyard_worker_contract::recorder::{Entry, Operation};

const WORLD: u32 = 3;

fn member(host: &str) -> Member {
    Member { host: host.to_owned(), host_id: host.to_owned(), pid: 1, cpus: vec![1], quota: 0, node: 0, data: None }
}

/// Heartbeat of a rank. If it waits, it has waited for too long.
fn vitals(doing: &str, waits: bool, count: u64) -> Vitals {
    let entry = Entry { operation: Operation::Between, step: 5, index: 0, since_us: 0 };
    let share = if waits { 1.1 } else { 0.1 };
    let stall = Some(Stall { entry, since: 0, share, on_hang: OnHang::Restart });
    Vitals { pid: 7, doing: doing.to_owned(), waits, stall, count, gpu: None }
}

fn beat(vitals: &Vitals) -> Vec<u8> {
    serde_json::to_vec(vitals).unwrap()
}

struct World {
    hub: Hub,
    now: Instant,
    members: u32,
}

fn open(bytes: &[u8]) -> (Header, Vec<u8>) {
    let mut reader = FrameReader::new(1 << 20);
    match reader.push(&bytes[..frame::HEADER]).unwrap() {
        Some(frame) => frame,
        None => reader.push(&bytes[frame::HEADER..]).unwrap().unwrap(),
    }
}

impl World {
    fn new() -> World {
        World::with_servers(0)
    }

    fn with_servers(servers: u32) -> World {
        let members = WORLD + servers;
        let now = Instant::now();
        let key = Key::derive(&Token::new([7; 32]), "job", 1);
        let policy = GatePolicy { purpose: Purpose::Control, me: 0, world: members, attempt: 1 };
        let hub = Hub::new(
            Gate::new(key, policy),
            (WORLD, members, 1),
            JoinTime { start: now, deadline: now + Duration::from_secs(60) },
            Pulse::new(Duration::from_secs(10), now),
            RankZero {
                member: member("zero"),
                activity: Box::new(|| "the test".to_owned()),
                vitals: Box::new(|| Some(vitals("step 5: waiting for the all-reduce of bucket 1", true, 90))),
                wall: || 77,
            },
        );
        World { hub, now, members }
    }

    fn step(&mut self, event: Event<'_>) -> Vec<Output> {
        self.hub.step(event, self.now)
    }

    fn send(&mut self, conn: u64, kind: Kind, payload: &[u8]) -> Vec<Output> {
        let header = Header::control(kind, 1, 1, payload);
        self.step(Event::Frame(conn, header, payload))
    }

    /// Admits `rank` on the connection with the same number.
    fn admit(&mut self, rank: u32) {
        let claims = Claims { purpose: Purpose::Control, from: rank, to: 0, world: self.members, attempt: 1, lane: 0 };
        let conn = u64::from(rank);
        self.step(Event::Opened(conn, [3; 32]));
        let (mut connector, mut bytes) = Connector::new(Key::derive(&Token::new([7; 32]), "job", 1), claims, [5; 32]);
        loop {
            let (header, payload) = open(&bytes);
            let outputs = self.step(Event::Frame(conn, header, &payload));
            let Output::Send(_, reply) = &outputs[0] else { panic!("{outputs:?}") };
            let (header, payload) = open(reply);
            match connector.frame(header, &payload) {
                ConnectorStep::Send(next) => bytes = next,
                ConnectorStep::Admitted => return assert_eq!(outputs[1], Output::Trust(conn)),
                ConnectorStep::Refused(why) => panic!("{why:?}"),
            }
        }
    }

    fn join(&mut self, rank: u32) -> Vec<Output> {
        self.admit(rank);
        let join = serde_json::to_vec(&member(&format!("host-{rank}"))).unwrap();
        self.send(rank.into(), Kind::Join, &join)
    }

    fn formed() -> World {
        let mut world = World::new();
        assert!(world.join(1).is_empty());
        let outputs = world.join(2);
        assert!(outputs.iter().any(|o| matches!(o, Output::Formed(roster) if roster.members.len() == 3)));
        world
    }

    /// Advances time; every rank in `alive` keeps sending heartbeats.
    fn pass(&mut self, seconds: u64, alive: &[u64]) -> Vec<Output> {
        let mut all = Vec::new();
        for _ in 0..seconds * 2 {
            self.now += Duration::from_millis(500);
            for conn in alive {
                all.extend(self.send(*conn, Kind::Heartbeat, &[]));
            }
            all.extend(self.step(Event::Tick));
        }
        all
    }
}

fn failure(outputs: &[Output]) -> Option<&Cause> {
    outputs.iter().find_map(|output| match output {
        Output::Failed(cause) => Some(cause),
        _ => None,
    })
}

/// Connections that were sent a frame of this kind.
fn recipients(outputs: &[Output], kind: Kind) -> Vec<u64> {
    let mut conns: Vec<u64> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Send(conn, bytes) if open(bytes).0.kind == kind => Some(*conn),
            _ => None,
        })
        .collect();
    conns.sort_unstable();
    conns.dedup();
    conns
}

#[test]
fn the_roster_is_broadcast_when_the_last_rank_joins() {
    let mut world = World::new();
    assert!(world.join(2).is_empty());
    let outputs = world.join(1);
    assert_eq!(recipients(&outputs, Kind::Roster), [1, 2]);
}

#[test]
fn ranks_absent_at_the_deadline_are_reported_as_missing() {
    let mut world = World::new();
    world.join(1);
    let outputs = world.pass(61, &[1]);
    assert!(outputs.contains(&Output::Missing(vec![2])));
    assert_eq!(recipients(&outputs, Kind::Failed), [1]);
    let cause = failure(&outputs).unwrap();
    assert_eq!(cause.origin_rank, 2);
    assert!(cause.text.contains("did not arrive within 60 s"), "{cause}");
}

#[test]
fn parameter_servers_take_no_part_in_agreements_and_leave_with_the_ranks() {
    let mut world = World::with_servers(1);
    world.join(1);
    world.join(3);
    assert_eq!(recipients(&world.join(2), Kind::Roster), [1, 2, 3]);
    let ballot = || Ballot { exchange: Exchange::Agree, sequence: 1, subject: "a".into(), value: b"1".to_vec() };
    world.step(Event::Value(ballot()));
    world.send(1, Kind::Agree, &encode_value("a", b"1"));
    let outputs = world.send(2, Kind::Agree, &encode_value("a", b"1"));
    assert!(outputs.contains(&Output::Agreed(Ok(Vec::new()))));
    assert_eq!(recipients(&outputs, Kind::Agreed), [1, 2]);
    [1, 2].iter().for_each(|rank| drop(world.send(*rank, Kind::Leave, &[])));
    let outputs = world.step(Event::Leave);
    assert_eq!(recipients(&outputs, Kind::Goodbye), [1, 2, 3]);
    assert!(outputs.contains(&Output::Left));
}

#[test]
fn a_parameter_server_that_is_lost_or_votes_is_the_cause() {
    let formed = || {
        let mut world = World::with_servers(1);
        [1, 2, 3].iter().for_each(|member| drop(world.join(*member)));
        world
    };
    let lost = formed().step(Event::Closed(3));
    let vote = formed().send(3, Kind::Agree, &encode_value("a", b"1"));
    let leave = formed().send(3, Kind::Leave, &[]);
    for outputs in [lost, vote, leave] {
        assert_eq!(failure(&outputs).unwrap().origin_rank, 3);
        assert!(recipients(&outputs, Kind::Failed).starts_with(&[1, 2]));
    }
}

#[test]
fn a_rank_without_heartbeats_fails() {
    let mut world = World::formed();
    let outputs = world.pass(30, &[1, 2]);
    assert_eq!(failure(&outputs), None);
    assert_eq!(recipients(&outputs, Kind::Heartbeat), [1, 2]);
    let outputs = world.pass(12, &[2]);
    let cause = failure(&outputs).unwrap();
    assert_eq!((cause.origin_rank, cause.host.as_str(), cause.during.as_str()), (1, "host-1", "the test"));
    assert!(cause.text.contains("no sign of life for 10.0 s"));
}

#[test]
fn a_silent_rank_is_reported_with_its_last_operation_and_what_the_others_wait_for() {
    let mut world = World::formed();
    world.send(1, Kind::Heartbeat, &beat(&vitals("step 5: forward pass of micro-batch 0", false, 80)));
    world.send(2, Kind::Heartbeat, &beat(&vitals("step 5: waiting for the all-reduce of bucket 1", true, 91)));
    let outputs = world.pass(12, &[2]);
    let cause = failure(&outputs).unwrap();
    let expected = "last heard in step 5: forward pass of micro-batch 0 (process 7); \
                    ranks 0, 2: step 5: waiting for the all-reduce of bucket 1";
    assert_eq!((cause.origin_rank, cause.during.as_str()), (1, expected));
}

#[test]
fn a_hung_rank_is_reported_with_what_the_others_wait_for() {
    let mut world = World::formed();
    world.send(2, Kind::Heartbeat, &beat(&vitals("validation after step 5: batch 3", false, 91)));
    let outputs = world.send(1, Kind::Abort, &serde_json::to_vec(&Cause::hung(1, "stands still")).unwrap());
    let cause = failure(&outputs).unwrap();
    assert_eq!((cause.origin_rank, cause.kind, cause.text.as_str()), (1, CauseKind::Hung, "stands still"));
    assert_eq!(cause.during, "rank 0: step 5: waiting for the all-reduce of bucket 1");
    assert_eq!(recipients(&outputs, Kind::Failed), [1, 2]);
}

#[test]
fn in_a_deadlock_the_rank_that_is_behind_is_named() {
    let mut world = World::formed();
    world.send(1, Kind::Heartbeat, &beat(&vitals("step 5: waiting for the all-reduce of bucket 0", true, 70)));
    world.send(2, Kind::Heartbeat, &beat(&vitals("step 5: backward pass of micro-batch 0", false, 60)));
    assert_eq!(failure(&world.step(Event::Tick)), None, "rank 2 computes");
    world.send(2, Kind::Heartbeat, &beat(&vitals("step 5: waiting for the all-reduce of bucket 1", true, 90)));
    let outputs = world.step(Event::Tick);
    let cause = failure(&outputs).unwrap();
    assert_eq!((cause.origin_rank, cause.kind), (1, CauseKind::Hung), "{cause}");
    assert!(cause.text.contains("this one is behind, in step 5: waiting for the all-reduce of bucket 0"), "{cause}");
}

#[test]
fn a_suspended_rank_zero_blames_no_other_rank() {
    let mut world = World::formed();
    world.pass(2, &[1, 2]);
    world.now += Duration::from_secs(3600);
    assert_eq!(failure(&world.step(Event::Tick)), None);
    assert_eq!(failure(&world.pass(5, &[1, 2])), None);
}

#[test]
fn only_the_first_failure_counts() {
    let mut world = World::formed();
    let cause = Cause::failed(2, "not a number");
    let outputs = world.send(2, Kind::Abort, &serde_json::to_vec(&cause).unwrap());
    assert_eq!(failure(&outputs).unwrap().text, "not a number");
    assert_eq!(recipients(&outputs, Kind::Failed), [1, 2]);
    // Peers are notified before rank 0, which may exit at once.
    assert!(matches!(outputs.last(), Some(Output::Failed(_))));
    assert!(world.step(Event::Closed(1)).is_empty());
    assert!(world.step(Event::Abort(Cause::stopped(0, 2))).is_empty());
}

#[test]
fn a_closed_connection_is_a_failure_unless_the_rank_has_left() {
    let mut world = World::formed();
    assert_eq!(failure(&world.step(Event::Closed(1))).unwrap().kind, CauseKind::Failed);
    let mut world = World::formed();
    assert!(world.send(1, Kind::Leave, &[]).is_empty());
    assert!(world.step(Event::Closed(1)).is_empty());
    assert!(world.send(2, Kind::Leave, &[]).is_empty());
    let outputs = world.step(Event::Leave);
    assert_eq!(recipients(&outputs, Kind::Goodbye), [2]);
    assert!(outputs.contains(&Output::Left));
}

#[test]
fn agreement_needs_every_rank_and_equal_bytes() {
    let mut world = World::formed();
    assert!(world.send(1, Kind::Agree, &encode_value("digest", &[1, 2])).is_empty());
    assert!(world.step(Event::Value(ballot(Exchange::Agree, &[1, 2]))).is_empty());
    let outputs = world.send(2, Kind::Agree, &encode_value("digest", &[1, 3, 0]));
    assert_eq!(recipients(&outputs, Kind::Agreed), [1, 2]);
    let expected = "the ranks disagree on digest: ranks 0, 1 have 0x0102; rank 2 has 0x010300";
    assert!(outputs.contains(&Output::Agreed(Err(expected.to_owned()))), "{outputs:?}");
}

fn ballot(exchange: Exchange, value: &[u8]) -> Ballot {
    Ballot { exchange, sequence: 1, subject: "digest".to_owned(), value: value.to_vec() }
}

#[test]
fn values_are_gathered_in_rank_order_by_all_or_by_rank_zero() {
    for (exchange, kind, response) in
        [(Exchange::AllGather, Kind::AllGather, Kind::Gathered), (Exchange::Gather, Kind::Gather, Kind::Agreed)]
    {
        let mut world = World::formed();
        assert!(world.send(2, kind, &encode_value("digest", &[2; 300])).is_empty());
        assert!(world.step(Event::Value(ballot(exchange, &[]))).is_empty());
        let outputs = world.send(1, kind, &encode_value("digest", &[1]));
        let values = vec![vec![], vec![1], vec![2; 300]];
        assert_eq!(recipients(&outputs, response), [1, 2]);
        let sent = outputs.iter().find_map(|output| match output {
            Output::Send(1, bytes) => Some(open(bytes).1),
            _ => None,
        });
        let expected = if exchange == Exchange::AllGather { values.clone() } else { Vec::new() };
        assert_eq!(sent.and_then(|bytes| decode_values(&bytes)), Some(expected));
        assert!(outputs.contains(&Output::Agreed(Ok(values))), "{outputs:?}");
    }
    assert_eq!(decode_values(&[1, 0, 0, 0]), None, "a byte is missing");
    assert_eq!(decode_values(&[0, 0]), None);
}

#[test]
fn mismatched_exchanges_name_the_rank() {
    let mut world = World::formed();
    world.send(1, Kind::AllGather, &encode_value("digest", &[1]));
    world.send(2, Kind::Agree, &encode_value("digest", &[1]));
    let outputs = world.step(Event::Value(ballot(Exchange::AllGather, &[1])));
    let named = |output: &Output| matches!(output, Output::Agreed(Err(text)) if text.starts_with("rank 2 asks for"));
    assert!(outputs.iter().any(named), "{outputs:?}");
}

#[test]
fn a_clock_request_gets_the_time() {
    let mut world = World::formed();
    let header = Header::control(Kind::Clock, 1, 9, &[]);
    let outputs = world.step(Event::Frame(2, header, &[]));
    let [Output::Send(2, bytes)] = outputs.as_slice() else { panic!("{outputs:?}") };
    let (header, payload) = open(bytes);
    assert_eq!((header.kind, header.sequence, payload.as_slice()), (Kind::Clock, 9, &77i64.to_le_bytes()[..]));
}

#[test]
fn unexpected_frames_fail_their_sender() {
    for (kind, payload) in [
        (Kind::Agree, &b"\xff\xff"[..]),
        (Kind::Join, b"{}"),
        (Kind::Clock, b"1"),
        (Kind::Roster, b""),
        (Kind::Abort, b"{\"originRank\":9,\"kind\":\"failed\",\"text\":\"\"}"),
    ] {
        let mut world = World::formed();
        assert_eq!(failure(&world.send(2, kind, payload)).unwrap().origin_rank, 2);
    }
    // An unauthenticated peer's frames only cost it its connection.
    let mut world = World::formed();
    world.step(Event::Opened(9, [0; 32]));
    let outputs = world.send(9, Kind::Abort, b"{}");
    assert!(failure(&outputs).is_none() && outputs.contains(&Output::Drop(9)), "{outputs:?}");
}

#[test]
fn a_cause_with_an_unknown_origin_does_not_panic() {
    let outputs = World::formed().step(Event::Abort(Cause::failed(99, "confused")));
    assert_eq!(failure(&outputs).unwrap().origin_rank, 99);
}
