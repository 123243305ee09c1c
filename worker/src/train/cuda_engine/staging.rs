//! Copies gradients between a GPU and the host, where the ranks of a group reduce them.
//!
//! ```text
//! compute stream   backward .. ready(0) .. ready(1) .. loss                      update
//! copy stream           out(0) <┘    out(1) <┘                back(0)  back(1) ──┘
//! host                      └─ all-reduce(0) ──┴─ all-reduce(1) ──┘
//! ```

use super::memories::Memories;
use crate::lowering::{Computation, Memory};
use crate::train::TrainError;
use crate::train::training::Training;
use std::ops::Range;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Event, Pinned, Stream};

/// The copy stream and its pinned host memory.
pub(super) struct Staging {
    stream: Stream,
    out: Pinned<f32>,
    back: Pinned<f32>,
    loss: Pinned<f32>,
    /// For each bucket, recorded after the operation that completes its gradients.
    pub ready: Vec<Event>,
    /// See [`Computation::complete`].
    pub complete: [Vec<usize>; 2],
    /// Recorded after the last copy of a step.
    done: Event,
}

impl Staging {
    /// `longest`: elements of the longest bucket that is copied.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new(
        context: &Context,
        computation: &Computation,
        training: &Training,
        longest: usize,
    ) -> Result<Staging, TrainError> {
        let ready = training.buckets.iter().map(|_| context.event()).collect::<Result<_, _>>()?;
        Ok(Staging {
            stream: context.stream()?,
            out: context.pinned(longest)?,
            back: context.pinned(longest)?,
            loss: context.pinned(1)?,
            ready,
            complete: computation.complete(&training.buckets)?,
            done: context.event()?,
        })
    }

    /// Downloads gradients once they are complete. `bucket`: its index, and its range in the
    /// layout.
    ///
    /// # Errors
    /// The device failed.
    pub fn gradients(&mut self, (bucket, range): (usize, &Range<usize>), memories: &Memories) -> Result<&[f32], Error> {
        self.stream.wait(&self.ready[bucket])?;
        self.stream.download(memories.floats(Memory::Gradients, range), &mut self.out, 0..range.len())?;
        Ok(&self.out.values()?[..range.len()])
    }

    /// Downloads the loss after the event `end`.
    ///
    /// # Errors
    /// The device failed.
    pub fn loss(&mut self, end: &Event, memories: &Memories) -> Result<f32, Error> {
        self.stream.wait(end)?;
        self.stream.download(memories.span(Memory::Loss), &mut self.loss, 0..1)?;
        Ok(self.loss.values()?[0])
    }

    /// Queues the upload of reduced gradients.
    ///
    /// # Errors
    /// The device failed.
    pub fn put_back(&mut self, range: &Range<usize>, gradients: &[f32], memories: &Memories) -> Result<(), Error> {
        self.back.values_mut()?[..range.len()].copy_from_slice(gradients);
        self.stream.upload(&self.back, 0..range.len(), memories.floats(Memory::Gradients, range))
    }

    /// Queues the upload of the loss; later commands on `stream` wait for it.
    ///
    /// # Errors
    /// The device failed.
    pub fn finish(&mut self, loss: f32, memories: &Memories, stream: &Stream) -> Result<(), Error> {
        self.loss.values_mut()?[0] = loss;
        self.stream.upload(&self.loss, 0..1, memories.span(Memory::Loss))?;
        self.stream.record(&self.done)?;
        stream.wait(&self.done)
    }
}
