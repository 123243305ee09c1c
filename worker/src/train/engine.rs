//! The compute engine of a rank, on CPUs or a GPU: weights, moments, gradients and their
//! reductions.
//!
//! A device computes while the host prepares the next step, so an engine can return the outcome of
//! a step late: after the next step has begun, but no later. Outcomes are returned in step order,
//! once each, and are the same on all ranks.

use super::TrainError;
use super::report::StepReport;
use crate::amp::ScalerState;
use crate::comm::ConnectionRate;
use crate::cpu::HalfKernel;
use crate::data::{Batch, Prefetcher};
use crate::nn::{Layout, LossSums};
use crate::profile::Row;
use serde_json::Value;
use std::ops::Range;
use std::time::Instant;
use switchyard_worker_contract::config::{LossScaling, Transport};
use switchyard_worker_contract::event::{GpuCalls, GpuPaths, Link};
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::layers::LayerTime;

/// Number of ranks that report their times in a step.
pub(super) const REPORTED_TIMES: usize = 11;

/// Flags that the ranks exchange in a step, and their sums over all ranks. A rank sets a flag to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Flags {
    /// This rank received a stop request.
    pub stop: f32,
    /// A checkpoint is due by rank 0's clock.
    pub due: f32,
    /// This rank has written its shard of the current checkpoint.
    pub written: f32,
    /// This rank could not write its shard.
    pub failed: f32,
    /// See [`super::pace::Pace`].
    pub times: [f32; REPORTED_TIMES],
}

impl Flags {
    /// Whether they concern all ranks, beyond their times.
    pub fn needs_all_ranks(&self) -> bool {
        [self.stop, self.due, self.written, self.failed].iter().any(|flag| *flag > 0.0)
    }
}

/// Input of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepInput {
    /// Step number, from 1.
    pub step: u64,
    pub learning_rate: f64,
    pub flags: Flags,
    /// All ranks hold the same weights after this step.
    pub synchronise: bool,
    /// Ranks exchange gradients or weights after this step.
    pub exchange: bool,
}

/// The outcome of a step.
#[derive(Debug, Clone)]
pub(super) struct StepOutcome {
    pub report: StepReport,
    /// Summed over all ranks.
    pub flags: Flags,
    /// Steps skipped so far in mixed precision.
    pub skipped_steps: Option<u64>,
    /// All ranks hold the same weights after this step, and `flags` are those of all.
    pub synchronised: bool,
}

/// An optimizer array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment {
    pub name: &'static str,
    pub held: Held,
}

/// Which ranks hold the values of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// All ranks hold the same values.
    ByAll,
    /// Each rank holds a part of them. Others are 0 when read, and ignored when written.
    InParts,
    /// Each rank has its own values.
    ByEach,
}

/// An array that training changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Array {
    /// In layout order.
    Weights,
    /// An optimizer array, by index, in layout order.
    Moments(usize),
    /// Running statistics of batch norms.
    Statistics,
}

/// Counters of an engine; part of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counters {
    /// Optimizer steps, without skipped ones.
    pub optimizer_steps: u64,
    pub scaler: Option<ScalerState>,
    /// Configuration of the loss scale when it started.
    pub loss_scaling: Option<LossScaling>,
    /// Gradient norm from which the f16 wire scale is derived.
    pub wire_norm: Option<f32>,
    pub half_kernel: Option<HalfKernel>,
}

/// How gradients are reduced.
#[derive(Debug, Clone)]
pub(super) struct Reductions {
    pub transport: Transport,
    /// Links that carry gradients from this rank to others.
    pub links: Vec<Link>,
    /// Rate of the connection from the previous rank, if measured.
    pub probed: Option<ConnectionRate>,
    /// Bytes of each all-reduce, in order; empty with a single rank.
    pub bytes: Vec<u64>,
    /// Algorithm of each between hosts; empty if the engine does not choose it.
    pub algorithms: Vec<String>,
}

/// Reductions outside of steps, for measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    /// All gradients, as in a step.
    Gradients,
    /// The bucket of the bandwidth check.
    Check,
}

/// Adds a span to the trace of a step: row, name, start, end, arguments.
pub(super) type AddSpan<'a> = dyn FnMut(Row, &str, Instant, Instant, Value) + 'a;

