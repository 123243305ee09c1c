//! Sends only the largest gradients, with error feedback (Stich et al. 2018, "Sparsified SGD with
//! Memory"; Lin et al. 2018, "Deep Gradient Compression").
//!
//! ```text
//! bucket := gradients / loss scale + residual
//! entries of this rank: positions and values of the largest numbers of each block
//! all-reduce of the entries of all ranks: each rank writes its own part, zeros elsewhere
//! residual := bucket, zero where it was sent;  bucket := sum of all entries, in rank order
//! ```
//!
//! All ranks add the same entries in the same order, so the sums are bit-identical. If a value is
//! not finite on any rank, the residual stays as it was and the step is skipped or fails.

use crate::comm::{CommError, Reducer};
use crate::nn::Bucket;
use crate::optimizer::sum_of_squares;
use std::ops::Range;
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::TopK;

/// Maximum length of a block: positions in it are exact as f32.
const BLOCK: usize = 1 << 22;
/// One of so many numbers is sampled to estimate which ones are among the largest.
const SAMPLED: usize = 64;
/// Additional samples above the estimate, so that it is rarely too high.
const MARGIN: usize = 8;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// A part of a bucket from which the largest numbers are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    bucket: usize,
    /// In the bucket.
    range: Range<usize>,
    /// Start of the block in the flat layout.
    start: usize,
    /// Numbers that each rank sends.
    count: usize,
}

#[derive(Debug)]
pub(in crate::train) struct TopKExchange {
    blocks: Vec<Block>,
    /// Numbers that each rank sends.
    entries: usize,
    /// Bucket of the entries of all ranks.
    bucket: usize,
    rank: usize,
    world: usize,
    /// Scratch space for the selection from one block.
    keys: Vec<u64>,
}

impl TopKExchange {
    /// `bucket`: index of the bucket of the entries in the reducer.
    pub fn new(settings: TopK, buckets: &[Bucket], bucket: usize, (rank, world): (u32, u32)) -> TopKExchange {
        let blocks: Vec<Block> = blocks(settings, buckets).collect();
        let entries = blocks.iter().map(|block| block.count).sum();
        let longest = blocks.iter().map(|block| block.range.len()).max().unwrap_or(0);
        TopKExchange {
            blocks,
            entries,
            bucket,
            rank: rank as usize,
            world: world as usize,
            keys: Vec::with_capacity(longest),
        }
    }

    /// Length of the bucket of the entries of all ranks: a position and a value each.
    pub fn bucket_len(settings: TopK, buckets: &[Bucket], world: u32) -> usize {
        2 * blocks(settings, buckets).map(|block| block.count).sum::<usize>() * world as usize
    }

    /// Bytes that the selection needs.
    pub fn scratch_bytes(settings: TopK, buckets: &[Bucket]) -> u64 {
        8 * blocks(settings, buckets).map(|block| block.range.len() as u64).max().unwrap_or(0)
    }

    /// Replaces the gradients of all buckets, which include `loss_scale`, by the sums of what the
    /// ranks sent, which do not. Returns the sum of their squares, NaN if a value was not finite,
    /// and the time spent waiting. `residual` has the length of the layout.
    ///
    /// # Errors
    /// The group failed.
    pub fn exchange(
        &mut self,
        reducer: &mut Reducer,
        residual: &mut [f32],
        loss_scale: f32,
    ) -> Result<(f64, Duration), CommError> {
        self.select(reducer, residual, loss_scale);
        let at = Instant::now();
        reducer.all_reduce(self.bucket)?;
        let waited = at.elapsed();
        let is_finite =
            (0..self.world).all(|rank| reducer.bucket(self.bucket)[self.values(rank)].iter().all(|x| x.is_finite()));
        Ok((if is_finite { self.scatter(reducer, residual) } else { f64::NAN }, waited))
    }

    /// Positions of a rank in the bucket of the entries.
    fn positions(&self, rank: usize) -> Range<usize> {
        let start = 2 * rank * self.entries;
        start..start + self.entries
    }

    /// Values of a rank in the bucket of the entries.
    fn values(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.positions(rank);
        start + self.entries..end + self.entries
    }

