//! Messages in every order that ranks can send, and some that they must not.

use super::assign;
use super::shard::{Push, Shard, ShardPlan, read_squares};
use crate::comm::{Handler, Message, MessageKind};
use crate::cpu::{Cpu, HalfKernel, Isa, Pool};
use crate::nn::{Bucket, Initial, Layout, Role};
use std::sync::Arc;
use switchyard_worker_contract::config::{DecayExclusions, Momentum, Optimizer, Rule, Updates};

const RATE: f64 = 0.5;

/// A server with two buckets of 16 weights that start at 1, and plain SGD.
fn shard_with(world: u32, updates: Updates) -> Shard {
    let mut layout = Layout::default();
    for name in ["a", "b"] {
        layout.push(name.to_owned(), &[4, 4], Role::Matrix, Initial::Constant(0.0));
    }
    let optimizer = Optimizer {
        rule: Rule::Sgd(Momentum { momentum: 0.0, nesterov: false }),
        learning_rate: RATE,
        weight_decay: 0.0,
        gradient_clip_norm: None,
        decay_exclusions: DecayExclusions::Nothing,
    };
    let bucket = |number: u32| {
        let (number_, at) = (number as usize, 16 * number as usize);
        let parts = (0..world).map(|rank| if rank == 0 { 0..16 } else { 16..16 }).collect();
        (number, Bucket { range: at..at + 16, first: number_, last: number_ }, parts)
    };
    let plan = ShardPlan { world, updates, buckets: vec![bucket(0), bucket(1)], cuts: Vec::new() };
    let cpu = Cpu { pool: Arc::new(Pool::new(1)), isa: Isa::Portable, half: HalfKernel::F32 };
    let mut shard = Shard::new(plan, &layout, &optimizer, cpu);
    for bucket in 0..2 {
        let put = Message::new(MessageKind::Put, bucket, 0, [0, u64::from(16 * bucket), 0]).with(&[1.0; 16]);
        assert_eq!(shard.handle(0, put), Ok(Vec::new()));
    }
    shard
}

fn shard(world: u32) -> Shard {
    shard_with(world, Updates::Synchronous)
}

fn started(world: u32) -> Shard {
    start(shard(world))
}

fn start(mut shard: Shard) -> Shard {
    let replies = shard.handle(0, Message::new(MessageKind::Start, 0, 0, [0; 3])).unwrap();
    assert_eq!(replies.iter().map(|(_, reply)| reply.kind).collect::<Vec<_>>(), [MessageKind::Started]);
    shard
}

fn push(bucket: u32, step: u64, gradient: f32, direct: bool) -> Message {
    let numbers = Push { learning_rate: RATE, scale: 1.0, direct, staleness: 0, meet: false }.numbers();
    Message::new(MessageKind::Push, bucket, step, numbers).with(&[gradient; 16])
}

/// The first weight in each reply, by rank.
fn weights(replies: Result<Vec<(u32, Message)>, String>) -> Vec<(u32, u32, f32)> {
    let of = |(rank, reply): (u32, Message)| {
        assert_eq!(reply.kind, MessageKind::Weights);
        (rank, reply.bucket, read_squares(&reply, &mut [0.0; 8])[0])
    };
    replies.unwrap().into_iter().map(of).collect()
}

#[test]
fn a_bucket_is_updated_once_all_ranks_have_pushed() {
    let mut shard = started(2);
    for step in 1..=3 {
        for bucket in [1, 0] {
            assert_eq!(shard.handle(1, push(bucket, step, 1.0, true)), Ok(Vec::new()));
            let expected = 1.0 - step as f32 * 2.0;
            let got = weights(shard.handle(0, push(bucket, step, 3.0, true)));
            assert_eq!(got, [(0, bucket, expected), (1, bucket, expected)]);
        }
    }
}

