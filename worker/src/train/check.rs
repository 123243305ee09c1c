//! The bandwidth check before the first step: measures an all-reduce over all ranks, and each
//! connection of its ring.
//!
//! It uses the same paths as training: shared memory within a host, TCP between hosts. It
//! does not cover other paths, such as RDMA.

use super::engine::Measure;
use super::exchange::CHECK;
use super::{TrainError, Trainer};
use std::time::Instant;
use switchyard_worker_contract::config::BandwidthCheck;
use switchyard_worker_contract::event::{Measured, MeasuredLink};

/// Maximum number of timed all-reduces.
const MAX_ROUNDS: f64 = 4.0;
/// Time budget for them, estimated from the first one.
const BUDGET_SECONDS: f64 = 5.0;
/// Bytes of each rank's report.
const REPORT_BYTES: usize = 20;

impl Trainer {
    /// Measures the bandwidth if the job requests it. The result is the same on every rank.
    ///
    /// # Errors
    /// The group failed, or the bandwidth is below what the job needs and the check is enforced.
    pub fn check_bandwidth(&mut self) -> Result<Option<Measured>, TrainError> {
        let Some(check) = self.training.config.bandwidth_check else { return Ok(None) };
        let first = self.time_rounds(1)?;
        // All ranks must run the same number of rounds.
        let [sum] = self.group.sum("the time of an all-reduce", [first])?;
        let rounds = (BUDGET_SECONDS / (sum / f64::from(self.group.world())).max(1e-6)).clamp(1.0, MAX_ROUNDS) as u32;
        let seconds = self.time_rounds(rounds)? / f64::from(rounds);
        let own = self.engine.reductions().probed;
        let mut report = seconds.to_le_bytes().to_vec();
        report.extend(own.map_or(0.0, |own| own.rate).to_le_bytes());
        report.extend(own.map_or(u32::MAX, |own| own.from).to_le_bytes());
        let all = self.group.all_gather("the bandwidth", &report)?;
        let measured = combine(check, &all);
        match measured.shortfall().filter(|_| check.enforce) {
            Some(why) => Err(TrainError::Preflight(Box::new(measured), why)),
            None => Ok(Some(measured)),
        }
    }

    /// Runs `rounds` all-reduces; returns their total time in seconds.
    fn time_rounds(&mut self, rounds: u32) -> Result<f64, TrainError> {
        self.group.barrier()?;
        let start = Instant::now();
        for _ in 0..rounds {
            self.engine.reduce(Measure::Check)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Combines the reports of all ranks: the slowest rank determines the time of the all-reduce.
fn combine(check: BandwidthCheck, all: &[Vec<u8>]) -> Measured {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0.0, f64::from_le_bytes);
    let complete = || (0_u32..).zip(all).filter(|(_, report)| report.len() == REPORT_BYTES);
    let seconds = complete().map(|(_, report)| number(&report[..8])).fold(0.0, f64::max);
    let link = |(to, report): (u32, &Vec<u8>)| {
        let from = report[16..].try_into().map_or(u32::MAX, u32::from_le_bytes);
        (from != u32::MAX).then(|| MeasuredLink { from, to, bytes_per_second: number(&report[8..16]) })
    };
    let (bytes, ranks) = (CHECK as u64 * 4, all.len() as u32);
    Measured::new(ranks, bytes, seconds, check.least_bytes_per_second, complete().filter_map(link).collect())
}