    /// Adds the residual to the gradients and writes this rank's entries.
    fn select(&mut self, reducer: &mut Reducer, residual: &[f32], loss_scale: f32) {
        let unscale = 1.0 / loss_scale;
        reducer.bucket_mut(self.bucket).fill(0.0);
        let (mut position, mut value) = (self.positions(self.rank).start, self.values(self.rank).start);
        for Block { bucket, range, start, count } in &self.blocks {
            let (gradients, entries) = reducer.buckets_mut(*bucket, self.bucket);
            let gradients = &mut gradients[range.clone()];
            for (gradient, residual) in gradients.iter_mut().zip(&residual[*start..]) {
                *gradient = *gradient * unscale + residual;
            }
            for at in largest(gradients, *count, &mut self.keys) {
                entries[position] = at as f32;
                entries[value] = gradients[at];
                (position, value) = (position + 1, value + 1);
            }
        }
    }

    /// Keeps what this rank has not sent, and adds up the entries. Returns the sum of squares.
    fn scatter(&self, reducer: &mut Reducer, residual: &mut [f32]) -> f64 {
        let mut squares = 0.0;
        let mut first = 0;
        for Block { bucket, range, start, count } in &self.blocks {
            let (sums, entries) = reducer.buckets_mut(*bucket, self.bucket);
            let sums = &mut sums[range.clone()];
            let residual = &mut residual[*start..][..range.len()];
            residual.copy_from_slice(sums);
            sums.fill(0.0);
            for rank in 0..self.world {
                let positions = &entries[self.positions(rank)][first..first + count];
                let values = &entries[self.values(rank)][first..first + count];
                for (at, value) in positions.iter().zip(values) {
                    sums[*at as usize] += value;
                    if rank == self.rank {
                        residual[*at as usize] = 0.0;
                    }
                }
            }
            squares += sum_of_squares(sums);
            first += count;
        }
        squares
    }
}

fn blocks(TopK { ratio }: TopK, buckets: &[Bucket]) -> impl Iterator<Item = Block> {
    buckets.iter().enumerate().flat_map(move |(bucket, Bucket { range: whole, .. })| {
        (0..whole.len()).step_by(BLOCK).map(move |from| {
            let range = from..whole.len().min(from + BLOCK);
            let count = ((range.len() as f64 * ratio).ceil() as usize).clamp(1, range.len());
            Block { bucket, start: whole.start + from, range, count }
        })
    })
}