#[test]
fn clipped_gradients_wait_for_the_decision_of_rank_0() {
    let mut shard = started(2);
    let apply = |kind, step| Message::new(kind, 0, step, push(0, 1, 0.0, false).numbers);
    for bucket in 0..2 {
        assert_eq!(shard.handle(0, push(bucket, 1, 1.0, false)), Ok(Vec::new()));
        let replies = shard.handle(1, push(bucket, 1, 1.0, false)).unwrap();
        let mut squares = [0.0; 2];
        assert!(read_squares(&replies[0].1, &mut squares).is_empty());
        assert_eq!((replies.len(), replies[0].1.kind, squares), (2, MessageKind::Sums, [64.0, 0.0]));
        if bucket == 0 {
            assert!(shard.handle(0, apply(MessageKind::Apply, 1)).is_err(), "a bucket is missing");
        }
    }
    assert!(shard.handle(1, apply(MessageKind::Apply, 1)).is_err(), "rank 1 does not decide");
    let replies = weights(shard.handle(0, apply(MessageKind::Apply, 1)));
    assert_eq!(replies, [(0, 0, 0.0), (1, 0, 0.0), (0, 1, 0.0), (1, 1, 0.0)]);
    assert!(shard.handle(0, apply(MessageKind::Apply, 1)).is_err(), "a step is applied once");
}

#[test]
fn a_skipped_step_changes_nothing() {
    let mut shard = started(1);
    for (step, kind) in [(1, MessageKind::Skip), (2, MessageKind::Apply)] {
        for bucket in 0..2 {
            assert_eq!(shard.handle(0, push(bucket, step, 1.0, false)).unwrap().len(), 1);
        }
        let replies = shard.handle(0, Message::new(kind, 0, step, push(0, 1, 0.0, false).numbers)).unwrap();
        assert_eq!(replies.len(), if kind == MessageKind::Skip { 0 } else { 2 });
    }
    let get = Message::new(MessageKind::Get, 1, 0, [0, 20, 2]);
    assert_eq!(shard.handle(0, get).unwrap()[0].1.values(), [0.5; 2], "one step of two");
}

#[test]
fn gradients_that_would_count_twice_or_never_are_refused() {
    let refused = |shard: &mut Shard, message: Message| shard.handle(0, message).unwrap_err();
    let text = refused(&mut shard(2), push(0, 1, 1.0, true));
    assert_eq!(text, "gradients of step 1 before the weights");
    let mut shard = started(2);
    assert_eq!(
        refused(&mut shard, push(0, 2, 1.0, true)),
        "gradients of step 2 for bucket 0 out of order: step 1 is due"
    );
    shard.handle(0, push(0, 1, 1.0, true)).unwrap();
    let text = refused(&mut shard, push(0, 1, 1.0, true));
    assert_eq!(text, "gradients of step 1 for bucket 0 a second time: step 1 is due");
    shard.handle(1, push(0, 1, 1.0, true)).unwrap();
    let text = refused(&mut shard, push(0, 1, 1.0, true));
    assert_eq!(text, "gradients of step 1 for bucket 0 out of order: step 2 is due");
    assert_eq!(refused(&mut shard, push(7, 1, 1.0, true)), "Push for bucket 7; this server has [0, 1]");
    let short = push(1, 1, 1.0, true).with(&[0.0; 3]);
    assert_eq!(refused(&mut shard, short), "3 gradients for bucket 1, which has 16");
    let get = Message::new(MessageKind::Get, 1, 0, [0, 20, 1000]);
    assert_eq!(refused(&mut shard, get), "Get of 20..1020 in bucket 1");
    let weights = Message::new(MessageKind::Weights, 1, 0, [0; 3]);
    assert_eq!(refused(&mut shard, weights), "Weights, which only a server sends");
}

#[test]
fn servers_have_about_equally_many_weights() {
    let bucket = |range| Bucket { range, first: 0, last: 0 };
    let buckets = [bucket(0..100), bucket(100..130), bucket(130..190), bucket(190..220)];
    assert_eq!(assign(&buckets, 1), [0; 4]);
    assert_eq!(assign(&buckets, 2), [0, 1, 1, 1]);
    assert_eq!(assign(&buckets, 4), [0, 2, 1, 3]);
}

/// A rank's push of both buckets; returns ranks, steps, staleness, and first weights of bucket 0.
fn push_all(shard: &mut Shard, rank: u32, step: u64, (staleness, meet): (u32, bool)) -> Vec<(u32, u64, u64, f32)> {
    let numbers = Push { learning_rate: RATE, scale: 1.0, direct: false, staleness, meet }.numbers();
    let push = |bucket| Message::new(MessageKind::Push, bucket, step, numbers).with(&[1.0; 16]);
    assert_eq!(shard.handle(rank, push(1)), Ok(Vec::new()), "half of a push");
    let replies = shard.handle(rank, push(0)).unwrap();
    let first = replies.iter().filter(|(_, reply)| reply.bucket == 0);
    first.map(|(rank, reply)| (*rank, reply.step, reply.step - reply.numbers[1], reply.values()[0])).collect()
}

