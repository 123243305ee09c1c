//! The measured check before the first step: the bandwidth of an all-reduce over all ranks, and of each connection of
//! its ring.
//!
//! It takes the same path as the training: shared memory within a host, the ring of TCP connections between hosts. It
//! says nothing about other paths, such as RDMA.

use super::engine::Measure;
use super::exchange::CHECK;
use super::{TrainError, Trainer};
use std::time::Instant;
use switchyard_worker_contract::config::BandwidthCheck;
use switchyard_worker_contract::event::{Measured, MeasuredLink};

/// Most all-reduces that are timed.
const ROUNDS: f64 = 4.0;
/// Time budget for them, estimated from the first one.
const SECONDS: f64 = 5.0;
/// Bytes that each rank sends to the others.
const TOLD: usize = 20;

impl Trainer {
    /// Measures, if the job asks for it. The result is the same on every rank.
    ///
    /// # Errors
    /// The group failed, or the bandwidth is below what the job needs and the check is enforced.
    pub fn check_bandwidth(&mut self) -> Result<Option<Measured>, TrainError> {
        let Some(check) = self.training.config.bandwidth_check else { return Ok(None) };
        let first = self.timed(1)?;
        // All ranks must run the same number of rounds.
        let [sum] = self.group.sum("the time of an all-reduce", [first])?;
        let rounds = (SECONDS / (sum / f64::from(self.group.world())).max(1e-6)).clamp(1.0, ROUNDS) as u32;
        let seconds = self.timed(rounds)? / f64::from(rounds);
        let own = self.engine.reductions().probed;
        let mut told = seconds.to_le_bytes().to_vec();
        told.extend(own.map_or(0.0, |own| own.rate).to_le_bytes());
        told.extend(own.map_or(u32::MAX, |own| own.from).to_le_bytes());
        let all = self.group.all_gather("the bandwidth", &told)?;
        let measured = measured(check, &all);
        match measured.shortfall().filter(|_| check.enforce) {
            Some(why) => Err(TrainError::Preflight(Box::new(measured), why)),
            None => Ok(Some(measured)),
        }
    }

    /// Runs that many all-reduces; returns the seconds of all.
    fn timed(&mut self, rounds: u32) -> Result<f64, TrainError> {
        self.group.barrier()?;
        let start = Instant::now();
        for _ in 0..rounds {
            self.engine.reduce(Measure::Check)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Combines the reports of all ranks: the time of the slowest rank is that of the all-reduce.
fn measured(check: BandwidthCheck, all: &[Vec<u8>]) -> Measured {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0.0, f64::from_le_bytes);
    let whole = || (0_u32..).zip(all).filter(|(_, told)| told.len() == TOLD);
    let seconds = whole().map(|(_, told)| number(&told[..8])).fold(0.0, f64::max);
    let link = |(to, told): (u32, &Vec<u8>)| {
        let from = told[16..].try_into().map_or(u32::MAX, u32::from_le_bytes);
        (from != u32::MAX).then(|| MeasuredLink { from, to, bytes_per_second: number(&told[8..16]) })
    };
    let (bytes, ranks) = (CHECK as u64 * 4, all.len() as u32);
    Measured::new(ranks, bytes, seconds, check.least_bytes_per_second, whole().filter_map(link).collect())
}
