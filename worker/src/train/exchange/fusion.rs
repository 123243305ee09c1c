//! Decides which buckets are reduced together.
//!
//! Each all-reduce has a fixed cost, so with a high latency few large ones are best. But an
//! all-reduce cannot start before its last gradient is final, and the last one is never hidden, so
//! overlap needs many small ones.
//!
//! ```text
//! first bucket      alone: the link has work as soon as possible
//! in between        together until the fixed cost is a small part of the time of an all-reduce
//! last bucket       alone: this is what is left when backward ends
//! ```
//!
//! Latency and rate are measured when the group has formed. A sum does not depend on what is
//! reduced together with it, so the weights do not either.

use super::Exchange;
use crate::comm::Group;
use crate::nn::Bucket;
use crate::train::TrainError;
use crate::train::training::BUCKET;
use std::ops::Range;
use std::time::Instant;
use switchyard_worker_contract::config::Overlap;

/// Maximum bytes of an all-reduce without a user limit.
const MAX_BYTES: usize = 25 << 20;
/// Minimum time of an all-reduce, as a multiple of its fixed cost.
const MIN_FIXED_COSTS: f64 = 8.0;
/// Maximum bytes of the timed all-reduce.
const TIMED_BYTES: usize = 4 << 20;
/// Timed all-reduces, after one warm-up.
const ROUNDS: usize = 4;

/// Ranges of buckets to reduce together. `bytes`: of each bucket; `most`: maximum of a range with
/// several buckets. `overlaps`: they start during backward.
fn runs(bytes: &[usize], most: usize, overlaps: bool) -> Vec<Range<usize>> {
    let alone = |bucket: usize| overlaps && (bucket == 0 || bucket + 1 == bytes.len());
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut sum = 0_usize;
    for (bucket, &own) in bytes.iter().enumerate() {
        sum = sum.saturating_add(own);
        match runs.last_mut() {
            Some(run) if sum <= most && !alone(bucket) && !alone(run.start) => run.end = bucket + 1,
            _ => {
                runs.push(bucket..bucket + 1);
                sum = own;
            }
        }
    }
    runs
}

/// Size of an all-reduce whose fixed cost is small. `latency`: seconds of the shortest one; `rate`:
/// bytes per second of a long one.
fn efficient_bytes(latency: f64, rate: f64) -> usize {
    ((MIN_FIXED_COSTS * latency * rate) as usize).clamp(BUCKET, MAX_BYTES)
}

/// Whether all-reduces start and run during backward.
fn overlaps(overlap: &Overlap) -> bool {
    overlap.enabled && !overlap.sync_all_reduce
}

/// Maximum bytes of an all-reduce: the user's limit or the default.
fn limit(overlap: &Overlap) -> usize {
    overlap.bucket_size_mib.map_or(MAX_BYTES, |mib| (mib as usize) << 20)
}

fn bytes(buckets: &[Bucket]) -> Vec<usize> {
    buckets.iter().map(|bucket| 4 * bucket.range.len()).collect()
}

/// Ranges of buckets to reduce together without a measurement: as many as the limit allows.
pub(in crate::train) fn default_runs(buckets: &[Bucket], overlap: &Overlap) -> Vec<Range<usize>> {
    runs(&bytes(buckets), limit(overlap), overlaps(overlap))
}

/// Ranges of buckets to reduce together whose memory is reused: short, unless the user says
/// otherwise.
pub(in crate::train) fn short_runs(buckets: &[Bucket], overlap: &Overlap) -> Vec<Range<usize>> {
    let most = overlap.bucket_size_mib.map_or(BUCKET, |mib| (mib as usize) << 20);
    runs(&bytes(buckets), most, overlaps(overlap))
}

