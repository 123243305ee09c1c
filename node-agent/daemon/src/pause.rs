//! Randomised pauses, so that the agents of a large cluster do not act in lockstep.

use std::time::Duration;

/// First pause after a failure; doubles with each further failure.
const FIRST: Duration = Duration::from_secs(1);
/// Longest pause, which bounds the delay of a report after an outage.
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The pause after one more failure.
    pub fn next(&mut self) -> Duration {
        let whole = FIRST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        spread(whole, 0.5)
    }

    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// A uniformly random duration between `least` × `whole` and `whole`.
pub(crate) fn spread(whole: Duration, least: f64) -> Duration {
    let mut random = [0; 4];
    // Without random bytes, pause for the whole duration.
    let share =
        getrandom::fill(&mut random).map_or(1.0, |()| f64::from(u32::from_ne_bytes(random)) / f64::from(u32::MAX));
    whole.mul_f64(least + (1.0 - least) * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_minute_and_reset() {
        let mut backoff = Backoff::default();
        for longest in [1, 2, 4, 8, 16, 32, 60, 60, 60].map(Duration::from_secs) {
            let pause = backoff.next();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?} of {longest:?}");
        }
        (0..2000).for_each(|_| assert!(backoff.next() <= LONGEST));
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }

    #[test]
    fn pauses_differ() {
        let all: std::collections::BTreeSet<Duration> = (0..20).map(|_| spread(LONGEST, 0.8)).collect();
        assert!(all.len() > 10 && all.iter().all(|pause| *pause >= LONGEST.mul_f64(0.8)), "{all:?}");
    }
}
