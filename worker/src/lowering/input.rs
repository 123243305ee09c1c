//! Per-micro-batch device inputs, as one block of bytes.

use super::launch::{Memory, Span, Table};
use crate::cpu::ops::Targets;
use crate::data::Batch;
use crate::nn::layers::Loss;
use std::ops::Range;
use switchyard_cuda::kernels::embedding::order;

/// Alignment of each part of the block in bytes.
const ALIGNMENT: usize = 256;

/// The parts of a batch that launches read.
#[derive(Debug, Clone)]
pub struct Inputs {
    parts: Vec<(Memory, Range<usize>)>,
    losses: Vec<Loss>,
    /// Rows of the token table.
    vocabulary: u32,
    /// See [`order`].
    starts: Vec<u32>,
}

/// Weight of a micro-batch within its step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// Share of the global-batch mean.
    pub part: f32,
    pub loss_scale: f32,
}

/// Whether a memory is filled from each batch.
fn is_input(memory: Memory) -> bool {
    match memory {
        Memory::Values
        | Memory::Pixels
        | Memory::Entries(_)
        | Memory::Order(_)
        | Memory::Positions
        | Memory::Targets(_)
        | Memory::Factors
        | Memory::Shares => true,
        Memory::Arena
        | Memory::Weights
        | Memory::Half
        | Memory::Gradients
        | Memory::Constants
        | Memory::Statistics
        | Memory::BatchStatistics
        | Memory::Losses
        | Memory::Correct
        | Memory::Moments(_)
        | Memory::Loss
        | Memory::Squares
        | Memory::Rules
        | Memory::Scaler
        | Memory::Scaling
        | Memory::Chunks
        | Memory::Candidates
        | Memory::Numbers
        | Memory::Workspace
        | Memory::Norms
        | Memory::Ratios => false,
    }
}

impl Inputs {
    /// Selects the input memories among `used`, given with their bytes. `vocabulary`: rows of the
    /// token table, including padding rows.
    pub(super) fn new(used: &[(Memory, usize)], losses: Vec<Loss>, vocabulary: u32) -> Inputs {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(ALIGNMENT);
            start..start + bytes
        };
        let parts = used.iter().filter(|(memory, _)| is_input(*memory));
        let parts = parts.map(|(memory, bytes)| (*memory, place(*bytes))).collect();
        Inputs { parts, losses, vocabulary, starts: Vec::with_capacity(vocabulary as usize + 2) }
    }

    /// The memories of the block, and their sizes.
    pub fn parts(&self) -> impl Iterator<Item = (Memory, usize)> {
        self.parts.iter().map(|(memory, part)| (*memory, part.len()))
    }

    /// Size of the block.
    pub fn bytes(&self) -> usize {
        self.parts.last().map_or(0, |(_, part)| part.end)
    }

    /// Position of a span in the block; `None` if its memory is not an input.
    pub fn place(&self, span: Span) -> Option<Range<usize>> {
        let (_, part) = self.parts.iter().find(|(memory, _)| *memory == span.memory)?;
        Some(part.start + span.at..part.start + span.at + span.bytes)
    }

    /// Writes a batch into a block, which must be 4-byte aligned. Does not allocate after the first
    /// call.
    ///
    /// # Panics
    /// If the block or the batch has an unexpected size.
    pub fn write(&mut self, batch: &Batch, share: Share, block: &mut [u8]) {
        let Inputs { parts, losses, vocabulary, starts } = self;
        for (memory, part) in parts.iter() {
            let bytes = &mut block[part.clone()];
            match memory {
                // The kernel reads whole words.
                Memory::Pixels => bytes[..batch.pixels.len()].copy_from_slice(&batch.pixels),
                Memory::Values => bytes.copy_from_slice(bytemuck::cast_slice(&batch.values)),
                Memory::Entries(Table::Tokens) => bytes.copy_from_slice(bytemuck::cast_slice(&batch.tokens)),
                Memory::Entries(Table::Segments) => {
                    let numbers: &mut [u32] = bytemuck::cast_slice_mut(bytes);
                    numbers.iter_mut().zip(&batch.segments).for_each(|(to, segment)| *to = u32::from(*segment));
                }
                Memory::Order(Table::Tokens) => {
                    order(batch.tokens.iter().copied(), *vocabulary, starts, bytemuck::cast_slice_mut(bytes));
                }
                Memory::Order(Table::Segments) => {
                    let segments = batch.segments.iter().map(|segment| u32::from(*segment));
                    order(segments, SEGMENTS, starts, bytemuck::cast_slice_mut(bytes));
                }
                Memory::Positions => bytes.copy_from_slice(bytemuck::cast_slice(&batch.positions)),
                Memory::Targets(target) => bytes.copy_from_slice(bytemuck::cast_slice(target.of(batch))),
                Memory::Factors => factors(losses, batch, share.loss_scale * share.part, bytes),
                Memory::Shares => factors(losses, batch, share.part, bytes),
                _ => {}
            }
        }
    }
}

/// Number of segment ids.
const SEGMENTS: u32 = 2;

/// For each loss, the weight of each row of a micro-batch; the weights of all rows sum to `part`.
fn factors(losses: &[Loss], batch: &Batch, part: f32, bytes: &mut [u8]) {
    let factors: &mut [f32] = bytemuck::cast_slice_mut(bytes);
    for (factor, loss) in factors.iter_mut().zip(losses) {
        let counted = Targets { classes: loss.options.target.of(batch), smoothing: 0.0 }.counted();
        *factor = (f64::from(part) / counted.max(1) as f64) as f32;
    }
}
