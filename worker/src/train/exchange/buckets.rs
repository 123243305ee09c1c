//! The buckets of a group: gradients, and the other values that ranks exchange in a step.
//!
//! ```text
//! gradients 0 .. n-1     in the order in which backward completes them; `fusion` merges reductions
//! metrics                loss, flags, times and batch statistics; f32 with every wire type
//! averages               batch statistics instead, with local steps
//! norms, sums            sums of squares of each rank's part, with sharding
//! entries                the gradients that are sent, with top-k
//! check                  arbitrary values, if the job requests the bandwidth check
//! ```
//!
//! If all gradients are sent as f32 in every step, the metrics of a step are part of the last
//! gradient bucket and need no message of their own. With sharding they do, because every rank
//! needs them, and with parameter servers, which get gradients only. The last bucket keeps its
//! length, which decides the order of its sums. With local steps, the gradient buckets also carry
//! the changes of the weights.

use super::shards::Shards;
use super::top_k::TopKExchange;
use crate::comm::{self, Options, Reducer, Wire};
use crate::train::engine::{Flags, REPORTED_TIMES};
use crate::train::training::Training;
use std::ops::Range;
use switchyard_worker_contract::config::{Algorithm, Compression, EngineConfig, Sharding, WireType};

/// Values before the statistics: one cache line, not shared with anything else.
const FLAGS: usize = 5 + REPORTED_TIMES;
/// Elements of the bandwidth check: 16 MiB.
pub const CHECK: usize = 4 << 20;

/// Memory of that bucket in bytes, if the job has the check.
pub fn check_bytes(config: &EngineConfig) -> u64 {
    if config.bandwidth_check.is_some() { 4 * CHECK as u64 } else { 0 }
}

/// Memory for the entries of top-k and their selection in bytes, if the job has it.
pub fn top_k_bytes(training: &Training) -> u64 {
    training.config.compression.map_or(0, |Compression::TopK(settings)| {
        let entries = TopKExchange::bucket_len(settings, &training.buckets, training.world);
        4 * entries as u64 + TopKExchange::scratch_bytes(settings, &training.buckets)
    })
}

#[derive(Debug)]
pub(in crate::train) struct Buckets {
    /// Elements of each bucket in the reducer.
    pub lens: Vec<usize>,
    /// The reducer's options.
    pub options: Options,
    /// Number of gradient buckets.
    pub gradients: usize,
    /// The gradient buckets of each all-reduce, in order.
    pub runs: Vec<Range<usize>>,
    /// Bucket of a step's metrics, and their offset in it.
    metrics: (usize, usize),
    /// Further sums in the metrics.
    sums: usize,
    /// Bucket of the batch statistics, if they are averaged together with the weights.
    pub averages: Option<usize>,
    /// Buckets of [`super::Shards`].
    pub shards: Option<[usize; 2]>,
    /// Bucket of the entries of [`TopKExchange`].
    pub entries: Option<usize>,
    /// Bucket of the bandwidth check, if there is one.
    pub check: Option<usize>,
}

