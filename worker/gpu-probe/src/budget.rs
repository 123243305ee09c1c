//! Fits the parts into the time for which a machine is lent.

use crate::numbers::short;
use std::time::{Duration, Instant};

/// Seconds kept for killing the last part and writing its result.
const RESERVE: f64 = 5.0;

/// Time for a whole run.
pub(crate) struct Budget {
    /// `None` without `--budget`.
    seconds: Option<f64>,
    clock: Clock,
}

enum Clock {
    Wall(Instant),
    /// In a rehearsal each part takes its expected time: the seconds so far.
    Expected(f64),
}

/// Seconds that a part can run, if the budget limits them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Allowance(pub(crate) Option<f64>);

impl Budget {
    pub(crate) fn new(seconds: Option<u64>, is_rehearsal: bool) -> Budget {
        let clock = if is_rehearsal { Clock::Expected(0.0) } else { Clock::Wall(Instant::now()) };
        Budget { seconds: seconds.map(|seconds| seconds as f64), clock }
    }

    fn elapsed(&self) -> f64 {
        match self.clock {
            Clock::Wall(start) => start.elapsed().as_secs_f64(),
            Clock::Expected(seconds) => seconds,
        }
    }

    /// How long a part that is expected to take `expected` seconds can run.
    ///
    /// # Errors
    /// It is not expected to finish in time; the error says how much is left.
    pub(crate) fn admit(&self, expected: u64) -> Result<Allowance, String> {
        let left = self.seconds.map(|seconds| seconds - RESERVE - self.elapsed());
        match left {
            Some(left) if left < expected as f64 => {
                Err(format!("needs about {expected} s, and the budget has {} s left", short(left.max(0.0))))
            }
            // A rehearsal runs on machines of any speed, so only its clock is limited.
            Some(left) if matches!(self.clock, Clock::Wall(_)) => Ok(Allowance(Some(left))),
            _ => Ok(Allowance(None)),
        }
    }

    /// Charges a part that starts.
    pub(crate) fn charge(&mut self, expected: u64) {
        if let Clock::Expected(seconds) = &mut self.clock {
            *seconds += expected as f64;
        }
    }
}

impl Allowance {
    /// The smaller of a part's own limit and this one, and whether this one is smaller.
    pub(crate) fn limit(self, own: Duration) -> (Duration, bool) {
        match self.0.map(|seconds| Duration::from_secs_f64(seconds.max(0.0))) {
            Some(left) if left < own => (left, true),
            _ => (own, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::PARTS;

    /// Seconds of a run in which each part takes `factor` times its expected time, unless it is
    /// killed, and the parts that ran.
    fn play(seconds: u64, factor: f64, done: &[&str]) -> (f64, Vec<&'static str>) {
        let (mut now, mut ran) = (0.0, Vec::new());
        for part in PARTS.iter().filter(|part| !done.contains(&part.name)) {
            let budget = Budget { seconds: Some(seconds as f64), clock: Clock::Expected(now) };
            if budget.admit(part.expected).is_ok() {
                // What `Clock::Wall` allows at this time.
                let left = Allowance(Some(seconds as f64 - RESERVE - now));
                let (limit, _) = left.limit(Duration::from_secs(part.limit));
                now += (part.expected as f64 * factor).min(limit.as_secs_f64());
                ran.push(part.name);
            }
        }
        (now, ran)
    }

    #[test]
    fn two_commands_stay_within_their_budget_even_with_slow_parts() {
        for factor in [0.1, 1.0, 1.5, 20.0] {
            let (seconds, first) = play(360, factor, &[]);
            assert!(seconds <= 360.0 - RESERVE, "{factor}: {seconds}");
            let (seconds, second) = play(360, factor, &first);
            assert!(seconds <= 360.0 - RESERVE, "{factor}: {seconds}");
            assert!(second.iter().all(|name| !first.contains(name)));
        }
        // Nothing is left over on a machine that is ten times as fast.
        assert_eq!(play(360, 0.1, &[]).1.len(), PARTS.len());
    }

    #[test]
    fn a_part_that_cannot_finish_is_not_started() {
        let budget = Budget { seconds: Some(60.0), clock: Clock::Expected(40.0) };
        assert_eq!(budget.admit(15), Ok(Allowance(None)));
        assert_eq!(budget.admit(16), Err("needs about 16 s, and the budget has 15 s left".to_owned()));
        assert_eq!(Budget::new(None, false).admit(u64::MAX), Ok(Allowance(None)));
        let Ok(Allowance(Some(left))) = Budget::new(Some(60), false).admit(10) else { panic!("no limit") };
        assert!(left <= 55.0);
        let ten = Duration::from_secs(10);
        assert_eq!(Allowance(Some(3.0)).limit(ten), (Duration::from_secs(3), true));
        assert_eq!([Allowance(Some(11.0)), Allowance(None)].map(|left| left.limit(ten)), [(ten, false); 2]);
    }

    #[test]
    fn every_part_is_expected_to_end_before_its_limit() {
        for part in &PARTS {
            assert!(part.expected > 0 && part.expected < part.limit, "{}", part.name);
        }
    }
}
