//! Writes gradients straight into registered buckets; an all-reduce starts with the last gradient of its buckets.

use crate::comm::{CommError, Reducer};
use crate::nn::{Bucket, GradientSink, Layout};
use crate::train::engine::Flags;
use crate::train::exchange::Buckets;
use std::ops::Range;
use std::time::{Duration, Instant};

pub(super) struct Places {
    /// Bucket, and range of floats within it, by ordinal.
    places: Vec<(usize, Range<usize>)>,
    /// Ordinal of the last parameter of each bucket.
    last: Vec<usize>,
}

impl Places {
    pub(super) fn new(layout: &Layout, buckets: &[Bucket]) -> Places {
        let mut places = Vec::with_capacity(layout.parameters.len());
        for (index, bucket) in buckets.iter().enumerate() {
            for parameter in &layout.parameters[bucket.first..=bucket.last] {
                let range = parameter.range();
                places.push((index, range.start - bucket.range.start..range.end - bucket.range.start));
            }
        }
        Places { places, last: buckets.iter().map(|bucket| bucket.last).collect() }
    }
}

/// When buckets are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Not in this pass: more micro-batches follow, or all buckets start after it.
    Later,
    /// Each all-reduce as soon as its buckets are complete.
    AtOnce,
    /// The same, and backward waits for the result.
    AndWait,
}

/// What this rank adds to the metrics of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Metrics<'a> {
    pub buckets: &'a Buckets,
    /// Share of this rank in the mean loss.
    pub loss: f32,
    pub flags: Flags,
    pub statistics: &'a [f32],
}

/// One backward pass into the buckets.
pub(super) struct BucketSink<'a> {
    pub reducer: &'a mut Reducer,
    pub places: &'a Places,
    /// Add to the gradients of earlier micro-batches of this step.
    pub accumulate: bool,
    pub start: Start,
    /// Written into their bucket before it starts.
    pub metrics: Metrics<'a>,
    /// The first failure of a reduction that backward waited for.
    pub failed: Option<CommError>,
    /// Time that backward waited for reductions.
    pub waited: Duration,
}

impl BucketSink<'_> {
    /// Starts the all-reduce of a range of buckets, in a lane. The bucket of the metrics takes them along.
    pub fn begin(&mut self, lane: usize, run: Range<usize>) {
        let Metrics { buckets, loss, flags, statistics } = self.metrics;
        if run.contains(&buckets.of_metrics()) {
            buckets.write_metrics(self.reducer, loss, flags, statistics);
        }
        self.reducer.start_all(run, lane);
    }

    /// Waits for an all-reduce, unless one has failed.
    pub fn wait(&mut self, mut run: Range<usize>) {
        if self.failed.is_none() {
            let at = Instant::now();
            self.failed = run.find_map(|bucket| self.reducer.wait(bucket).err());
            self.waited += at.elapsed();
        }
    }
}

impl GradientSink for BucketSink<'_> {
    fn accumulate(&self) -> bool {
        self.accumulate
    }

    fn gradient(&mut self, ordinal: usize) -> &mut [f32] {
        let (bucket, range) = &self.places.places[ordinal];
        &mut self.reducer.bucket_mut(*bucket)[range.clone()]
    }

    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]) {
        let ((a_bucket, a_range), (b_bucket, b_range)) = (&self.places.places[a], &self.places.places[b]);
        if a_bucket != b_bucket {
            let (first, second) = self.reducer.buckets_mut(*a_bucket, *b_bucket);
            return (&mut first[a_range.clone()], &mut second[b_range.clone()]);
        }
        let bucket = self.reducer.bucket_mut(*a_bucket);
        let (first, second) = bucket.split_at_mut(b_range.start);
        (&mut first[a_range.clone()], &mut second[..b_range.len()])
    }

    fn finished(&mut self, ordinal: usize) {
        let bucket = self.places.places[ordinal].0;
        if self.start == Start::Later || self.places.last[bucket] != ordinal || self.failed.is_some() {
            return;
        }
        let Some((number, run)) = self.metrics.buckets.run_ending_with(bucket) else { return };
        self.begin(number, run.clone());
        if self.start == Start::AndWait {
            self.wait(run);
        }
    }
}
