//! Host failures and repairs, which hit the same hosts at the same times under every rule.

use crate::rng::{Rng, mix};
use std::collections::BTreeSet;

const HOUR: f64 = 3600.0;

/// Failure rate of hosts, and the cost of a failure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Failures {
    /// Mean time from a host's repair to its next failure (exponentially distributed), seconds.
    pub every: f64,
    /// Time from a failure to the repair, seconds.
    pub repair: f64,
    /// Work between two checkpoints, from which a job resumes; seconds at the best placement.
    pub checkpoint: f64,
    /// Random seed.
    pub seed: u64,
}

impl Failures {
    /// Each host fails after this many days on average. Published values for hosts with 8 GPUs
    /// range from 47 days (A100; Kokolis et al., Revisiting Reliability in Large-Scale Machine
    /// Learning Research Clusters, HPCA 2025) to 264 days (H100: 419 unexpected interruptions of
    /// 16,384 GPUs in 54 days; The Llama 3 Herd of Models, 2024). No trace has repair times or
    /// checkpoint intervals: half a day (99.5 % availability) and one hour are assumptions.
    pub fn every_days(days: f64) -> Failures {
        Failures { every: days * 24.0 * HOUR, repair: 12.0 * HOUR, checkpoint: HOUR, seed: 0 }
    }
}

/// Next failures and repairs of all hosts. Times are stored as bits, which sort like the positive
/// floats they represent.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    failures: Option<Failures>,
    rngs: Vec<Rng>,
    fail: BTreeSet<(u64, usize)>,
    repaired: BTreeSet<(u64, usize)>,
}

impl Hosts {
    /// All hosts start healthy.
    pub(crate) fn new(count: usize, failures: Option<Failures>) -> Hosts {
        let Some(Failures { seed, .. }) = failures else { return Hosts::default() };
        let rngs = (0..count as u64).map(|host| Rng::new(mix(mix(seed) ^ host))).collect();
        let mut hosts = Hosts { failures, rngs, ..Hosts::default() };
        (0..count).for_each(|host| hosts.schedule_failure(host, 0.0));
        hosts
    }

    fn schedule_failure(&mut self, host: usize, now: f64) {
        let Some(Failures { every, .. }) = self.failures else { return };
        let at = now + self.rngs[host].exponential(every);
        self.fail.insert((at.to_bits(), host));
    }

    /// The time of the next repair or, if `can_fail`, failure.
    pub(crate) fn next(&self, can_fail: bool) -> Option<f64> {
        let first = |of: &BTreeSet<(u64, usize)>| of.first().map(|(at, _)| f64::from_bits(*at));
        let fails = first(&self.fail).filter(|_| can_fail);
        fails.into_iter().chain(first(&self.repaired)).reduce(f64::min)
    }

    /// Takes a host whose repair is due by `now`.
    pub(crate) fn repaired_by(&mut self, now: f64) -> Option<usize> {
        let host = due(&mut self.repaired, now)?;
        self.schedule_failure(host, now);
        Some(host)
    }

    /// Takes a host whose failure is due by `now`.
    pub(crate) fn failed_by(&mut self, now: f64) -> Option<usize> {
        let (host, failures) = (due(&mut self.fail, now)?, self.failures?);
        self.repaired.insert(((now + failures.repair).to_bits(), host));
        Some(host)
    }

    /// Work preserved by the last checkpoint, seconds at the best placement.
    pub(crate) fn checkpointed(&self, done: f64) -> f64 {
        self.failures.map_or(0.0, |failures| (done / failures.checkpoint).floor() * failures.checkpoint)
    }
}

fn due(of: &mut BTreeSet<(u64, usize)>, now: f64) -> Option<usize> {
    let (at, _) = of.first()?;
    if f64::from_bits(*at) > now { None } else { of.pop_first().map(|(_, host)| host) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_fail_at_the_requested_rate_and_reproducibly() {
        let failures = Failures::every_days(10.0);
        let failures_with = |seed| {
            let mut hosts = Hosts::new(100, Some(Failures { seed, ..failures }));
            let (mut failed, mut now) = (Vec::new(), 0.0);
            while let Some(at) = hosts.next(true).filter(|at| *at < 1000.0 * 86_400.0) {
                assert!(at >= now);
                now = at;
                while hosts.repaired_by(now).is_some() {}
                while let Some(host) = hosts.failed_by(now) {
                    failed.push((now.to_bits(), host));
                }
            }
            failed
        };
        let failed = failures_with(1);
        // 100 hosts over 1000 days, with 10.5 days between failures.
        assert!((9100..9950).contains(&failed.len()), "{}", failed.len());
        assert_eq!(failed, failures_with(1));
        assert_ne!(failed, failures_with(2));
    }

    #[test]
    fn work_since_the_last_checkpoint_is_lost() {
        let hosts = Hosts::new(1, Some(Failures::every_days(1.0)));
        assert_eq!([0.0, 3599.0, 3600.0, 9000.0].map(|done| hosts.checkpointed(done)), [0.0, 0.0, 3600.0, 7200.0]);
    }
}
