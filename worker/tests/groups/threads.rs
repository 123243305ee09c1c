//! Ranks as threads of one process, as in SingleProcess mode: group state must not be process-wide.
//!
//! Other collective tests use threads too where they can; these run several groups at the same
//! time.

use crate::collective_support::{alone, group_with, mappings_of_buckets, open_handles};
use switchyard_worker::comm::{Cause, Force, GroupConfig, Options, Wire};

const WORLD: u32 = 4;
const BUCKETS: [usize; 3] = [100_000, 200, 5000];
const TWO_LANES: Options = Options { lanes: 2, wire: Wire::F32, exact_from: u32::MAX, probe: false, algorithm: None };

/// Shared memory, TCP between all, and both.
const PATHS: [fn(&mut GroupConfig); 3] =
    [|_| {}, |c| c.transport = Force::Tcp, |c| c.host_id = format!("host-{}", c.rank() / 2)];

/// Four threads reduce in two lanes, 40 times or until one of them fails. Returns the root cause
/// that each of them saw.
fn threads(change: fn(&mut GroupConfig), fail: bool) -> Vec<Option<Cause>> {
    group_with(WORLD, TWO_LANES, change, &BUCKETS, |mut comm| {
        for round in 0..40 {
            for b in 0..BUCKETS.len() {
                let value = (comm.group.rank() + round) as f32;
                comm.reducer.bucket_mut(b).fill(value);
                comm.reducer.start(b);
                if fail && round == 20 && comm.group.rank() == 2 {
                    // The rank's thread ends in the middle of the run, and its communicator is
                    // dropped with it.
                    return None;
                }
            }
            for b in 0..BUCKETS.len() {
                if let Err(error) = comm.reducer.wait(b) {
                    return error.cause().cloned();
                }
                let sum = (6 + WORLD * round) as f32;
                assert!(comm.reducer.bucket(b).iter().all(|x| *x == sum), "round {round}, bucket {b}");
            }
        }
        comm.leave().unwrap();
        None
    })
}

#[test]
fn several_thread_groups_coexist() {
    let _alone = alone();
    let before = open_handles();
    std::thread::scope(|scope| {
        let groups: Vec<_> = PATHS.into_iter().map(|change| scope.spawn(move || threads(change, false))).collect();
        for group in groups {
            assert_eq!(group.join().unwrap(), vec![None; WORLD as usize]);
        }
    });
    assert_eq!((open_handles(), mappings_of_buckets()), (before, 0));
}

#[test]
fn a_failing_thread_ends_only_its_own_group() {
    let _alone = alone();
    let before = open_handles();
    std::thread::scope(|scope| {
        let healthy: Vec<_> = PATHS.into_iter().map(|change| scope.spawn(move || threads(change, false))).collect();
        for change in PATHS {
            let causes = threads(change, true);
            assert_eq!(causes[2], None);
            for rank in [0, 1, 3] {
                let cause = causes[rank].as_ref().unwrap();
                assert_eq!((cause.origin_rank, cause.text.as_str()), (2, "gave up without saying why"), "{causes:?}");
            }
        }
        for group in healthy {
            assert_eq!(group.join().unwrap(), vec![None; WORLD as usize]);
        }
    });
    assert_eq!((open_handles(), mappings_of_buckets()), (before, 0));
}
