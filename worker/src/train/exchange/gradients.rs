//! Divided gradients: a run waits for its place until the run before it there has been scattered;
//! then the rank keeps its parts of the sums.

use crate::comm::{CommError, Reducer};
use crate::cpu::AlignedBuffer;
use crate::train::places::Places;
use std::ops::Range;

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
        let occupants = vec![None; places.count()];
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
    use crate::nn::{Initial, Layout, Role, fuse};
    use crate::train::tests::on_two_ranks;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Fills each run with other numbers; the reducer refuses a run whose place is in use.
    #[test]
    fn a_rank_keeps_its_parts_of_the_sums_of_all_runs() {
        let lens = [64; 5];
        let kept = on_two_ranks(|group| {
            let mut group = Group::join(&group).unwrap();
            let mut layout = Layout::default();
            for (ordinal, len) in lens.iter().enumerate() {
                layout.push(format!("p{ordinal}"), &[*len], Role::Matrix, Initial::Constant(0.0));
            }
            let buckets = fuse(&layout, 1);
            let places = Places::new(&layout, &buckets, (0..lens.len()).map(|bucket| bucket..bucket + 1).collect());
            let runs = places.runs_of(lens.len());
            let mut reducer = Reducer::connect_in_places(&mut group, &lens, (&runs, &[]), &Options::default()).unwrap();
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
}
