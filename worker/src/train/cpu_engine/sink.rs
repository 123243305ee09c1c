//! Writes gradients directly into registered buckets, and starts an all-reduce after the last
//! gradient of its buckets.

use crate::comm::{CommError, Reducer};
use crate::nn::{Bucket, GradientSink, Layout};
use crate::train::engine::Flags;
use crate::train::exchange::{Buckets, GradientParts, Push, Servers};
use std::ops::Range;
use std::time::{Duration, Instant};

pub(super) struct GradientSlots {
    /// Bucket and range within it, by ordinal.
    slots: Vec<(usize, Range<usize>)>,
    /// Ordinal of each bucket's last parameter.
    last: Vec<usize>,
    /// Elements of each bucket.
    lens: Vec<usize>,
}

impl GradientSlots {
    pub(super) fn new(layout: &Layout, buckets: &[Bucket]) -> GradientSlots {
        let mut slots = Vec::with_capacity(layout.parameters.len());
        for (index, bucket) in buckets.iter().enumerate() {
            for parameter in &layout.parameters[bucket.first..=bucket.last] {
                let range = parameter.range();
                slots.push((index, range.start - bucket.range.start..range.end - bucket.range.start));
            }
        }
        let lens = buckets.iter().map(|bucket| bucket.range.len()).collect();
        GradientSlots { slots, last: buckets.iter().map(|bucket| bucket.last).collect(), lens }
    }

    /// The bucket of a parameter.
    pub(super) fn bucket(&self, ordinal: usize) -> usize {
        self.slots[ordinal].0
    }
}

/// How the last backward pass of a step reduces buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReduceMode {
    /// Each reduction starts as soon as its buckets are complete; otherwise all start after the
    /// pass.
    pub overlaps: bool,
    /// Each reduction ends before anything else happens.
    pub blocks: bool,
}

/// This rank's contribution to the metrics of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Metrics<'a> {
    pub buckets: &'a Buckets,
    /// This rank's share of the mean loss.
    pub loss: f32,
    pub flags: Flags,
    pub statistics: &'a [f32],
}

/// The gradient sink of one backward pass.
pub(super) struct BucketSink<'a> {
    pub reducer: &'a mut Reducer,
    pub slots: &'a GradientSlots,
    /// With parameter servers: they get the gradients.
    pub servers: Option<(&'a Servers, Push)>,
    /// Add to the gradients of earlier micro-batches of this step.
    pub accumulate: bool,
    /// `None`: not in this pass.
    pub mode: Option<ReduceMode>,
    /// Written into their bucket before it is reduced.
    pub metrics: Metrics<'a>,
    /// With divided gradients.
    pub parts: Option<&'a mut GradientParts>,
    /// Takes gradients that have no place since the group failed.
    pub discarded: &'a mut Vec<f32>,
    /// The first failed reduction that backward waited for.
    pub failed: Option<CommError>,
    /// Time backward waited for reductions.
    pub waited: Duration,
}

impl BucketSink<'_> {
    /// Starts the reduction of a range of buckets in a lane. The metrics travel with their bucket.
    fn begin(&mut self, lane: usize, run: Range<usize>) {
        let Metrics { buckets, loss, flags, statistics } = self.metrics;
        if run.contains(&buckets.metrics_bucket()) {
            buckets.write_metrics(self.reducer, loss, flags, statistics);
        }
        if let Some((servers, push)) = self.servers.filter(|_| run.end <= buckets.gradients) {
            for bucket in run {
                let len = self.slots.lens[bucket];
                servers.push(bucket, &self.reducer.bucket(bucket)[..len], push);
            }
            return;
        }
        if buckets.shards.is_some() && run.end <= buckets.gradients {
            self.reducer.scatter_all(run, lane);
        } else {
            self.reducer.start_all(run, lane);
        }
    }

    /// Ends the last backward pass of a step: starts the reductions that wait for its end, and with
    /// `metrics` theirs, unless they travel with gradients. See [`BucketSink::outcome`].
    pub fn end(mut self, metrics: bool) -> Result<Duration, CommError> {
        let buckets = self.metrics.buckets;
        if let Some(mode) = self.mode.filter(|mode| !mode.overlaps) {
            for (number, run) in buckets.runs.iter().enumerate() {
                self.reduce(number, run.clone(), mode);
            }
        }
        let own = buckets.metrics_bucket();
        if metrics && own == buckets.gradients {
            self.begin(own, own..own + 1);
        }
        self.outcome()
    }

    /// Returns the time that backward waited for reductions.
    pub fn outcome(self) -> Result<Duration, CommError> {
        self.failed.map_or(Ok(self.waited), Err)
    }

    fn reduce(&mut self, lane: usize, run: Range<usize>, mode: ReduceMode) {
        self.begin(lane, run.clone());
        if mode.blocks {
            self.wait(run);
        }
    }

    /// Waits for an all-reduce, unless one has already failed.
    fn wait(&mut self, mut run: Range<usize>) {
        if self.failed.is_none() {
            let at = Instant::now();
            self.failed = run.find_map(|bucket| match self.servers {
                Some((servers, _)) => servers.arrive(bucket).err(),
                None => self.reducer.wait(bucket).err(),
            });
            self.waited += at.elapsed();
        }
    }
}

impl BucketSink<'_> {
    /// Whether gradients can be written to a bucket; it waits until others have left its place.
    fn enters(&mut self, bucket: usize) -> bool {
        let Some(parts) = self.parts.as_deref_mut() else { return true };
        if self.failed.is_none() && !parts.has_entered(bucket) {
            let at = Instant::now();
            self.failed = parts.enter(bucket, self.reducer).err();
            self.waited += at.elapsed();
        }
        self.failed.is_none()
    }
}

impl GradientSink for BucketSink<'_> {
    fn accumulate(&self) -> bool {
        self.accumulate
    }

    fn gradient(&mut self, ordinal: usize) -> &mut [f32] {
        let (bucket, range) = self.slots.slots[ordinal].clone();
        if !self.enters(bucket) {
            self.discarded.resize(range.len().max(self.discarded.len()), 0.0);
            return &mut self.discarded[..range.len()];
        }
        &mut self.reducer.bucket_mut(bucket)[range]
    }

    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]) {
        let [(a_bucket, a_range), (b_bucket, b_range)] = [a, b].map(|ordinal| self.slots.slots[ordinal].clone());
        if !(self.enters(a_bucket) && self.enters(b_bucket)) {
            let len = a_range.len() + b_range.len();
            self.discarded.resize(len.max(self.discarded.len()), 0.0);
            return self.discarded[..len].split_at_mut(a_range.len());
        }
        if a_bucket != b_bucket {
            let (first, second) = self.reducer.buckets_mut(a_bucket, b_bucket);
            return (&mut first[a_range], &mut second[b_range]);
        }
        let bucket = self.reducer.bucket_mut(a_bucket);
        let (first, second) = bucket.split_at_mut(b_range.start);
        (&mut first[a_range], &mut second[..b_range.len()])
    }

    fn finished(&mut self, ordinal: usize) {
        let bucket = self.slots.bucket(ordinal);
        let Some(mode) = self.mode.filter(|mode| mode.overlaps) else { return };
        if self.slots.last[bucket] != ordinal || self.failed.is_some() {
            return;
        }
        if let Some((number, run)) = self.metrics.buckets.run_ending_with(bucket) {
            self.reduce(number, run, mode);
        }
    }
}
