//! Uploads batches to a GPU.
//!
//! ```text
//! host            write(0)  write(1)             write(0)
//! copy stream       └ copy(0)  └ copy(1)            └ copy(0), after the device has read the slot
//! compute stream        └ micro-batch 0 └ micro-batch 1 └ micro-batch 2
//! ```

use super::SLOTS;
use super::memories::Memories;
use super::timer::OpTimer;
use crate::data::Batch;
use crate::lowering::{Inputs, Share};
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Event, Pinned, Stream};

/// Pinned memory for batches, and the stream that copies them.
pub(super) struct Feed {
    inputs: Inputs,
    stream: Stream,
    slots: [Slot; SLOTS],
}

struct Slot {
    pinned: Pinned<u8>,
    /// Recorded after the last copy.
    arrived: Event,
}

impl Feed {
    /// # Errors
    /// There is not enough memory.
    pub fn new(context: &Context, inputs: &Inputs) -> Result<Feed, Error> {
        let slot = || Ok::<_, Error>(Slot { pinned: context.pinned(inputs.bytes())?, arrived: context.event()? });
        Ok(Feed { inputs: inputs.clone(), stream: context.stream()?, slots: [slot()?, slot()?] })
    }

    /// Queues the copy of a batch; later commands on `compute` wait for it. `computed`: recorded
    /// after the last micro-batch in this slot.
    ///
    /// # Errors
    /// An earlier operation or a call failed.
    pub fn send(
        &mut self,
        slot: usize,
        (batch, share): (&Batch, Share),
        memories: &Memories,
        (computed, compute): (&Event, &Stream),
        timer: Option<&mut OpTimer>,
    ) -> Result<(), Error> {
        let Slot { pinned, arrived } = &mut self.slots[slot];
        self.inputs.write(batch, share, pinned.values_mut()?);
        self.stream.wait(computed)?;
        let bytes = self.inputs.bytes();
        let upload = || self.stream.upload(pinned, 0..bytes, memories.inputs[slot].span());
        match timer {
            Some(timer) => timer.copy(bytes, &self.stream, upload)?,
            None => upload()?,
        }
        self.stream.record(arrived)?;
        compute.wait(arrived)
    }
}
