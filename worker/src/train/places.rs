//! Where gradients are while backward computes them and the ranks add them up, if they are divided
//! among the ranks.
//!
//! ```text
//! place 0     run 0: backward -> scatter -> keep own part │ run 2: backward -> ...
//! place 1                 run 1: backward -> scatter -> keep own part │ run 3: ...
//! ```
//!
//! Neighbours have different places, so that backward goes on while gradients travel. A gradient to
//! which an early and a late layer add, as to a tied embedding, has a place of its own in between.

use crate::comm::BucketRun;
use crate::nn::{Bucket, Layout};
use std::ops::Range;

/// The places of all runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Places {
    pub runs: Vec<Range<usize>>,
    /// Place of each run.
    pub of: Vec<usize>,
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

    /// Number of places.
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    pub fn run_of(&self, bucket: usize) -> usize {
        self.runs.partition_point(|run| run.end <= bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Initial, Role, fuse};

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

    #[test]
    fn a_run_takes_the_place_that_fits_best() {
        let Places { of, sizes, .. } = places(&[16, 64, 16, 16, 64, 64], &[2]);
        assert_eq!((of, sizes), (vec![0, 1, 2, 0, 1, 0], vec![64, 64, 16]));
    }
}
