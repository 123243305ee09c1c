//! A micro-batch in host memory.

use super::bad::BadSample;
use super::task::Kind;
use crate::cpu::ops::IGNORE;
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::SampleType;

/// Elements per sample in each vector of a [`Batch`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Lengths {
    tokens: usize,
    segments: usize,
    positions: usize,
    pixels: usize,
    values: usize,
    targets: usize,
    next_sentence: usize,
}

impl Lengths {
    pub(super) fn new(kind: &Kind, sample_type: SampleType) -> Lengths {
        match *kind {
            Kind::Tokens { context, .. } => {
                Lengths { tokens: context as usize, targets: context as usize, ..Lengths::default() }
            }
            Kind::Masked(masking) => Lengths {
                tokens: masking.context as usize,
                segments: masking.context as usize,
                positions: masking.predictions as usize,
                targets: masking.predictions as usize,
                next_sentence: usize::from(masking.next_sentence),
                ..Lengths::default()
            },
            Kind::Images { height, width, channels, .. } => {
                let size = height as usize * width as usize * channels as usize;
                match sample_type {
                    SampleType::UInt8 => Lengths { pixels: size, targets: 1, ..Lengths::default() },
                    SampleType::Float32 => Lengths { values: size, targets: 1, ..Lengths::default() },
                }
            }
            Kind::Features { width, .. } => Lengths { values: width as usize, targets: 1, ..Lengths::default() },
        }
    }

    /// Bytes of one sample in host memory.
    pub(super) fn bytes(&self) -> u64 {
        let words = self.tokens + self.positions + self.values + self.targets + self.next_sentence;
        (4 * words + self.segments + self.pixels) as u64
    }
}

/// When a reader thread filled a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Making {
    /// Index of the reader thread.
    pub thread: u32,
    pub start: Instant,
    /// When the batch was full.
    pub end: Instant,
}

impl Making {
    pub fn took(&self) -> Duration {
        self.end - self.start
    }
}

/// One micro-batch of one rank. Vectors that a sample kind does not use are empty; lengths are
/// constant during a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Optimizer step, counted from 0.
    pub step: u64,
    /// Index within the step, below `merge`.
    pub micro_batch: u32,
    /// `[samples, context]`
    pub tokens: Vec<u32>,
    /// Segment of each token, 0 or 1. `[samples, context]`
    pub segments: Vec<u8>,
    /// Rows to predict, `sample * context + position`, ascending. `[samples, predictions]`
    pub positions: Vec<u32>,
    /// Image bytes, `[samples, height, width, channels]`.
    pub pixels: Vec<u8>,
    /// Features, `[samples, width]`; or normalised images, `[samples, height, width, channels]`.
    pub values: Vec<f32>,
    /// The next or masked token of each predicted row, or the class of each sample.
    pub targets: Vec<u32>,
    /// 1 if the second segment follows the first in the text, otherwise 0. `[samples]`
    pub next_sentence: Vec<u32>,
    /// Which thread filled the batch, and when; `None` outside a reader.
    pub making: Option<Making>,
    /// Unreadable samples of this batch.
    pub(super) bad: Vec<BadSample>,
}

/// One sample's part of a batch.
pub(super) struct Row<'a> {
    /// Row of its first token in the batch.
    pub first: u32,
    pub tokens: &'a mut [u32],
    pub segments: &'a mut [u8],
    pub positions: &'a mut [u32],
    pub pixels: &'a mut [u8],
    pub values: &'a mut [f32],
    pub targets: &'a mut [u32],
    pub next_sentence: &'a mut [u32],
}

/// Piece `index` of a vector cut into pieces of length `each`.
fn piece<T>(all: &mut [T], index: usize, each: usize) -> &mut [T] {
    &mut all[index * each..(index + 1) * each]
}

impl Batch {
    pub(super) fn new(samples: u32, lengths: &Lengths) -> Batch {
        let samples = samples as usize;
        Batch {
            tokens: vec![0; samples * lengths.tokens],
            segments: vec![0; samples * lengths.segments],
            positions: vec![0; samples * lengths.positions],
            pixels: vec![0; samples * lengths.pixels],
            values: vec![0.0; samples * lengths.values],
            targets: vec![0; samples * lengths.targets],
            next_sentence: vec![0; samples * lengths.next_sentence],
            ..Batch::default()
        }
    }

    /// Excludes a sample from losses and counts. The rest of its row keeps earlier values, which
    /// are valid: zeros, or another sample.
    pub(super) fn ignore(&mut self, sample: usize, lengths: &Lengths) {
        let row = self.row(sample, lengths);
        row.targets.fill(IGNORE);
        row.next_sentence.fill(IGNORE);
    }

    pub(super) fn row(&mut self, sample: usize, lengths: &Lengths) -> Row<'_> {
        Row {
            first: (sample * lengths.tokens) as u32,
            tokens: piece(&mut self.tokens, sample, lengths.tokens),
            segments: piece(&mut self.segments, sample, lengths.segments),
            positions: piece(&mut self.positions, sample, lengths.positions),
            pixels: piece(&mut self.pixels, sample, lengths.pixels),
            values: piece(&mut self.values, sample, lengths.values),
            targets: piece(&mut self.targets, sample, lengths.targets),
            next_sentence: piece(&mut self.next_sentence, sample, lengths.next_sentence),
        }
    }
}
