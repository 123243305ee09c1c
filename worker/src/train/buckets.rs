//! The buckets of a group: gradients, and what else the ranks exchange in a step.
//!
//! ```text
//! gradients 0 .. n-1     in the order in which backward completes them; runs of them are reduced together (`fusion`)
//! metrics                loss, flags and batch statistics; always 4 bytes per number, whatever the wire type
//! exchange               a few bytes from each rank, for rare events
//! check                  meaningless numbers, if the job asks for a measurement before the first step
//! ```
//!
//! If gradients travel in 4 bytes, the metrics of a step ride in the last gradient bucket and cost no message of their
//! own.

use super::blueprint::Blueprint;
use super::check;
use super::exchange::{self, LENGTH};
use crate::comm::{CommError, Communicator, Options, Wire};
use std::ops::Range;
use switchyard_worker_contract::config::WireType;

/// Numbers before the statistics: one cache line, shared with nothing else.
const FLAGS: usize = 16;

/// What a rank adds to the sums of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Flags {
    /// Share of this rank and micro-batch in the mean loss.
    pub loss: f32,
    /// 1: this rank was asked to stop.
    pub stop: f32,
    /// 1: a checkpoint is due by the clock of rank 0.
    pub due: f32,
    /// 1: this rank has written its shard of the current checkpoint.
    pub written: f32,
    /// 1: the shard could not be written.
    pub failed: f32,
}

#[derive(Debug, Clone)]
pub(super) struct Buckets {
    /// Numbers of each bucket, as the communicator registers them.
    pub lens: Vec<usize>,
    /// How the communicator carries them.
    pub options: Options,
    /// Number of gradient buckets.
    pub gradients: usize,
    /// The gradient buckets of each all-reduce, in order.
    pub runs: Vec<Range<usize>>,
    /// Bucket of a step's metrics, and where they begin in it.
    metrics: (usize, usize),
    statistics: usize,
    /// Numbers per rank in the exchange.
    slot: usize,
    world: usize,
    /// Bucket of the measured check, if there is one.
    pub check: Option<usize>,
}

impl Buckets {
    pub fn new(blueprint: &Blueprint) -> Buckets {
        let overlap = &blueprint.config.overlap;
        let wire = match overlap.wire_type {
            WireType::Fp32 => Wire::F32,
            WireType::Fp16 => Wire::F16,
            WireType::Bf16 => Wire::Bf16,
        };
        let statistics = blueprint.network.batch_statistics().len();
        let mut lens: Vec<usize> = blueprint.buckets.iter().map(|bucket| bucket.range.len()).collect();
        let gradients = lens.len();
        let (room, world) = (blueprint.exchange_room(), blueprint.world as usize);
        let metrics = match lens.last_mut().filter(|_| wire == Wire::F32) {
            Some(last) => {
                *last += FLAGS + statistics;
                (gradients - 1, *last - FLAGS - statistics)
            }
            None => (gradients, 0),
        };
        lens.extend([FLAGS + statistics, exchange::numbers(room, world)]);
        let check = blueprint.config.bandwidth_check.map(|_| lens.len());
        lens.extend(check.map(|_| check::NUMBERS));
        let probe = check.is_some();
        let options = Options { lanes: overlap.communicators, wire, exact_from: gradients as u32, probe };
        let runs = (0..gradients).map(|bucket| bucket..bucket + 1).collect();
        Buckets { lens, options, gradients, runs, metrics, statistics, slot: room + LENGTH, world, check }
    }

    /// The all-reduce that starts once this bucket is complete, and its number.
    pub fn run_ending_with(&self, bucket: usize) -> Option<(usize, Range<usize>)> {
        let number = self.runs.binary_search_by_key(&(bucket + 1), |run| run.end).ok()?;
        Some((number, self.runs[number].clone()))
    }

    /// The bucket for sums outside of steps.
    pub fn spare(&self) -> usize {
        self.gradients
    }

    /// The bucket that the metrics of a step travel in.
    pub fn of_metrics(&self) -> usize {
        self.metrics.0
    }

    /// Writes this rank's part of a step's metrics.
    pub fn write_metrics(&self, communicator: &mut Communicator, flags: Flags, statistics: &[f32]) {
        let all = &mut communicator.bucket_mut(self.metrics.0)[self.metrics.1..];
        let Flags { loss, stop, due, written, failed } = flags;
        all[..5].copy_from_slice(&[loss, stop, due, written, failed]);
        all[5..FLAGS].fill(0.0);
        all[FLAGS..FLAGS + self.statistics].copy_from_slice(statistics);
    }

    /// The sums over all ranks, once the bucket is reduced.
    pub fn read_metrics<'a>(&self, communicator: &'a Communicator) -> (Flags, &'a [f32]) {
        let all = &communicator.bucket(self.metrics.0)[self.metrics.1..];
        let flags = Flags { loss: all[0], stop: all[1], due: all[2], written: all[3], failed: all[4] };
        (flags, &all[FLAGS..FLAGS + self.statistics])
    }

    /// Sums a few numbers (at most 16) over all ranks.
    pub fn sum<const N: usize>(&self, communicator: &mut Communicator, own: [f32; N]) -> Result<[f32; N], CommError> {
        const { assert!(N <= FLAGS) };
        let bucket = self.spare();
        communicator.bucket_mut(bucket)[..N].copy_from_slice(&own);
        communicator.all_reduce(bucket)?;
        Ok(std::array::from_fn(|i| communicator.bucket(bucket)[i]))
    }

    /// Gathers the bytes of every rank on every rank. Bytes beyond the announced slot are cut; no caller sends that
    /// many.
    ///
    /// Each byte travels as a number next to the zeros of all other ranks.
    pub fn gather(&self, communicator: &mut Communicator, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let (bucket, rank) = (self.gradients + 1, communicator.rank() as usize);
        let room = self.slot - LENGTH;
        let own = &own[..own.len().min(room)];
        let numbers = communicator.bucket_mut(bucket);
        numbers.fill(0.0);
        let place = &mut numbers[rank * self.slot..][..self.slot];
        let length = (own.len() as u32).to_le_bytes();
        for (number, byte) in place.iter_mut().zip(length.iter().chain(own)) {
            *number = f32::from(*byte);
        }
        communicator.all_reduce(bucket)?;
        let all = communicator.bucket(bucket);
        let bytes = |part: &[f32]| part.iter().map(|&number| number as u8).collect::<Vec<u8>>();
        Ok((0..self.world)
            .map(|rank| {
                let place = &all[rank * self.slot..][..self.slot];
                let length = bytes(&place[..LENGTH]).try_into().map_or(0, u32::from_le_bytes) as usize;
                bytes(&place[LENGTH..][..length.min(room)])
            })
            .collect())
    }
}
