//! Batch norm statistics: those of a batch are downloaded from the device; the running ones are on
//! the host and are uploaded for evaluations.

use super::SLOTS;
use super::memories::Memories;
use crate::lowering::{Memory, Plan};
use crate::train::statistics::{add_share, update_running};
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Event, Pinned, Stream};

pub(super) struct Norms {
    /// Names and lengths.
    pub names: Vec<(String, usize)>,
    pub running: Vec<f32>,
    /// This rank's share of the mean over the micro-batches of a step; after the reduction, the
    /// mean of all ranks.
    pub step: Vec<f32>,
    /// Of micro-batches in flight.
    batch: [Pinned<f32>; SLOTS],
    /// Copies them during the backward pass.
    stream: Stream,
    /// Recorded after the last copy.
    copied: Event,
}

impl Norms {
    /// # Errors
    /// There is not enough memory.
    pub fn new(context: &Context, plan: &Plan) -> Result<Norms, Error> {
        let running = plan.initial_statistics();
        // Pinned memory cannot be empty.
        let batch = || context.pinned(running.len().max(1));
        Ok(Norms {
            names: plan.statistics().map(|(name, len)| (name.to_owned(), len)).collect(),
            step: vec![0.0; running.len()],
            batch: [batch()?, batch()?],
            stream: context.stream()?,
            copied: context.event()?,
            running,
        })
    }

    /// Queues the copy of a micro-batch's statistics; later commands on `compute` wait for it.
    /// `forward`: recorded after its forward pass.
    ///
    /// # Errors
    /// The device failed.
    pub fn download(
        &mut self,
        slot: usize,
        memories: &Memories,
        (forward, compute): (&Event, &Stream),
    ) -> Result<(), Error> {
        let len = self.running.len();
        if len == 0 {
            return Ok(());
        }
        self.stream.wait(forward)?;
        self.stream.download(memories.span(Memory::BatchStatistics), &mut self.batch[slot], 0..len)?;
        self.stream.record(&self.copied)?;
        compute.wait(&self.copied)
    }

    /// Adds a micro-batch's statistics to those of the step.
    ///
    /// # Errors
    /// The device failed.
    pub fn add(&mut self, slot: usize, share: f32) -> Result<(), Error> {
        if !self.step.is_empty() {
            add_share(&mut self.step, self.batch[slot].values()?, share);
        }
        Ok(())
    }

    /// Updates the running statistics with those of the step.
    pub fn update_running(&mut self) {
        update_running(&mut self.running, &self.step);
    }

    /// Copies the running statistics to the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn upload(&self, memories: &Memories) -> Result<(), Error> {
        match self.running.is_empty() {
            true => Ok(()),
            false => memories.buffer(Memory::Statistics).write(0, &self.running),
        }
    }
}
