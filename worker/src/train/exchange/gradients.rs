//! Gradients divided among the ranks: a few places hold gradients while backward computes them and
//! the ranks add them up; a rank keeps its parts of the sums.
//!
//! ```text
//! place 0     run 0: backward -> scatter -> keep own part │ run 2: backward -> ...
//! place 1                 run 1: backward -> scatter -> keep own part │ run 3: ...
//! ```
//!
//! A run waits for its place until the run before it there has been scattered. Neighbours have
//! different places, so that backward goes on while gradients travel. A gradient to which an early
//! and a late layer add, as to a tied embedding, has a place of its own in between.

use crate::comm::{BucketRun, CommError, Reducer};
use crate::cpu::AlignedBuffer;
use crate::nn::{Bucket, Layout};
use std::ops::Range;

/// The places of all runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::train) struct Places {
    pub runs: Vec<Range<usize>>,
    /// Place of each run.
    of: Vec<usize>,
    /// Values that fit into each place.
    sizes: Vec<usize>,
}

impl Places {
    pub fn new(layout: &Layout, buckets: &[Bucket], runs: Vec<Range<usize>>) -> Places {
        let mut of: Vec<usize> = Vec::with_capacity(runs.len());
        let mut sizes: Vec<usize> = Vec::new();
        // The last run in each place.
        let mut occupants: Vec<usize> = Vec::new();
        for (number, run) in runs.iter().enumerate() {
            let size = buckets[run.clone()].iter().map(|bucket| bucket.range.len()).sum();
            let parameters = &layout.parameters[buckets[run.start].first..=buckets[run.end - 1].last];
            let written_after = parameters.iter().map(|parameter| parameter.written_after).min().unwrap_or(0);
            let is_free = |place: &usize| {
                let occupant = occupants[*place];
                occupant + 1 < number && buckets[runs[occupant].end - 1].last < written_after
            };
            // The smallest place that is large enough, or else the largest.
            let fit = |place: &usize| (sizes[*place] < size, sizes[*place].abs_diff(size));
            let place = (0..sizes.len()).filter(is_free).min_by_key(fit).unwrap_or(sizes.len());
            if place == sizes.len() {
                sizes.push(size);
                occupants.push(number);
            }
            (sizes[place], occupants[place]) = (sizes[place].max(size), number);
            of.push(place);
        }
        Places { runs, of, sizes }
    }

    /// Memory of all places in bytes.
    pub fn bytes(&self) -> u64 {
        4 * self.sizes.iter().sum::<usize>() as u64
    }

    /// For the reducer, with further buckets of their own memory.
    pub fn runs_of(&self, buckets: usize) -> Vec<BucketRun> {
        let runs = self.runs.iter().cloned().zip(&self.of);
        let mut all: Vec<BucketRun> = runs.map(|(buckets, &place)| BucketRun { buckets, place }).collect();
        let done = self.runs.last().map_or(0, |run| run.end);
        all.push(BucketRun { buckets: done..buckets, place: self.sizes.len() });
        all
    }

    fn run_of(&self, bucket: usize) -> usize {
        self.runs.partition_point(|run| run.end <= bucket)
    }
}

/// This rank's parts of the summed gradients.
pub(in crate::train) struct GradientParts {
    places: Places,
    /// In each place, the run whose sums have not been kept yet.
    occupants: Vec<Option<usize>>,
    /// This rank's part of each bucket.
    parts: Vec<Range<usize>>,
    /// Where each part begins in `kept`.
    starts: Vec<usize>,
    kept: AlignedBuffer,
}

impl GradientParts {
    /// `parts`: this rank's part of each bucket.
    pub fn new(places: Places, parts: Vec<Range<usize>>) -> GradientParts {
        let mut len = 0;
        let start = |part: &Range<usize>| {
            len += part.len();
            len - part.len()
        };
        let starts = parts.iter().map(start).collect();
        let occupants = vec![None; places.sizes.len()];
        GradientParts { places, occupants, parts, starts, kept: AlignedBuffer::zeroed(len) }
    }

    /// Whether the run of a bucket has its place.
    pub fn has_entered(&self, bucket: usize) -> bool {
        let run = self.places.run_of(bucket);
        self.occupants[self.places.of[run]] == Some(run)
    }

    /// Gives the run of a bucket its place, after keeping the sums that are there.
    ///
    /// # Errors
    /// The group failed.
    pub fn enter(&mut self, bucket: usize, reducer: &mut Reducer) -> Result<(), CommError> {
        let run = self.places.run_of(bucket);
        let place = self.places.of[run];
        self.keep(place, reducer)?;
        self.occupants[place] = Some(run);
        Ok(())
    }