/// A rank's compute engine. All ranks call the same methods in the same order.
pub(super) trait Engine: Send {
    /// Begins a step. Returns the outcome of this step, or of the previous one, or `None` if
    /// neither is known yet.
    ///
    /// # Errors
    /// The group failed, the reader ended, or the loss of the step whose outcome is due is not
    /// finite. The weights are then unusable.
    fn step(&mut self, reader: &mut Prefetcher, input: &StepInput) -> Result<Option<StepOutcome>, TrainError>;

    /// Waits for the step whose outcome has not been returned. The weights are then those after
    /// that step.
    ///
    /// # Errors
    /// See [`Engine::step`].
    fn drain(&mut self) -> Result<Option<StepOutcome>, TrainError>;

    /// Waits for weights that other ranks updated in the last step, which otherwise arrive during
    /// the next one. Required before weights are evaluated. Collective.
    ///
    /// # Errors
    /// The group failed.
    fn await_weights(&mut self) -> Result<(), TrainError> {
        Ok(())
    }

    /// [`Engine::await_weights`]; also gets in f32 the weights that have arrived in 16 bits.
    /// Required before weights are read. Collective.
    ///
    /// # Errors
    /// The group failed.
    fn complete_weights(&mut self) -> Result<(), TrainError> {
        Ok(())
    }

    /// Runs one batch of the validation set on the current weights. Returns `None` if another stage
    /// of the pipeline has the result.
    ///
    /// # Errors
    /// The device or the group failed.
    fn evaluate(&mut self, batch: &Batch) -> Result<Option<LossSums>, TrainError>;

    /// The layout of the whole model.
    fn layout(&self) -> &Layout;

    /// Whether this rank has all weights. Otherwise [`Engine::read`] returns 0 for those that it
    /// does not have, [`Engine::write`] ignores them, and [`Engine::collect`] gets them.
    fn has_all_weights(&self) -> bool {
        true
    }

    /// Names and lengths of the parts of [`Array::Statistics`], in order.
    fn statistics(&self) -> Vec<(String, usize)>;

    /// The optimizer's arrays.
    fn moments(&self) -> Vec<Moment>;

    /// Copies values of an array, starting at index `from`. No step may be in flight.
    ///
    /// # Errors
    /// The device failed.
    fn read(&self, array: Array, from: usize, into: &mut [f32]) -> Result<(), TrainError>;

    /// Copies values of arrays as `read` does, also what other ranks hold: array, first index,
    /// place in `into`. Collective; ranks may want different values. No step may be in flight.
    ///
    /// # Errors
    /// The device or the group failed.
    fn collect(&mut self, wanted: &[(Array, usize, Range<usize>)], into: &mut [f32]) -> Result<(), TrainError> {
        wanted.iter().try_for_each(|(array, from, place)| self.read(*array, *from, &mut into[place.clone()]))
    }

    /// Writes values of an array, starting at index `from`. No step may be in flight.
    ///
    /// # Errors
    /// The device failed.
    fn write(&mut self, array: Array, from: usize, numbers: &[f32]) -> Result<(), TrainError>;

    fn counters(&self) -> Counters;

    /// Resumes from these counters, after all arrays were written. Returns a note for the log if
    /// the configuration has changed since.
    ///
    /// # Errors
    /// They do not match the configuration.
    fn resume(&mut self, counters: &Counters) -> Result<Option<String>, TrainError>;

    /// Name of the kernels in use.
    fn kernel(&self) -> String;

    /// Implementations in use; `None` on CPUs.
    fn gpu_paths(&self) -> Option<GpuPaths> {
        None
    }

    /// GPU driver calls in the last step; `None` on CPUs.
    fn calls(&self) -> Option<GpuCalls> {
        None
    }

    fn reductions(&self) -> Reductions;

    /// Runs the all-reduces of a measurement.
    ///
    /// # Errors
    /// The group failed.
    fn reduce(&mut self, what: Measure) -> Result<(), TrainError>;

    /// Turns recording of spans for [`Engine::trace`] on or off.
    fn record(&mut self, on: bool);

    /// GPU kernel times of the recorded steps; `None` on CPUs.
    fn kernel_times(&self) -> Option<&KernelTimes> {
        None
    }

    /// Times of the layers in the last micro-batch of the last step, if it was recorded; empty on
    /// GPUs.
    fn layer_times(&self) -> Vec<LayerTime> {
        Vec::new()
    }

    /// Adds the spans of the last step.
    fn trace(&mut self, add: &mut AddSpan<'_>);
}