impl Buckets {
    /// `statistics`: number of batch statistics values.
    pub fn new(training: &Training, statistics: usize) -> Buckets {
        let overlap = &training.config.overlap;
        let wire = match overlap.wire_type {
            WireType::Fp32 => Wire::F32,
            WireType::Fp16 => Wire::F16,
            WireType::Bf16 => Wire::Bf16,
        };
        let is_local = training.config.sync.local().is_some();
        let is_whole = !is_local && training.config.compression.is_none();
        // With local steps the norm is summed, and statistics are averaged together with weights.
        let sums = if is_local { 1 } else { statistics };
        let mut lens: Vec<usize> = training.buckets.iter().map(|bucket| bucket.range.len()).collect();
        let gradients = lens.len();
        let shared = lens.last_mut().filter(|_| wire == Wire::F32 && is_whole).map(|last| {
            *last += FLAGS + sums;
            (gradients - 1, *last - FLAGS - sums)
        });
        let is_sharded = training.config.sharding != Sharding::None;
        let has_own_metrics = is_sharded || training.config.parameter_server.is_some();
        let metrics = shared.filter(|_| !has_own_metrics).unwrap_or((gradients, 0));
        lens.push(FLAGS + sums);
        let shards = is_sharded.then(|| {
            lens.extend(Shards::bucket_lens(training));
            [lens.len() - 2, lens.len() - 1]
        });
        let averages = (is_local && statistics > 0).then_some(lens.len());
        lens.extend(averages.map(|_| statistics));
        let entries = training.config.compression.map(|_| lens.len());
        lens.extend(
            training.config.compression.map(|Compression::TopK(settings)| {
                TopKExchange::bucket_len(settings, &training.buckets, training.world)
            }),
        );
        let check = training.config.bandwidth_check.map(|_| lens.len());
        lens.extend(check.map(|_| CHECK));
        let probe = check.is_some();
        let algorithm = training.config.algorithm.map(|algorithm| match algorithm {
            Algorithm::Ring => comm::Algorithm::Ring,
            Algorithm::RecursiveDoubling => comm::Algorithm::RecursiveDoubling,
            Algorithm::HalvingDoubling => comm::Algorithm::HalvingDoubling,
            Algorithm::Tree => comm::Algorithm::Tree,
        });
        let options = Options { lanes: overlap.communicators, wire, exact_from: gradients as u32, probe, algorithm };
        let runs = (0..gradients).map(|bucket| bucket..bucket + 1).collect();
        Buckets { lens, options, gradients, runs, metrics, sums, averages, shards, entries, check }
    }

    /// Metrics only: gradients are reduced elsewhere. `statistics`: number of batch statistics
    /// values.
    pub fn without_gradients(statistics: usize) -> Buckets {
        Buckets {
            lens: vec![FLAGS + statistics],
            options: Options::default(),
            gradients: 0,
            runs: Vec::new(),
            metrics: (0, 0),
            sums: statistics,
            averages: None,
            shards: None,
            entries: None,
            check: None,
        }
    }

    /// The all-reduce that starts once this bucket is complete, and its number.
    pub fn run_ending_with(&self, bucket: usize) -> Option<(usize, Range<usize>)> {
        let number = self.runs.binary_search_by_key(&(bucket + 1), |run| run.end).ok()?;
        Some((number, self.runs[number].clone()))
    }

    /// The number of a bucket's all-reduce.
    pub fn run_of(&self, bucket: usize) -> usize {
        self.runs.partition_point(|run| run.end <= bucket)
    }

    pub fn shortest(&self) -> usize {
        self.gradients
    }

    /// The bucket with the metrics of a step.
    pub fn metrics_bucket(&self) -> usize {
        self.metrics.0
    }

    /// Writes this rank's part of a step's metrics. `loss`: its share of the mean loss; `sums`:
    /// its further values.
    pub fn write_metrics(&self, reducer: &mut Reducer, loss: f32, flags: Flags, sums: &[f32]) {
        let all = &mut reducer.bucket_mut(self.metrics.0)[self.metrics.1..];
        let Flags { stop, due, written, failed, times } = flags;
        all[..5].copy_from_slice(&[loss, stop, due, written, failed]);
        all[5..FLAGS].copy_from_slice(&times);
        all[FLAGS..FLAGS + self.sums].copy_from_slice(sums);
    }

    /// Reads the sums over all ranks after the bucket is reduced: loss, flags, further values.
    pub fn read_metrics<'a>(&self, reducer: &'a Reducer) -> (f32, Flags, &'a [f32]) {
        let all = &reducer.bucket(self.metrics.0)[self.metrics.1..];
        let mut flags =
            Flags { stop: all[1], due: all[2], written: all[3], failed: all[4], times: [0.0; REPORTED_TIMES] };
        flags.times.copy_from_slice(&all[5..FLAGS]);
        (all[0], flags, &all[FLAGS..FLAGS + self.sums])
    }
}
