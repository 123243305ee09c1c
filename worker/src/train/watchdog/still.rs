//! When a rank counts as hung. Pure: times are parameters.

use std::time::{Duration, Instant};
use switchyard_worker_contract::config::Watchdog;
use switchyard_worker_contract::recorder::Operation;

/// Limit where nothing else is known.
const LIMIT: Duration = Duration::from_secs(600);
/// Least limit that follows from the steps.
const LEAST: Duration = Duration::from_secs(30);
/// Medians that an operation of a step may take.
const MEDIANS: u32 = 10;

/// What the watchdog sees of a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    /// Changes with every progress.
    pub progress: u64,
    pub operation: Operation,
    /// Of the last steps; `None` before there are enough.
    pub median: Option<Duration>,
}

/// Since when a rank makes no progress.
#[derive(Debug)]
pub(super) struct Still {
    config: Watchdog,
    /// Time between two looks.
    pause: Duration,
    progress: Option<u64>,
    since: Instant,
    looked: Instant,
}

impl Still {
    pub fn new(config: Watchdog, now: Instant) -> Still {
        let pause = config.timeout_seconds.map_or(LIMIT, |seconds| Duration::from_secs(seconds.into())) / 20;
        let pause = pause.clamp(Duration::from_millis(50), Duration::from_millis(500));
        Still { config, pause, progress: None, since: now, looked: now }
    }

    /// How often to look.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Time without progress that an operation may take.
    fn limit(&self, seen: Seen) -> Duration {
        match (self.config.timeout_seconds, seen.median) {
            (Some(seconds), _) => Duration::from_secs(seconds.into()),
            (None, Some(median)) if seen.operation.in_step() => LEAST.max(MEDIANS * median),
            _ => LIMIT,
        }
    }

    /// How long the rank has stood still, and how long it may.
    pub fn look(&mut self, seen: Seen, now: Instant) -> Look {
        // This process did not run for a while (stopped, suspended, starved): that says nothing about the rank.
        let asleep = now.saturating_duration_since(self.looked) > 4 * self.pause;
        self.looked = now;
        if asleep || self.progress != Some(seen.progress) {
            (self.progress, self.since) = (Some(seen.progress), now);
        }
        if seen.operation.is_last() {
            self.since = now;
        }
        Look { still: now.saturating_duration_since(self.since), limit: self.limit(seen) }
    }
}

/// Time without progress, and what is allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Look {
    pub still: Duration,
    limit: Duration,
}

impl Look {
    pub fn share(self) -> f32 {
        self.still.div_duration_f32(self.limit)
    }

    /// The time, if it is too long.
    pub fn hang(self) -> Option<Duration> {
        Some(self.still).filter(|still| *still > self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::config::OnHang;

    /// Looks as often as the watchdog; returns the second in which the rank counts as hung. `progress`: by the second.
    fn hung(
        timeout: Option<u32>,
        operation: Operation,
        median: Option<f64>,
        progress: impl Fn(u64) -> u64,
    ) -> Option<u64> {
        let start = Instant::now();
        let mut still = Still::new(Watchdog { timeout_seconds: timeout, on_hang: OnHang::Restart }, start);
        let mut at = Duration::ZERO;
        while at < Duration::from_secs(4000) {
            let median = median.map(Duration::from_secs_f64);
            let seen = Seen { progress: progress(at.as_secs()), operation, median };
            if still.look(seen, start + at).hang().is_some() {
                return Some(at.as_secs());
            }
            at += still.pause();
        }
        None
    }

    #[test]
    fn the_limit_follows_from_the_manifest_or_from_the_steps() {
        use Operation::{Checkpoint, Forward, Input};
        let nothing = |_| 0;
        assert_eq!(hung(None, Forward, None, nothing), Some(600), "no step is known");
        assert_eq!(hung(None, Forward, Some(0.2), nothing), Some(30));
        assert_eq!(hung(None, Input, Some(9.0), nothing), Some(90));
        assert_eq!(hung(None, Forward, Some(100.0), nothing), Some(1000), "steps may take longer than the first limit");
        assert_eq!(hung(None, Checkpoint, Some(0.2), nothing), Some(600), "it is no part of a step");
        assert_eq!(hung(Some(7), Forward, Some(9.0), nothing), Some(7), "the manifest counts");
        assert_eq!(hung(Some(7), Operation::Finished, None, nothing), None);
    }

    #[test]
    fn slow_input_long_validation_and_long_checkpoints_are_no_hang() {
        for operation in [Operation::Input, Operation::Evaluate, Operation::Checkpoint, Operation::Reduce] {
            assert_eq!(hung(Some(7), operation, Some(0.1), |second| second / 6), None, "{operation:?}");
            assert_eq!(hung(Some(7), operation, Some(0.1), |second| second.min(100)), Some(107), "{operation:?}");
        }
    }

    #[test]
    fn a_process_that_was_stopped_is_not_hung_when_it_goes_on() {
        let start = Instant::now();
        let mut still = Still::new(Watchdog { timeout_seconds: Some(20), on_hang: OnHang::Restart }, start);
        let seen = Seen { progress: 1, operation: Operation::Forward, median: None };
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(still.look(seen, at(0)).hang(), None);
        assert_eq!(still.look(seen, at(3600)).hang(), None);
        assert_eq!(still.look(seen, at(3601)).hang(), None);
        assert_eq!(still.pause(), Duration::from_millis(500));
        for half in 0..38 {
            assert_eq!(still.look(seen, at(3601) + half * still.pause()).hang(), None);
        }
        assert!(still.look(seen, at(3620) + still.pause()).hang().is_some(), "it has had its time since then");
    }
}
