//! Files that each rank records in the run directory while training, and where reports find them.
//!
//! ```text
//! RUN_DIR/record/rank-3.steps.jsonl      a StepRecord per optimizer step, appended; only the last line can be
//! incomplete
//! RUN_DIR/record/rank-3.trace.json       Chrome trace of the profiled steps
//! RUN_DIR/record/rank-3.kernels.json     times of the kernels of its GPU in these steps: [`crate::kernels::KernelTimes`]
//! RUN_DIR/record/rank-3.layers.json      times of its layers on CPUs in these steps: [`crate::layers::LayerTimes`]
//! RUN_DIR/record/rank-3.attempt-1.recorder   its last operations: see [`crate::recorder`]
//! RUN_DIR/tensorboard/                   event files of rank 0
//! ```
//!
//! Later attempts append; every line contains its attempt number.

use serde::{Deserialize, Serialize};

/// Directory of the records, relative to the run directory.
pub const DIR: &str = "record";
/// Directory of TensorBoard's event files, relative to the run directory.
pub const TENSORBOARD_DIR: &str = "tensorboard";

/// File of a rank's [`StepRecord`]s in [`DIR`].
pub fn steps_file(rank: u32) -> String {
    format!("rank-{rank}.steps.jsonl")
}

/// Trace file of a rank's operations in [`DIR`].
pub fn trace_file(rank: u32) -> String {
    format!("rank-{rank}.trace.json")
}

/// File of a rank's [`crate::kernels::KernelTimes`] in [`DIR`].
pub fn kernels_file(rank: u32) -> String {
    format!("rank-{rank}.kernels.json")
}

/// File of a rank's [`crate::layers::LayerTimes`] in [`DIR`].
pub fn layers_file(rank: u32) -> String {
    format!("rank-{rank}.layers.json")
}

/// One optimizer step of one rank. The parts are disjoint and add up to `total_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepRecord {
    /// Attempt that did the step.
    pub attempt: u32,
    /// Optimizer steps done, including this one.
    pub step: u64,
    /// End of the step by rank 0's clock, in microseconds since 1970. Ranks measure their offset
    /// to it when they join.
    pub end_us: i64,
    /// Wall-clock time since the end of the previous step.
    pub total_ms: f32,
    /// Waiting for the reader.
    pub input_ms: f32,
    /// Forward passes.
    pub forward_ms: f32,
    /// Backward passes.
    pub backward_ms: f32,
    /// Waiting for reductions after backward: exposed communication.
    pub communication_ms: f32,
    /// Waiting for the weights that other ranks updated, with sharding: exposed communication too.
    #[serde(default)]
    pub gather_ms: f32,
    /// Waiting for other stages of a pipeline, and exchanging activations with them.
    #[serde(default)]
    pub pipeline_ms: f32,
    /// Norm, clipping, unscaling, optimizer.
    pub optimizer_ms: f32,
    /// Taking a copy for a checkpoint, or waiting for the previous checkpoint.
    pub checkpoint_ms: f32,
    /// Evaluation, progress reports, and everything else between two steps.
    pub other_ms: f32,
    /// Time in which at least one all-reduce was running, from the first start to the last end
    /// without gaps, ms, and the same for all-gathers. The part that is not in `communication_ms`
    /// and `gather_ms` was hidden behind computation.
    pub reduce_ms: f32,
    /// Bytes reduced: gradients, with local steps weights.
    pub reduce_bytes: u64,
    /// Bytes not yet reduced when the backward pass ended.
    pub left_bytes: u64,
    /// Time that the reader spent on the micro-batches of this step, ms, summed over its threads.
    pub read_ms: f32,
    /// Mean loss over all ranks, nats.
    pub loss: f32,
    /// Gradient norm before clipping; `None` if the step was skipped because of an overflow.
    pub gradient_norm: Option<f32>,
    /// Loss scale; 1 without loss scaling.
    pub loss_scale: f32,
    /// Learning rate of this step.
    pub learning_rate: f32,
}
