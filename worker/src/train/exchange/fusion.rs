//! Which buckets are reduced together.
//!
//! Each all-reduce has a cost that does not depend on its size, so a slow start wants few of them; but none can start
//! before its last gradient is final, and what starts last is never hidden, so overlap wants many.
//!
//! ```text
//! first bucket      alone: the link has work as soon as possible
//! in between        together until the fixed cost is a small part of the time of an all-reduce
//! last bucket       alone: this is what is left when backward ends
//! ```
//!
//! The cost and the rate are measured when the group has formed. A sum does not depend on what is reduced together with
//! it, so neither do the weights.

use super::Exchange;
use crate::comm::Group;
use crate::nn::Bucket;
use crate::train::TrainError;
use crate::train::training::BUCKET;
use std::ops::Range;
use std::time::Instant;
use switchyard_worker_contract::config::Overlap;

/// Most bytes of an all-reduce without a limit of the user's.
const MOST: usize = 25 << 20;
/// Time of an all-reduce in fixed costs, at least.
const WORTH: f64 = 8.0;
/// Bytes whose all-reduce is timed, at most.
const TIMED: usize = 4 << 20;
/// All-reduces that are timed, after one that is not.
const ROUNDS: usize = 4;

/// Ranges of buckets that are reduced together. `bytes`: of each bucket; `most`: of a range, if it has more than one.
/// `overlaps`: they start during backward.
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

/// Bytes of an all-reduce in which the fixed cost is small. `latency`: seconds of the shortest one; `rate`: bytes per
/// second of a long one.
fn worthwhile(latency: f64, rate: f64) -> usize {
    ((WORTH * latency * rate) as usize).clamp(BUCKET, MOST)
}

/// Whether all-reduces start during backward, and go on while it does.
fn overlaps(overlap: &Overlap) -> bool {
    overlap.enabled && !overlap.sync_all_reduce
}

/// Most bytes of an all-reduce, as the user limits it.
fn limit(overlap: &Overlap) -> usize {
    overlap.bucket_size_mib.map_or(MOST, |mib| (mib as usize) << 20)
}

fn bytes(buckets: &[Bucket]) -> Vec<usize> {
    buckets.iter().map(|bucket| 4 * bucket.range.len()).collect()
}

/// Which buckets are reduced together where nothing was measured: as many as the limit allows.
pub(in crate::train) fn unmeasured(buckets: &[Bucket], overlap: &Overlap) -> Vec<Range<usize>> {
    runs(&bytes(buckets), limit(overlap), overlaps(overlap))
}

impl Exchange {
    /// Decides which buckets are reduced together; the same on all ranks, which call it together.
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

    /// The size of an all-reduce that this group needs, from the mean of what its ranks measure.
    fn measure(&mut self, group: &mut Group) -> Result<usize, TrainError> {
        let mut bytes = 0;
        let timed = self.ranges.iter().take_while(|bucket| {
            bytes += 4 * bucket.range.len();
            bytes <= TIMED
        });
        let timed = 0..timed.count().max(1);
        let shortest = self.buckets.shortest();
        let latency = self.seconds(group, shortest..shortest + 1)?;
        let seconds = self.seconds(group, timed.clone())?;
        let world = f64::from(group.world());
        let sums = group.sum("the times of all-reduces", [latency, seconds])?;
        let [latency, seconds] = sums.map(|sum| sum / world);
        let bytes: usize = self.ranges[timed].iter().map(|bucket| 4 * bucket.range.len()).sum();
        Ok(worthwhile(latency, bytes as f64 / (seconds - latency).max(1e-9)))
    }

    /// Seconds of an all-reduce over these buckets: the best of some.
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
    fn the_first_and_the_last_bucket_are_alone_so_that_overlap_begins_early_and_little_is_left() {
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
    fn a_slow_start_and_a_fast_link_want_large_all_reduces() {
        for (what, latency, rate, size) in [
            ("shared memory", 15e-6, 6e9, MIB),
            ("a gigabit between two hosts", 80e-6, 6e7, MIB),
            ("8 hosts at 100 gigabits", 500e-6, 4e9, 16_000_000),
            ("64 hosts at 400 gigabits", 4e-3, 2e10, MOST),
            ("nonsense", f64::NAN, f64::INFINITY, MIB),
        ] {
            assert_eq!(worthwhile(latency, rate), size, "{what}");
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
