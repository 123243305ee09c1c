//! Batches on their way to a GPU.

use super::memories::Memories;
use crate::data::Batch;
use crate::gpu::{Inputs, Share};
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Pinned, Stream};

/// Micro-batches that may be under way: while a device computes one, the host prepares the next.
pub(super) const SLOTS: usize = 2;

/// Pinned memory for batches.
pub(super) struct Feed {
    inputs: Inputs,
    slots: [Pinned<u8>; SLOTS],
}

impl Feed {
    /// # Errors
    /// There is not enough memory.
    pub fn new(context: &Context, inputs: &Inputs) -> Result<Feed, Error> {
        let slot = || context.pinned(inputs.bytes());
        Ok(Feed { inputs: inputs.clone(), slots: [slot()?, slot()?] })
    }

    /// Queues the copy of a batch, once an earlier copy from the slot is done.
    ///
    /// # Errors
    /// Work failed earlier, or a call fails.
    pub fn send(
        &mut self,
        slot: usize,
        (batch, share): (&Batch, Share),
        memories: &Memories,
        stream: &Stream,
    ) -> Result<(), Error> {
        let pinned = &mut self.slots[slot % SLOTS];
        self.inputs.write(batch, share, pinned.values_mut()?);
        stream.upload(pinned, 0..self.inputs.bytes(), memories.inputs.span())
    }
}