/// Positions of the `count` numbers with the largest magnitudes, of equal ones the first; NaN is
/// the largest. `keys` is scratch space with room for all numbers.
fn largest<'a>(numbers: &[f32], count: usize, keys: &'a mut Vec<u64>) -> impl Iterator<Item = usize> + 'a {
    let key = |(at, number): (usize, &f32)| u64::from(number.to_bits() & MAGNITUDE) << 32 | u64::from(!(at as u32));
    let descending = |a: &u64, b: &u64| b.cmp(a);
    keys.clear();
    // The estimate only saves work: whatever it is, the same numbers are selected.
    let rank = count / SAMPLED + MARGIN;
    if rank < numbers.len() / SAMPLED / 2 {
        keys.extend(numbers.iter().enumerate().step_by(SAMPLED).map(key));
        let (_, estimate, _) = keys.select_nth_unstable_by(rank, descending);
        let least = (*estimate >> 32) as u32;
        keys.clear();
        keys.extend(numbers.iter().enumerate().filter(|(_, number)| number.to_bits() & MAGNITUDE >= least).map(key));
    }
    if keys.len() < count {
        keys.clear();
        keys.extend(numbers.iter().enumerate().map(key));
    }
    if count < keys.len() {
        keys.select_nth_unstable_by(count, descending);
    }
    keys.iter().take(count).map(|key| !(*key as u32) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Group, Options};
    use crate::train::tests::on_two_ranks;
    use proptest::prelude::*;

    fn sorted(numbers: &[f32], count: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..numbers.len()).collect();
        // Stable: of equal magnitudes the first stays first.
        all.sort_by(|a, b| numbers[*b].abs().total_cmp(&numbers[*a].abs()));
        all.truncate(count);
        all.sort_unstable();
        all
    }

    fn selected(numbers: &[f32], count: usize) -> Vec<usize> {
        let mut keys = Vec::new();
        let mut found: Vec<usize> = largest(numbers, count, &mut keys).collect();
        found.sort_unstable();
        found
    }

    /// Random numbers, a quarter of them with equal magnitudes and an eighth NaN. Not a proptest
    /// strategy, which would take most of the time.
    fn numbers(mut seed: u64, len: usize) -> Vec<f32> {
        let mut next = || {
            // Knuth's MMIX generator.
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as u32
        };
        (0..len)
            .map(|_| match next() % 8 {
                0 => 1.0,
                1 => -1.0,
                2 => f32::NAN,
                _ => next() as f32 / (1 << 22) as f32 - 2.0,
            })
            .collect()
    }

    proptest! {
        #[test]
        fn the_largest_numbers_are_those_of_a_sort(
            seed in any::<u64>(),
            len in 1usize..5000,
            part in 0.0f64..=1.0,
        ) {
            let numbers = numbers(seed, len);
            let count = ((numbers.len() as f64 * part) as usize).max(1);
            prop_assert_eq!(selected(&numbers, count), sorted(&numbers, count));
        }
    }

    #[test]
    fn a_poor_sample_selects_the_same_numbers() {
        // Every sampled number is large, and then none is.
        for large in [0, 1] {
            let numbers: Vec<f32> = (0..100_000)
                .map(|at| if (at % SAMPLED == 0) == (large == 0) { 10.0 } else { 1.0 + at as f32 * 1e-6 })
                .collect();
            for count in [1, 500, 3000] {
                assert_eq!(selected(&numbers, count), sorted(&numbers, count), "{large} {count}");
            }
        }
    }

    #[test]
    fn blocks_cover_all_buckets_and_send_at_least_one_number_each() {
        let bucket = |range: Range<usize>| Bucket { range, first: 0, last: 0 };
        let buckets = [bucket(0..10), bucket(10..10 + BLOCK + 1)];
        let blocks = blocks(TopK { ratio: 0.001 }, &buckets);
        let expected = [(0, 0..10, 0, 1), (1, 0..BLOCK, 10, 4195), (1, BLOCK..BLOCK + 1, 10 + BLOCK, 1)];
        let expected = expected.map(|(bucket, range, start, count)| Block { bucket, range, start, count });
        assert_eq!(blocks.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_is_not_sent_now_is_sent_later() {
        let ranges = [Bucket { range: 0..8, first: 0, last: 0 }];
        // One of eight.
        let settings = TopK { ratio: 0.125 };
        let sent = on_two_ranks(|group| {
            let mut group = Group::join(&group).unwrap();
            let lens = [8, TopKExchange::bucket_len(settings, &ranges, 2)];
            let mut reducer = Reducer::connect(&mut group, &lens, &Options::default()).unwrap();
            let mut top_k = TopKExchange::new(settings, &ranges, 1, (group.rank(), 2));
            let (mut residual, mut sent) = ([0.0; 8], [0.0; 8]);
            for _ in 0..100 {
                // Gradients of this rank, including a loss scale of 4.
                let rank = group.rank() as usize;
                for (at, gradient) in reducer.bucket_mut(0).iter_mut().enumerate() {
                    *gradient = 4.0 * (1 + (at + rank) % 8) as f32;
                }
                let (squares, _) = top_k.exchange(&mut reducer, &mut residual, 4.0).unwrap();
                assert_eq!(squares, sum_of_squares(reducer.bucket(0)));
                assert!(reducer.bucket(0).iter().filter(|sum| **sum != 0.0).count() <= 2);
                sent.iter_mut().zip(reducer.bucket(0)).for_each(|(sent, sum)| *sent += sum);
            }
            reducer.bucket_mut(0).fill(f32::INFINITY);
            let before = residual;
            let (squares, _) = top_k.exchange(&mut reducer, &mut residual, 4.0).unwrap();
            assert!(squares.is_nan() && residual == before, "a skipped step loses nothing");
            drop(reducer);
            group.leave().unwrap();
            (sent, residual)
        });
        let [(sent, first), (same, second)] = [sent[0], sent[1]];
        assert_eq!(sent, same, "both ranks have the same sums");
        for at in 0..8 {
            let all = 100.0 * ((1 + at) + (1 + (at + 1) % 8)) as f32;
            assert_eq!(sent[at] + first[at] + second[at], all, "position {at}");
            assert!(sent[at] > 0.5 * all, "position {at}");
        }
    }
}