#[test]
fn a_rank_waits_only_where_the_slowest_is_too_far_behind() {
    let mut shard = start(shard_with(2, Updates::Asynchronous { max_staleness: 2 }));
    let bound = (2, false);
    assert_eq!(push_all(&mut shard, 0, 1, bound), [(0, 1, 1, 0.5)]);
    assert_eq!(push_all(&mut shard, 0, 2, bound), [(0, 2, 2, 0.0)]);
    assert_eq!(push_all(&mut shard, 0, 3, bound), [], "3 steps ahead");
    // The first push of the slow rank releases both; each is applied once.
    assert_eq!(push_all(&mut shard, 1, 1, bound), [(0, 3, 2, -1.0), (1, 1, 0, -1.0)]);
    assert_eq!(push_all(&mut shard, 1, 2, bound), [(1, 2, 0, -1.5)]);
}

#[test]
fn ranks_that_meet_get_the_same_weights() {
    let mut shard = start(shard_with(3, Updates::Asynchronous { max_staleness: 9 }));
    assert_eq!(push_all(&mut shard, 2, 1, (9, false)).len(), 1);
    for rank in [2, 0] {
        let step = if rank == 2 { 2 } else { 1 };
        push_all(&mut shard, rank, step, (0, false));
    }
    push_all(&mut shard, 0, 2, (0, false));
    push_all(&mut shard, 1, 1, (9, false));
    let met = push_all(&mut shard, 1, 2, (0, false));
    assert_eq!(met, [(0, 2, 0, -2.0), (1, 2, 0, -2.0), (2, 2, 0, -2.0)]);
}

/// Rank 0 is ahead, rank 1 requests a meeting: at the first step that neither has begun.
#[test]
fn a_meeting_is_announced_before_any_rank_begins_its_step() {
    let mut shard = start(shard_with(2, Updates::Asynchronous { max_staleness: 9 }));
    let announced = |shard: &mut Shard, rank: u32, step: u64, meet: bool| {
        let numbers = Push { learning_rate: RATE, scale: 1.0, direct: false, staleness: 9, meet }.numbers();
        let mut push =
            |bucket| shard.handle(rank, Message::new(MessageKind::Push, bucket, step, numbers).with(&[0.0; 16]));
        push(1).unwrap();
        push(0).unwrap()[0].1.numbers[2]
    };
    assert_eq!([1, 2, 3].map(|step| announced(&mut shard, 0, step, false)), [0; 3]);
    // Rank 0 may have begun step 4.
    assert_eq!(announced(&mut shard, 1, 1, true), 5);
    assert_eq!(announced(&mut shard, 0, 4, false), 5);
    assert_eq!([2, 3, 4].map(|step| announced(&mut shard, 1, step, true)), [5; 3]);
    assert_eq!(push_all(&mut shard, 0, 5, (0, false)), []);
    assert_eq!(push_all(&mut shard, 1, 5, (0, false)).len(), 2);
    assert_eq!(announced(&mut shard, 0, 6, false), 0, "it is over");
}

#[test]
fn geo_servers_add_changes() {
    let mut shard = start(shard_with(2, Updates::Geo { every_steps: 4, max_staleness: 1 }));
    assert_eq!(push_all(&mut shard, 0, 1, (1, false)), [(0, 1, 1, 0.0)]);
    assert_eq!(push_all(&mut shard, 1, 1, (1, false)), [(1, 1, 0, -1.0)]);
}

#[test]
fn a_rank_that_pushes_twice_is_refused_by_asynchronous_servers() {
    let mut shard = start(shard_with(2, Updates::Asynchronous { max_staleness: 2 }));
    push_all(&mut shard, 0, 1, (2, false));
    let text = shard.handle(0, push(0, 1, 1.0, false)).unwrap_err();
    assert_eq!(text, "gradients of step 1 for bucket 0 out of order: step 2 is due");
    shard.handle(0, push(0, 2, 1.0, false)).unwrap();
    let text = shard.handle(0, push(0, 2, 1.0, false)).unwrap_err();
    assert_eq!(text, "gradients of step 2 for bucket 0 a second time: step 2 is due");
}
