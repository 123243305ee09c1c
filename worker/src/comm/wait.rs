//! How to wait: spin briefly, yield a bounded number of times, then let the kernel park the thread.
//!
//! Spinning pays only on a CPU that nothing else could use meanwhile. A wait is "in front" when this rank has nothing
//! else to do: its compute thread is the one that waits, or is parked behind the communication thread. In the
//! background, in parallel with a computing thread, spinning would steal that thread's time (both may be pinned to one
//! CPU), so the communication thread spins there only if the CPUs suffice for two threads per rank.

use std::time::{Duration, Instant};

/// Longest sleep between two checks of the group's state.
pub(super) const NAP: Duration = Duration::from_millis(100);
const LONGEST_SPIN: Duration = Duration::from_micros(20);
const SHORTEST_SPIN: Duration = Duration::from_nanos(500);
const SPIN_WITHOUT_CPU: Duration = Duration::from_nanos(200);
const YIELDS_IN_FRONT: u32 = 200;
const YIELDS_IN_BACKGROUND: u32 = 4;

/// What the CPUs of this host allow.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpinPolicy {
    /// A CPU for each local rank.
    pub own_cpu: bool,
    /// Two CPUs for each local rank.
    pub spare_cpu: bool,
}

/// State of one waiter: spins that led to nothing make the next ones shorter.
#[derive(Debug)]
pub(super) struct Waiter {
    policy: SpinPolicy,
    budget: Duration,
}

impl Waiter {
    pub fn new(policy: SpinPolicy) -> Waiter {
        Waiter { policy, budget: LONGEST_SPIN }
    }

    /// Polls `ready` for a short while; `false` means: park now.
    pub fn linger(&mut self, in_front: bool, mut ready: impl FnMut() -> bool) -> bool {
        if ready() {
            return true;
        }
        let may_spin = if in_front { self.policy.own_cpu } else { self.policy.spare_cpu };
        let budget = if may_spin { self.budget } else { SPIN_WITHOUT_CPU };
        let start = Instant::now();
        loop {
            for _ in 0..8 {
                std::hint::spin_loop();
                if ready() {
                    self.lengthen();
                    return true;
                }
            }
            if start.elapsed() >= budget {
                break;
            }
        }
        let yields = if in_front || may_spin { YIELDS_IN_FRONT } else { YIELDS_IN_BACKGROUND };
        for _ in 0..yields {
            rustix::thread::sched_yield();
            if ready() {
                // A longer spin would have been enough. Without this, the cost of yielding would keep spins short
                // forever.
                if start.elapsed() < LONGEST_SPIN {
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
    fn lingering_is_short_and_learns() {
        let mut waiter = Waiter::new(SpinPolicy { own_cpu: true, spare_cpu: false });
        assert!(waiter.linger(true, || true));
        for _ in 0..10 {
            assert!(!waiter.linger(true, || false));
        }
        assert_eq!(waiter.budget, SHORTEST_SPIN);
        let mut calls = 0;
        assert!(waiter.linger(true, || {
            calls += 1;
            calls == 3
        }));
        assert_eq!(waiter.budget, 2 * SHORTEST_SPIN);
    }

    #[test]
    fn a_wait_that_ends_soon_after_the_spin_makes_the_next_spin_longer() {
        let mut waiter = Waiter::new(SpinPolicy { own_cpu: true, spare_cpu: false });
        // On a busy machine a single try may be interrupted for longer than a spin.
        let learned = (0..100).any(|_| {
            waiter.budget = SHORTEST_SPIN;
            let start = Instant::now();
            waiter.linger(true, || start.elapsed() > 3 * SHORTEST_SPIN) && waiter.budget == 2 * SHORTEST_SPIN
        });
        assert!(learned);
    }

    #[test]
    fn in_the_background_there_are_few_tries() {
        let mut waiter = Waiter::new(SpinPolicy { own_cpu: true, spare_cpu: false });
        let mut calls = 0;
        waiter.linger(false, || {
            calls += 1;
            false
        });
        assert!(calls < 50, "{calls}");
    }
}
