//! Measurements of a step.

use std::time::Duration;

/// Measurements of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepReport {
    /// Optimizer steps done, including this one.
    pub step: u64,
    /// Mean loss over all ranks in nats.
    pub loss: f64,
    pub learning_rate: f64,
    /// Norm of the global gradient before clipping, with local steps the mean over the ranks of
    /// the norms of their own; `None` if the step was skipped because of an overflow.
    pub gradient_norm: Option<f64>,
    pub loss_scale: f64,
    /// Wall-clock time.
    pub total: Duration,
    pub forward: Duration,
    /// Backward passes, including the reductions they start.
    pub backward: Duration,
    /// Part of `backward` spent waiting for reductions, with `overlap.syncAllReduce`.
    pub backward_wait: Duration,
    /// Waiting for reductions after backward: exposed communication.
    pub communication_wait: Duration,
    /// Waiting for the other stages of a pipeline, and exchanging activations with them.
    pub pipeline_wait: Duration,
    /// Part of `communication_wait` spent waiting for the weights that other ranks updated, with
    /// sharding.
    pub gather_wait: Duration,
    /// Waiting for the reader.
    pub input_wait: Duration,
    /// Norm, clipping, optimizer.
    pub optimizer: Duration,
    /// Copying for a checkpoint, or waiting for the previous one.
    pub checkpoint: Duration,
    /// Time during which at least one reduction was running.
    pub reduce: Duration,
    /// Busy time of the reader's threads for this step.
    pub read: Duration,
    /// Gradient bytes not yet reduced when backward ended; 0 with a single rank.
    pub left_bytes: u64,
    /// Pushes of the slowest rank that this rank's weights lack after the step, with asynchronous
    /// parameter servers.
    pub staleness: u64,
}

impl StepReport {
    /// Time this rank spent computing and reading, without waiting for others.
    pub(super) fn busy(&self) -> Duration {
        (self.input_wait + self.forward + self.backward + self.optimizer).saturating_sub(self.backward_wait)
    }
}
