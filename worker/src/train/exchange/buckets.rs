//! The buckets of a group: gradients, and what else the ranks exchange in a step.
//!
//! ```text
//! gradients 0 .. n-1     in the order in which backward completes them; runs of them are reduced together (`fusion`)
//! metrics                loss, flags, times and batch statistics; always 4 bytes per number, whatever the wire type
//! check                  meaningless numbers, if the job asks for a measurement before the first step
//! ```
//!
//! If gradients travel in 4 bytes, the metrics of a step ride in the last gradient bucket and cost no message of their
//! own.

use crate::comm::{Options, Reducer, Wire};
use crate::train::engine::{Flags, TIMES};
use crate::train::training::Training;
use std::ops::Range;
use switchyard_worker_contract::config::WireType;

/// Numbers before the statistics: one cache line, shared with nothing else.
const FLAGS: usize = 5 + TIMES;
/// Numbers of the check before the first step: 16 MiB.
pub const CHECK: usize = 4 << 20;

#[derive(Debug)]
pub(in crate::train) struct Buckets {
    /// Numbers of each bucket, as the reducer has them.
    pub lens: Vec<usize>,
    /// How the reducer carries them.
    pub options: Options,
    /// Number of gradient buckets.
    pub gradients: usize,
    /// The gradient buckets of each all-reduce, in order.
    pub runs: Vec<Range<usize>>,
    /// Bucket of a step's metrics, and where they begin in it.
    metrics: (usize, usize),
    statistics: usize,
    /// Bucket of the measured check, if there is one.
    pub check: Option<usize>,
}

impl Buckets {
    /// `statistics`: numbers of batch statistics.
    pub fn new(training: &Training, statistics: usize) -> Buckets {
        let overlap = &training.config.overlap;
        let wire = match overlap.wire_type {
            WireType::Fp32 => Wire::F32,
            WireType::Fp16 => Wire::F16,
            WireType::Bf16 => Wire::Bf16,
        };
        let mut lens: Vec<usize> = training.buckets.iter().map(|bucket| bucket.range.len()).collect();
        let gradients = lens.len();
        let metrics = match lens.last_mut().filter(|_| wire == Wire::F32) {
            Some(last) => {
                *last += FLAGS + statistics;
                (gradients - 1, *last - FLAGS - statistics)
            }
            None => (gradients, 0),
        };
        lens.push(FLAGS + statistics);
        let check = training.config.bandwidth_check.map(|_| lens.len());
        lens.extend(check.map(|_| CHECK));
        let probe = check.is_some();
        let options = Options { lanes: overlap.communicators, wire, exact_from: gradients as u32, probe };
        let runs = (0..gradients).map(|bucket| bucket..bucket + 1).collect();
        Buckets { lens, options, gradients, runs, metrics, statistics, check }
    }

    /// Metrics only: gradients are reduced elsewhere. `statistics`: numbers of batch statistics.
    pub fn without_gradients(statistics: usize) -> Buckets {
        Buckets {
            lens: vec![FLAGS + statistics],
            options: Options::default(),
            gradients: 0,
            runs: Vec::new(),
            metrics: (0, 0),
            statistics,
            check: None,
        }
    }

    /// The all-reduce that starts once this bucket is complete, and its number.
    pub fn run_ending_with(&self, bucket: usize) -> Option<(usize, Range<usize>)> {
        let number = self.runs.binary_search_by_key(&(bucket + 1), |run| run.end).ok()?;
        Some((number, self.runs[number].clone()))
    }

    /// The shortest bucket.
    pub fn shortest(&self) -> usize {
        self.gradients
    }

    /// The bucket that the metrics of a step travel in.
    pub fn of_metrics(&self) -> usize {
        self.metrics.0
    }

    /// Writes this rank's part of a step's metrics. `loss`: its share in the mean loss.
    pub fn write_metrics(&self, reducer: &mut Reducer, loss: f32, flags: Flags, statistics: &[f32]) {
        let all = &mut reducer.bucket_mut(self.metrics.0)[self.metrics.1..];
        let Flags { stop, due, written, failed, times } = flags;
        all[..5].copy_from_slice(&[loss, stop, due, written, failed]);
        all[5..FLAGS].copy_from_slice(&times);
        all[FLAGS..FLAGS + self.statistics].copy_from_slice(statistics);
    }

    /// The sums over all ranks, once the bucket is reduced: the loss, the flags, the statistics.
    pub fn read_metrics<'a>(&self, reducer: &'a Reducer) -> (f32, Flags, &'a [f32]) {
        let all = &reducer.bucket(self.metrics.0)[self.metrics.1..];
        let mut flags = Flags { stop: all[1], due: all[2], written: all[3], failed: all[4], times: [0.0; TIMES] };
        flags.times.copy_from_slice(&all[5..FLAGS]);
        (all[0], flags, &all[FLAGS..FLAGS + self.statistics])
    }
}
