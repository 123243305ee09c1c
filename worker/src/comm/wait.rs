//! Waiting strategy: spin briefly, yield a bounded number of times, then let the kernel park the
//! thread.
//!
//! Spinning pays off only on a CPU that nothing else could use meanwhile. A wait is in the
//! foreground when this rank has nothing else to do: its compute thread is waiting, or is parked
//! behind the communication thread. In the background, in parallel with a computing thread,
//! spinning would steal that thread's time (both may be pinned to one CPU), so the communication
//! thread spins there only if there are enough CPUs for two threads per rank.

use std::time::{Duration, Instant};

/// Longest sleep between checks of the group's state.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(100);
const LONGEST_SPIN: Duration = Duration::from_micros(20);
const SHORTEST_SPIN: Duration = Duration::from_nanos(500);
const SPIN_WITHOUT_CPU: Duration = Duration::from_nanos(200);
const FOREGROUND_YIELDS: u32 = 200;
const BACKGROUND_YIELDS: u32 = 4;

/// What this host's CPUs allow.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpinPolicy {
    /// One CPU per local rank.
    pub own_cpu: bool,
    /// Two CPUs per local rank.
    pub spare_cpu: bool,
}

/// State of one waiter. Unsuccessful spins shorten the next ones.
#[derive(Debug)]
pub(super) struct Waiter {
    policy: SpinPolicy,
    budget: Duration,
}

impl Waiter {
    pub fn new(policy: SpinPolicy) -> Waiter {
        Waiter { policy, budget: LONGEST_SPIN }
    }

    /// Polls `ready` for a short while; on `false` the caller should park.
    pub fn spin(&mut self, in_foreground: bool, mut ready: impl FnMut() -> bool) -> bool {
        if ready() {
            return true;
        }
        let start = Instant::now();
        self.spin_by(|| start.elapsed(), in_foreground, ready)
    }

    /// As [`Waiter::spin`] after its first poll, with the time since then from `elapsed`.
    #[inline]
    fn spin_by(
        &mut self,
        elapsed: impl Fn() -> Duration,
        in_foreground: bool,
        mut ready: impl FnMut() -> bool,
    ) -> bool {
        let may_spin = if in_foreground { self.policy.own_cpu } else { self.policy.spare_cpu };
        let budget = if may_spin { self.budget } else { SPIN_WITHOUT_CPU };
        loop {
            for _ in 0..8 {
                std::hint::spin_loop();
                if ready() {
                    self.lengthen();
                    return true;
                }
            }
            if elapsed() >= budget {
                break;
            }
        }
        let yields = if in_foreground || may_spin { FOREGROUND_YIELDS } else { BACKGROUND_YIELDS };
        for _ in 0..yields {
            rustix::thread::sched_yield();
            if ready() {
                // A longer spin would have sufficed. Without this, the cost of yielding would keep
                // spins short forever.
                if elapsed() < LONGEST_SPIN {
                    self.lengthen();
                }
                return true;
            }
        }
        self.budget = (self.budget / 2).max(SHORTEST_SPIN);
        false
    }

    fn lengthen(&mut self) {
        self.budget = (self.budget * 2).min(LONGEST_SPIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_adapt_to_success_and_failure() {
        let mut waiter = Waiter::new(SpinPolicy { own_cpu: true, spare_cpu: false });
        assert!(waiter.spin(true, || true));
        for _ in 0..10 {
            assert!(!waiter.spin(true, || false));
        }
        assert_eq!(waiter.budget, SHORTEST_SPIN);
        let mut calls = 0;
        assert!(waiter.spin(true, || {
            calls += 1;
            calls == 3
        }));
        assert_eq!(waiter.budget, 2 * SHORTEST_SPIN);
    }

    /// The budget after a wait that succeeds at its first yield, `waited` after its first poll.
    fn budget_after_a_yield(waited: Duration) -> Duration {
        let mut waiter = Waiter::new(SpinPolicy { own_cpu: true, spare_cpu: false });
        waiter.budget = SHORTEST_SPIN;
        let mut polls = 0;
        assert!(waiter.spin_by(
            || waited,
            true,
            || {
                polls += 1;
                polls > 8
            }
        ));
        waiter.budget
    }

    #[test]
    fn a_wait_that_ends_soon_after_the_spin_makes_the_next_spin_longer() {
        assert_eq!(budget_after_a_yield(3 * SHORTEST_SPIN), 2 * SHORTEST_SPIN);
        assert_eq!(budget_after_a_yield(LONGEST_SPIN), SHORTEST_SPIN);
    }

    #[test]
    fn background_waits_poll_only_a_few_times() {
        let mut waiter = Waiter::new(SpinPolicy { own_cpu: true, spare_cpu: false });
        let mut calls = 0;
        waiter.spin(false, || {
            calls += 1;
            false
        });
        assert!(calls < 50, "{calls}");
    }
}
