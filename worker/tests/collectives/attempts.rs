//! A process of an older attempt that still holds the token cannot join: a job's token outlives its
//! attempts.

use crate::collective_support::{Rank, TIMEOUT, config, free_port};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use switchyard_worker::comm::{CommError, GroupConfig, Options};

/// Tries per kind of intruder.
const TRIES: usize = 10;

/// Ends the rounds even if the test fails, so that it does not hang.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn of_attempt(attempt: u32, rank: u32, port: u16) -> GroupConfig {
    GroupConfig { attempt, ..config(rank, 2, port) }
}

#[test]
fn an_old_attempt_is_always_refused_and_the_new_one_continues() {
    let port = free_port();
    let over = AtomicBool::new(false);
    let member = |rank: u32| {
        let mut comm = Rank::connect(&of_attempt(2, rank, port), &[100], &Options::default()).unwrap();
        let mut sums = 0u64;
        loop {
            // Both ranks stop in the same round, because they agree on it through the sum.
            let end = rank == 0 && over.load(Ordering::Acquire);
            comm.reducer.bucket_mut(0).fill(1.0);
            comm.reducer.bucket_mut(0)[0] = f32::from(u8::from(end));
            comm.reducer.start(0);
            comm.reducer.wait(0).unwrap();
            assert_eq!(comm.reducer.bucket_mut(0)[1], 2.0, "round {sums}");
            sums += 1;
            if comm.reducer.bucket_mut(0)[0] > 0.0 {
                comm.leave().unwrap();
                return sums;
            }
        }
    };
    std::thread::scope(|scope| {
        let ranks = [scope.spawn(move || member(0)), scope.spawn(move || member(1))];
        let end = StopOnDrop(&over);
        let intrude = |attempt: u32, limit: Duration| {
            let intruder = GroupConfig { connect_timeout: limit, ..of_attempt(attempt, 1, port) };
            Rank::connect(&intruder, &[100], &Options::default()).err().unwrap()
        };
        for _ in 0..TRIES {
            let error = intrude(1, TIMEOUT);
            assert!(matches!(error, CommError::Refused { .. }), "{error}");
            assert!(error.to_string().contains("attempt 1 is over, this is attempt 2"), "{error}");
            // The next attempt waits for this one to end, up to its timeout.
            let error = intrude(3, Duration::from_millis(30));
            assert!(matches!(error, CommError::Unreachable { .. }), "{error}");
        }
        drop(end);
        let [zero, one] = ranks.map(|rank| rank.join().unwrap());
        assert_eq!(zero, one);
    });
}