    /// Keeps the sums of all places.
    ///
    /// # Errors
    /// The group failed.
    pub fn keep_all(&mut self, reducer: &mut Reducer) -> Result<(), CommError> {
        (0..self.occupants.len()).try_for_each(|place| self.keep(place, reducer))
    }

    fn keep(&mut self, place: usize, reducer: &mut Reducer) -> Result<(), CommError> {
        let Some(run) = self.occupants[place] else { return Ok(()) };
        for bucket in self.places.runs[run].clone() {
            reducer.wait(bucket)?;
            let part = self.parts[bucket].clone();
            self.kept[self.starts[bucket]..][..part.len()].copy_from_slice(&reducer.bucket(bucket)[part]);
        }
        self.occupants[place] = None;
        Ok(())
    }

    /// The sums of this rank's part of a bucket, and where the part begins in it.
    pub fn of(&self, bucket: usize) -> (usize, &[f32]) {
        let part = &self.parts[bucket];
        (part.start, &self.kept[self.starts[bucket]..][..part.len()])
    }

    /// Whether two runs have the same place.
    pub fn share_place(&self, [one, other]: [usize; 2]) -> bool {
        self.places.of[one] == self.places.of[other]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Group, Options};
    use crate::nn::{Initial, Role, fuse};
    use crate::train::tests::on_two_ranks;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Parameters of one value each; `early` are written before all others.
    fn places(lens: &[usize], early: &[usize]) -> Places {
        let mut layout = Layout::default();
        for (ordinal, &len) in lens.iter().enumerate() {
            layout.push(format!("p{ordinal}"), &[len], Role::Matrix, Initial::Constant(0.0));
        }
        early.iter().for_each(|&ordinal| layout.parameters[ordinal].written_after = 0);
        let buckets = fuse(&layout, 1);
        Places::new(&layout, &buckets, (0..buckets.len()).map(|bucket| bucket..bucket + 1).collect())
    }

    #[test]
    fn neighbours_alternate_between_two_places() {
        let Places { of, sizes, .. } = places(&[16, 32, 16, 48, 16], &[]);
        assert_eq!((of, sizes), (vec![0, 1, 0, 1, 0], vec![16, 48]));
    }

    #[test]
    fn a_gradient_that_is_written_early_has_a_place_of_its_own() {
        let Places { of, sizes, .. } = places(&[16, 16, 16, 16, 64], &[4]);
        assert_eq!((of, sizes), (vec![0, 1, 0, 1, 2], vec![16, 16, 64]));
    }

    /// Fills each run with other numbers; the reducer refuses a run whose place is in use.
    #[test]
    fn a_rank_keeps_its_parts_of_the_sums_of_all_runs() {
        let lens = [64; 5];
        let kept = on_two_ranks(|group| {
            let mut group = Group::join(&group).unwrap();
            let places = places(&lens, &[4]);
            let runs = places.runs_of(lens.len());
            let mut reducer = Reducer::connect_in_places(&mut group, &lens, &runs, &Options::default()).unwrap();
            let rank = group.rank();
            let own = (0..lens.len()).map(|bucket| reducer.shard(bucket, rank));
            let mut parts = GradientParts::new(places, own.collect());
            for bucket in 0..lens.len() {
                assert!(!parts.has_entered(bucket));
                parts.enter(bucket, &mut reducer).unwrap();
                let value = |at: usize| (100 * bucket + at + rank as usize) as f32;
                reducer.bucket_mut(bucket).iter_mut().enumerate().for_each(|(at, into)| *into = value(at));
                reducer.scatter_all(bucket..bucket + 1, bucket);
            }
            let entering = catch_unwind(AssertUnwindSafe(|| reducer.bucket(1).len()));
            assert!(entering.is_err(), "run 3 has the place of run 1");
            parts.keep_all(&mut reducer).unwrap();
            let kept: Vec<(usize, Vec<f32>)> =
                (0..lens.len()).map(|bucket| (parts.of(bucket).0, parts.of(bucket).1.to_vec())).collect();
            drop(reducer);
            group.leave().unwrap();
            kept
        });
        for (rank, buckets) in kept.into_iter().enumerate() {
            for (bucket, (start, values)) in buckets.into_iter().enumerate() {
                assert_eq!((start, values.len()), (32 * rank, 32));
                let sum = |at: usize| (2 * (100 * bucket + start + at) + 1) as f32;
                assert_eq!(values, (0..32).map(sum).collect::<Vec<_>>(), "bucket {bucket} of rank {rank}");
            }
        }
    }

    #[test]
    fn a_run_takes_the_place_that_fits_best() {
        let Places { of, sizes, .. } = places(&[16, 64, 16, 16, 64, 64], &[2]);
        assert_eq!((of, sizes), (vec![0, 1, 2, 0, 1, 0], vec![64, 64, 16]));
    }
}