impl Exchange {
    /// Decides which buckets are reduced together. Collective; the result is the same on all ranks.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn fuse(&mut self, overlap: Overlap, group: &mut Group) -> Result<(), TrainError> {
        if group.world() == 1 {
            return Ok(());
        }
        let (overlaps, limit) = (overlaps(&overlap), limit(&overlap));
        let most = if overlaps { self.measure(group)?.min(limit) } else { limit };
        self.buckets.runs = runs(&bytes(&self.ranges), most, overlaps);
        Ok(())
    }

    /// The efficient size of an all-reduce for this group, from the mean of its ranks'
    /// measurements.
    fn measure(&mut self, group: &mut Group) -> Result<usize, TrainError> {
        let mut bytes = 0;
        let timed = self.ranges.iter().take_while(|bucket| {
            bytes += 4 * bucket.range.len();
            bytes <= TIMED_BYTES
        });
        let timed = 0..timed.count().max(1);
        let shortest = self.buckets.shortest();
        let latency = self.seconds(group, shortest..shortest + 1)?;
        let seconds = self.seconds(group, timed.clone())?;
        let world = f64::from(group.world());
        let sums = group.sum("the times of all-reduces", [latency, seconds])?;
        let [latency, seconds] = sums.map(|sum| sum / world);
        let bytes: usize = self.ranges[timed].iter().map(|bucket| 4 * bucket.range.len()).sum();
        Ok(efficient_bytes(latency, bytes as f64 / (seconds - latency).max(1e-9)))
    }

    /// Seconds of an all-reduce over these buckets: the best of several.
    fn seconds(&mut self, group: &mut Group, buckets: Range<usize>) -> Result<f64, TrainError> {
        let mut best = f64::INFINITY;
        for round in 0..=ROUNDS {
            group.barrier()?;
            let start = Instant::now();
            self.reducer.start_all(buckets.clone(), 0);
            for bucket in buckets.clone() {
                self.reducer.wait(bucket)?;
            }
            if round > 0 {
                best = best.min(start.elapsed().as_secs_f64());
            }
        }
        Ok(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn the_first_and_the_last_bucket_are_reduced_alone() {
        let bytes = [MIB; 24];
        assert_eq!(runs(&bytes, 25 * MIB, true), [0..1, 1..23, 23..24]);
        assert_eq!(runs(&bytes, 8 * MIB, true), [0..1, 1..9, 9..17, 17..23, 23..24]);
        assert_eq!(runs(&bytes, 25 * MIB, false), std::slice::from_ref(&(0..24)));
        // An embedding of 150 MiB comes last in backward.
        assert_eq!(runs(&[MIB, MIB, MIB, 150 * MIB], 25 * MIB, true), [0..1, 1..3, 3..4]);
        assert_eq!(runs(&[MIB, MIB], 25 * MIB, true), [0..1, 1..2]);
        assert_eq!(runs(&[10], MIB, true), std::slice::from_ref(&(0..1)));
    }

    #[test]
    fn high_latency_and_high_bandwidth_need_large_all_reduces() {
        for (what, latency, rate, size) in [
            ("shared memory", 15e-6, 6e9, MIB),
            ("two hosts with 1 Gbit/s", 80e-6, 6e7, MIB),
            ("8 hosts with 100 Gbit/s", 500e-6, 4e9, 16_000_000),
            ("64 hosts with 400 Gbit/s", 4e-3, 2e10, MAX_BYTES),
            ("invalid measurements", f64::NAN, f64::INFINITY, MIB),
        ] {
            assert_eq!(efficient_bytes(latency, rate), size, "{what}");
        }
    }

    proptest! {
        #[test]
        fn every_bucket_is_reduced_once_and_in_order(
            bytes in prop::collection::vec(1usize..3 * MIB, 1..60), most in MIB..30 * MIB, overlaps in any::<bool>(),
        ) {
            let runs = runs(&bytes, most, overlaps);
            let mut next = 0;
            for run in &runs {
                prop_assert_eq!(run.start, next);
                prop_assert!(run.len() == 1 || bytes[run.clone()].iter().sum::<usize>() <= most);
                next = run.end;
            }
            prop_assert_eq!(next, bytes.len());
        }
    }
}
