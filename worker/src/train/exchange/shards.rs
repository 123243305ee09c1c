//! Sums of squares of each rank's part, with sharding.
//!
//! All ranks must get the same bits, as without sharding, where each rank adds the same parts in
//! the same order. An all-reduce carries them: each rank writes its own values and zeros elsewhere,
//! as small integers, which f32 adds exactly.

use super::Exchange;
use crate::comm::CommError;
use crate::optimizer::{GradientSlice, Optimizer, Ownership, sum_of_squares};
use crate::train::training::Training;
use std::ops::Range;

/// Elements of a value: 22 bits each.
pub(in crate::train) const ELEMENTS: usize = 3;
const BITS: u32 = 22;

/// The buckets of the sums, and this rank.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Shards {
    rank: u32,
    /// One value per rank.
    norms: usize,
    /// Two values per piece of the optimizer, for layer-wise rules.
    sums: usize,
}

impl Shards {
    pub(super) fn new(rank: u32, [norms, sums]: [usize; 2]) -> Shards {
        Shards { rank, norms, sums }
    }

    /// Elements of both buckets.
    pub(super) fn bucket_lens(training: &Training) -> [usize; 2] {
        let (buckets, world) = (&training.buckets, training.world as usize);
        let len = buckets.iter().map(|bucket| bucket.range.len()).sum();
        let parameters = buckets.last().map_or(0, |bucket| bucket.last + 1);
        let rule = &training.config.optimizer.rule;
        let sums = Optimizer::most_sums(rule, len, parameters, world * buckets.len());
        [ELEMENTS * world, 2 * ELEMENTS * sums]
    }
}

impl Exchange {
    /// The part of a bucket of gradients that a rank owns.
    pub fn part(&self, bucket: usize, rank: u32) -> Range<usize> {
        let len = self.ranges[bucket].range.len();
        let part = self.reducer.shard(bucket, rank);
        part.start.min(len)..part.end.min(len)
    }

    /// The ranks whose parts this rank has after the gradients were reduced.
    pub fn owners(&self) -> Range<u32> {
        self.shards.map_or(0..self.world, |shards| shards.rank..shards.rank + 1)
    }

    /// The gradients that this rank has of a bucket after it was reduced.
    pub fn gradients(&self, bucket: usize) -> GradientSlice<'_> {
        let Range { start, end } = self.ranges[bucket].range;
        match &self.parts {
            Some(parts) => {
                let (offset, values) = parts.of(bucket);
                GradientSlice { from: start + offset, values }
            }
            None => GradientSlice { from: start, values: &self.reducer.bucket(bucket)[..end - start] },
        }
    }

    /// Sum of squares of a rank's part of a bucket, which this rank must have.
    pub fn squares(&self, bucket: usize, rank: u32) -> f64 {
        let GradientSlice { from, values } = self.gradients(bucket);
        let (part, start) = (self.part(bucket, rank), self.ranges[bucket].range.start);
        sum_of_squares(&values[start + part.start - from..start + part.end - from])
    }

    /// The parts of the flat layout.
    pub fn ownership(&self) -> Ownership {
        let mut cuts = Vec::new();
        let mut own = Vec::new();
        for (bucket, Range { start, end }) in self.ranges.iter().map(|part| part.range.clone()).enumerate() {
            let parts = (0..self.world).map(|rank| self.part(bucket, rank)).filter(|part| !part.is_empty());
            cuts.extend(parts.map(|part| start + part.end));
            match self.shards {
                Some(shards) => {
                    let part = self.part(bucket, shards.rank);
                    own.extend((!part.is_empty()).then(|| start + part.start..start + part.end));
                }
                None => own.push(start..end),
            }
        }
        cuts.sort_unstable();
        Ownership { cuts, own }
    }

    /// Completes the sums of squares of all ranks' gradients; on entry, this rank's own is set.
    ///
    /// # Errors
    /// The group failed.
    pub fn complete_norms(&mut self, squares: &mut [f64]) -> Result<(), CommError> {
        let Some(Shards { rank, norms, .. }) = self.shards else { return Ok(()) };
        let bucket = self.reducer.bucket_mut(norms);
        for ((owner, into), value) in (0..).zip(bucket.chunks_exact_mut(ELEMENTS)).zip(&*squares) {
            encode((owner == rank).then_some(*value), into);
        }
        self.reducer.all_reduce(norms)?;
        let values = self.reducer.bucket(norms).chunks_exact(ELEMENTS).map(decode);
        squares.iter_mut().zip(values).for_each(|(square, value)| *square = value);
        Ok(())
    }

    /// Completes the sums of a layer-wise rule.
    ///
    /// # Errors
    /// The group failed.
    pub fn complete_sums(&mut self, optimizer: &mut Optimizer) -> Result<(), CommError> {
        let Some(Shards { sums, .. }) = self.shards else { return Ok(()) };
        let bucket = self.reducer.bucket_mut(sums);
        for ((is_own, values), into) in optimizer.sums().zip(bucket.chunks_exact_mut(2 * ELEMENTS)) {
            let (first, second) = into.split_at_mut(ELEMENTS);
            encode(is_own.then_some(values[0]), first);
            encode(is_own.then_some(values[1]), second);
        }
        self.reducer.all_reduce(sums)?;
        let bucket = self.reducer.bucket(sums);
        for ((_, values), from) in optimizer.sums().zip(bucket.chunks_exact(2 * ELEMENTS)) {
            let (first, second) = from.split_at(ELEMENTS);
            *values = [decode(first), decode(second)];
        }
        Ok(())
    }
}

/// Writes a value's bits as integers below 2^22; zeros without a value.
pub(in crate::train) fn encode(value: Option<f64>, into: &mut [f32]) {
    let bits = value.map_or(0, f64::to_bits);
    for (shift, into) in (0..).step_by(BITS as usize).zip(into) {
        *into = (bits >> shift & ((1 << BITS) - 1)) as f32;
    }
}

pub(in crate::train) fn decode(from: &[f32]) -> f64 {
    let parts = (0..).step_by(BITS as usize).zip(from);
    f64::from_bits(parts.fold(0, |bits, (shift, part)| bits | (*part as u64) << shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_value_survives_the_sum(bits in any::<u64>(), ranks in 1usize..5, owner in 0usize..5) {
            let mut sum = [0.0; ELEMENTS];
            for rank in 0..ranks {
                let mut part = [7.0; ELEMENTS];
                encode((rank == owner % ranks).then(|| f64::from_bits(bits)), &mut part);
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
            prop_assert_eq!(decode(&sum).to_bits(), bits);
        }
    }
}
