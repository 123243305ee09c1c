//! The GPU memory of a rank, allocated once.

use super::SLOTS;
use super::plan::too_large;
use crate::lowering::{Computation, Contents, Initial, Memory, Span};
use crate::train::TrainError;
use crate::train::training::Training;
use std::ops::Range;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{self, Buffer, Context};
use switchyard_worker_contract::event::MemoryUse;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

/// The buffer of each memory, the batch input buffers and the workspace.
pub(super) struct Memories {
    all: Vec<(Memory, Buffer)>,
    pub inputs: [Buffer; SLOTS],
    pub workspace: Buffer,
}

impl Memories {
    /// # Errors
    /// There is not enough memory.
    pub fn new(
        context: &Context,
        (computation, workspace): (&Computation, usize),
        training: &Training,
        need: &MemoryUse,
    ) -> Result<Memories, TrainError> {
        let limit = (context.free_bytes()? as f64 * training.config.memory.fraction) as u64;
        if need.total() > limit {
            return Err(too_large(need, training, limit).with_users_of(&context.device().bus));
        }
        Memories::allocate(context, computation, workspace).map_err(|error| match error {
            // Another process was faster, or memory is fragmented.
            Error::Call { code: OUT_OF_MEMORY, .. } => {
                too_large(need, training, limit).with_users_of(&context.device().bus)
            }
            other => other.into(),
        })
    }

    fn allocate(context: &Context, computation: &Computation, workspace: usize) -> Result<Memories, Error> {
        let hold = |contents: &Contents| -> Result<(Memory, Buffer), Error> {
            let buffer = match &contents.initial {
                Initial::Unwritten => context.allocate(contents.bytes)?,
                Initial::Zeros => context.zeros(contents.bytes)?,
                Initial::Bytes(bytes) => context.upload(bytes)?,
            };
            Ok((contents.memory, buffer))
        };
        let inputs = || context.allocate(computation.inputs().bytes());
        Ok(Memories {
            all: computation.contents().iter().map(hold).collect::<Result<_, _>>()?,
            inputs: [inputs()?, inputs()?],
            workspace: context.allocate(workspace)?,
        })
    }

    /// # Panics
    /// The network has no such memory.
    pub fn buffer(&self, memory: Memory) -> &Buffer {
        let found = self.all.iter().find(|(known, _)| *known == memory);
        &found.expect("invariant: what launches use is in the contents of the computation").1
    }

    /// The whole memory.
    pub fn span(&self, memory: Memory) -> driver::Span {
        self.buffer(memory).span()
    }

    /// A range of f32 values.
    ///
    /// # Panics
    /// The range is out of bounds.
    pub fn floats(&self, memory: Memory, range: &Range<usize>) -> driver::Span {
        let part = self.buffer(memory).part(4 * range.start..4 * range.end);
        part.expect("invariant: buckets lie within the layout")
    }

    /// Maps a span of the plan to device memory, for micro-batches in a slot.
    pub fn place(&self, computation: &Computation, slot: usize, span: Span) -> driver::Span {
        let found = match computation.inputs().place(span) {
            Some(range) => self.inputs[slot].part(range),
            None => self.buffer(span.memory).part(span.at..span.at + span.bytes),
        };
        found.expect("invariant: memory is as large as the launches need")
    }
}
