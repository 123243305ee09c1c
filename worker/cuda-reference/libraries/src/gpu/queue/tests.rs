use super::*;
use crate::shadow::{Shadow, Stamp};
use std::collections::BTreeSet;
use std::ops::Range;

/// Names of the operations that run until `target` has passed.
fn run(queue: &mut Queue, target: &Clock) -> Vec<String> {
    std::iter::from_fn(|| queue.next(target)).map(|operation| operation.name.to_string()).collect()
}

fn put(queue: &mut Queue, stream: usize, name: &str) {
    queue.put(stream, name.into(), Work::Nothing);
}

#[test]
fn runs_only_what_is_waited_for() {
    let mut queue = Queue::new(0);
    let (a, b) = (queue.create(false), queue.create(false));
    put(&mut queue, a, "a1");
    put(&mut queue, b, "b1");
    let event = queue.now(a);
    put(&mut queue, a, "a2");
    assert_eq!(run(&mut queue, &event), ["a1"]);
    let all = queue.all();
    assert_eq!(run(&mut queue, &all), ["b1", "a2"]);
}

#[test]
fn a_stream_runs_after_the_event_it_waits_for_with_every_seed() {
    let mut orders = Vec::new();
    for seed in 0..20 {
        let mut queue = Queue::new(seed);
        let (a, b) = (queue.create(false), queue.create(false));
        put(&mut queue, a, "a1");
        let event = queue.now(a);
        put(&mut queue, b, "b1");
        queue.wait(b, &event);
        put(&mut queue, b, "b2");
        let all = queue.all();
        let order = run(&mut queue, &all);
        let at = |name| order.iter().position(|one| one == name);
        assert!(at("a1") < at("b2") && at("b1") < at("b2"), "{order:?}");
        orders.push(order);
    }
    assert!(orders.iter().any(|order| *order != orders[0]), "{:?}", orders[0]);
}

/// A call of a random program. Streams are numbers below [`STREAMS`].
#[derive(Debug, Clone)]
enum Call {
    Use { stream: usize, range: Range<u64>, writes: bool },
    Record { stream: usize, event: usize },
    Wait { stream: usize, event: usize },
    Synchronize { stream: usize },
}

/// The default stream, one ordered with it, and two that are not.
const STREAMS: usize = 4;
const EVENTS: usize = 3;

fn random_program(random: &mut Random) -> Vec<Call> {
    let call = |random: &mut Random| {
        let (kind, stream, event) = (random.below(10), random.below(STREAMS), random.below(EVENTS));
        let start = random.below(24) as u64;
        match kind {
            0..=5 => {
                let range = start..start + 1 + random.below(4) as u64;
                Call::Use { stream, range, writes: random.below(2) == 0 }
            }
            6 => Call::Record { stream, event },
            7 | 8 => Call::Wait { stream, event },
            _ => Call::Synchronize { stream },
        }
    };
    (0..12).map(|_| call(random)).collect()
}

fn is_blocking(stream: usize) -> bool {
    stream < 2
}

/// Whether two uses of the same bytes, at least one of them a write, are unordered. Computed from
/// predecessor sets, without clocks.
fn has_race(program: &[Call]) -> bool {
    let mut before = vec![BTreeSet::new(); STREAMS];
    let mut events: [Option<BTreeSet<usize>>; EVENTS] = Default::default();
    let mut host = BTreeSet::new();
    let mut uses: Vec<(&Range<u64>, bool, BTreeSet<usize>)> = Vec::new();
    let now = |before: &[BTreeSet<usize>], host: &BTreeSet<usize>, stream: usize| {
        let joins = |other: &usize| {
            let both_block = is_blocking(stream) && is_blocking(*other);
            *other == stream || both_block && (stream == DEFAULT || *other == DEFAULT)
        };
        let all = (0..STREAMS).filter(joins).flat_map(|other| before[other].iter().copied());
        all.chain(host.iter().copied()).collect::<BTreeSet<usize>>()
    };
    for call in program {
        match call {
            Call::Use { stream, range, writes } => {
                let known = now(&before, &host, *stream);
                before[*stream] = known.iter().copied().chain([uses.len()]).collect();
                uses.push((range, *writes, known));
            }
            Call::Record { stream, event } => events[*event] = Some(now(&before, &host, *stream)),
            Call::Wait { stream, event } => before[*stream].extend(events[*event].iter().flatten()),
            Call::Synchronize { stream } => host.extend(now(&before, &host, *stream)),
        }
    }
    let conflicts = |first: usize, second: usize| {
        let ((a, a_writes, _), (b, b_writes, known)) = (&uses[first], &uses[second]);
        a.start < b.end && b.start < a.end && (*a_writes || *b_writes) && !known.contains(&first)
    };
    (0..uses.len()).any(|second| (0..second).any(|first| conflicts(first, second)))
}

/// Whether the queue and the shadow find a race in one order.
fn finds_race(program: &[Call], seed: u64) -> bool {
    let mut queue = Queue::new(seed);
    (1..STREAMS).for_each(|stream| assert_eq!(queue.create(is_blocking(stream)), stream));
    let mut events: [Option<Clock>; EVENTS] = Default::default();
    let (mut shadow, mut found, mut uses) = (Shadow::default(), false, Vec::new());
    let mut run = |queue: &mut Queue, uses: &[(Range<u64>, bool)], target: &Clock| {
        while let Some(Operation { name, stream, index, clock, .. }) = queue.next(target) {
            let (range, writes) = &uses[name.parse::<usize>().unwrap()];
            found |= shadow.touch(range, *writes, &Stamp { stream, index, name }, &clock).is_some();
        }
        queue.host.join(target);
    };
    for call in program {
        match call {
            Call::Use { stream, range, writes } => {
                queue.put(*stream, uses.len().to_string().into(), Work::Nothing);
                uses.push((range.clone(), *writes));
            }
            Call::Record { stream, event } => events[*event] = Some(queue.now(*stream)),
            Call::Wait { stream, event } => events[*event].iter().for_each(|clock| queue.wait(*stream, clock)),
            Call::Synchronize { stream } => {
                let now = queue.now(*stream);
                run(&mut queue, &uses, &now);
            }
        }
    }
    let all = queue.all();
    run(&mut queue, &uses, &all);
    found
}

#[test]
fn exactly_the_races_are_found_in_every_order() {
    let mut random = Random::new(7);
    let mut racy = 0;
    for _ in 0..2000 {
        let program = random_program(&mut random);
        let expected = has_race(&program);
        racy += usize::from(expected);
        for seed in 0..4 {
            assert_eq!(finds_race(&program, seed), expected, "seed {seed}: {program:?}");
        }
    }
    assert!((400..1600).contains(&racy), "{racy} of 2000 programs have a race: the others would not be tried");
}
