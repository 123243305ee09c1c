//! Decides when a rank is hung. Pure: times are parameters.

use std::time::{Duration, Instant};
use switchyard_worker_contract::config::Watchdog;
use switchyard_worker_contract::recorder::Operation;

/// Default limit.
const DEFAULT_LIMIT: Duration = Duration::from_secs(600);
/// Lowest limit derived from step times.
const MIN_LIMIT: Duration = Duration::from_secs(30);
/// Limit of an operation within a step, in median step times.
const MEDIANS: u32 = 10;
/// A check this many intervals after the last one is late.
const LATE: u32 = 4;

/// A snapshot of the rank's state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Observation {
    /// Changes with any progress.
    pub progress: u64,
    pub operation: Operation,
    /// Median of the last steps; `None` before there are enough.
    pub median: Option<Duration>,
}

/// Tracks how long a rank makes no progress.
#[derive(Debug)]
pub(super) struct StallDetector {
    config: Watchdog,
    interval: Duration,
    progress: Option<u64>,
    /// Time without progress.
    stalled: Duration,
    last_check: Instant,
}

impl StallDetector {
    pub fn new(config: Watchdog, now: Instant) -> StallDetector {
        let interval = config.timeout_seconds.map_or(DEFAULT_LIMIT, |seconds| Duration::from_secs(seconds.into())) / 20;
        let interval = interval.clamp(Duration::from_millis(50), Duration::from_millis(500));
        StallDetector { config, interval, progress: None, stalled: Duration::ZERO, last_check: now }
    }

    /// Interval between checks.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Allowed time without progress.
    fn limit(&self, observation: Observation) -> Duration {
        match (self.config.timeout_seconds, observation.median) {
            (Some(seconds), _) => Duration::from_secs(seconds.into()),
            (None, Some(median)) if observation.operation.in_step() => MIN_LIMIT.max(MEDIANS * median),
            _ => DEFAULT_LIMIT,
        }
    }

    /// Returns how long the rank has stalled, and the limit.
    pub fn check(&mut self, observation: Observation, now: Instant) -> StallCheck {
        let elapsed = now.saturating_duration_since(self.last_check);
        self.last_check = now;
        if self.progress != Some(observation.progress) || observation.operation.is_last() {
            (self.progress, self.stalled) = (Some(observation.progress), Duration::ZERO);
        } else {
            // Before a late check this process was not running, and neither was the rank: it was
            // stopped or suspended, which says nothing, or starved of CPU. One interval counts,
            // because a starved watchdog is late each time and still has to detect a hang.
            self.stalled += if elapsed > LATE * self.interval { self.interval } else { elapsed };
        }
        StallCheck { stalled: self.stalled, limit: self.limit(observation) }
    }
}

/// Time without progress, and its limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StallCheck {
    pub stalled: Duration,
    limit: Duration,
}

impl StallCheck {
    pub fn share(self) -> f32 {
        self.stalled.div_duration_f32(self.limit)
    }

    /// The time without progress, if it exceeds the limit.
    pub fn hang(self) -> Option<Duration> {
        Some(self.stalled).filter(|stalled| *stalled > self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::config::OnHang;

    /// Checks at the watchdog's interval; returns the second at which the rank counts as hung.
    /// `progress`: as a function of the second.
    fn hung(
        timeout: Option<u32>,
        operation: Operation,
        median: Option<f64>,
        progress: impl Fn(u64) -> u64,
    ) -> Option<u64> {
        let start = Instant::now();
        let mut detector = StallDetector::new(Watchdog { timeout_seconds: timeout, on_hang: OnHang::Restart }, start);
        let mut at = Duration::ZERO;
        while at < Duration::from_secs(4000) {
            let median = median.map(Duration::from_secs_f64);
            let observation = Observation { progress: progress(at.as_secs()), operation, median };
            if detector.check(observation, start + at).hang().is_some() {
                return Some(at.as_secs());
            }
            at += detector.interval();
        }
        None
    }

    #[test]
    fn the_limit_comes_from_the_manifest_or_the_step_times() {
        use Operation::{Checkpoint, Forward, Input};
        let no_progress = |_| 0;
        assert_eq!(hung(None, Forward, None, no_progress), Some(600), "no step times");
        assert_eq!(hung(None, Forward, Some(0.2), no_progress), Some(30));
        assert_eq!(hung(None, Input, Some(9.0), no_progress), Some(90));
        assert_eq!(
            hung(None, Forward, Some(100.0), no_progress),
            Some(1000),
            "steps may take longer than the first limit"
        );
        assert_eq!(hung(None, Checkpoint, Some(0.2), no_progress), Some(600), "not part of a step");
        assert_eq!(hung(Some(7), Forward, Some(9.0), no_progress), Some(7), "the manifest wins");
        assert_eq!(hung(Some(7), Operation::Finished, None, no_progress), None);
    }

    #[test]
    fn slow_input_validation_and_checkpoints_are_not_hangs() {
        for operation in [Operation::Input, Operation::Evaluate, Operation::Checkpoint, Operation::Reduce] {
            assert_eq!(hung(Some(7), operation, Some(0.1), |second| second / 6), None, "{operation:?}");
            assert_eq!(hung(Some(7), operation, Some(0.1), |second| second.min(100)), Some(107), "{operation:?}");
        }
    }

    #[test]
    fn a_suspended_process_is_not_hung_when_it_resumes() {
        let start = Instant::now();
        let mut detector = StallDetector::new(Watchdog { timeout_seconds: Some(20), on_hang: OnHang::Restart }, start);
        let observation = Observation { progress: 1, operation: Operation::Forward, median: None };
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(detector.check(observation, at(0)).hang(), None);
        assert_eq!(detector.check(observation, at(3600)).hang(), None);
        assert_eq!(detector.check(observation, at(3601)).hang(), None);
        assert_eq!(detector.interval(), Duration::from_millis(500));
        for half in 0..38 {
            assert_eq!(detector.check(observation, at(3601) + half * detector.interval()).hang(), None);
        }
        assert!(
            detector.check(observation, at(3620) + detector.interval()).hang().is_some(),
            "the limit has passed since then"
        );
    }

    #[test]
    fn a_watchdog_that_is_late_each_time_still_detects_a_hang() {
        let start = Instant::now();
        let config = Watchdog { timeout_seconds: Some(1), on_hang: OnHang::Restart };
        let hung_after = |late: u32, progress: fn(u32) -> u64| {
            let mut detector = StallDetector::new(config, start);
            let pause = late * detector.interval();
            (0..1000).find(|check| {
                let observation =
                    Observation { progress: progress(*check), operation: Operation::Forward, median: None };
                detector.check(observation, start + *check * pause).hang().is_some()
            })
        };
        assert_eq!(hung_after(1, |_| 0), Some(21));
        assert_eq!(hung_after(5, |_| 0), Some(21), "on starved CPUs");
        assert_eq!(hung_after(1000, |_| 0), Some(21));
        assert_eq!(hung_after(5, |check| (check / 20).into()), None, "progress in every twentieth check");
    }
}
