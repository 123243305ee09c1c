//! What a rank computes with, wherever its numbers live: weights, moments, gradients and their reductions.
//!
//! A device works on while the host prepares the next step, so an engine may tell the outcome of a step late: when the next
//! one has begun, but not later. Outcomes come in the order of the steps, each once, and the same on all ranks.

use super::TrainError;
use super::report::StepReport;
use crate::amp::ScalerState;
use crate::comm::Probed;
use crate::cpu::HalfKernel;
use crate::data::{Batch, Prefetcher};
use crate::nn::{Layout, LossSums};
use crate::profile::Row;
use serde_json::Value;
use std::time::Instant;
use switchyard_worker_contract::config::{LossScaling, Transport};
use switchyard_worker_contract::event::{GpuCalls, Link};
use switchyard_worker_contract::kernels::KernelTimes;

/// Ranks that tell their times in a step.
pub(super) const TIMES: usize = 11;

/// What a rank tells the others in a step, and what the sum over all ranks is. Each flag is 1 for a rank that says so.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Flags {
    /// This rank was asked to stop.
    pub stop: f32,
    /// A checkpoint is due by the clock of rank 0.
    pub due: f32,
    /// This rank has written its shard of the current checkpoint.
    pub written: f32,
    /// The shard could not be written.
    pub failed: f32,
    /// See [`super::pace::Pace`].
    pub times: [f32; TIMES],
}

/// What an engine needs for a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    /// Number of the step, from 1.
    pub step: u64,
    pub learning_rate: f64,
    pub flags: Flags,
}

/// The outcome of a step.
#[derive(Debug, Clone)]
pub(super) struct Told {
    pub report: StepReport,
    /// Summed over all ranks.
    pub flags: Flags,
    /// Steps skipped so far in mixed precision.
    pub skipped_steps: Option<u64>,
}

/// An array of numbers that training changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Array {
    /// In the order of the layout.
    Weights,
    /// An array of the optimizer, by index, in the order of the layout.
    Moments(usize),
    /// Running statistics of batch norms.
    Statistics,
}

/// What an engine counts; part of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counters {
    /// Optimizer steps, without skipped ones.
    pub optimizer_steps: u64,
    pub scaler: Option<ScalerState>,
    /// What the loss scale started from.
    pub loss_scaling: Option<LossScaling>,
    /// Norm that the scale of gradients in f16 follows from.
    pub wire_norm: Option<f32>,
    pub half_kernel: Option<HalfKernel>,
}

/// How gradients are reduced.
#[derive(Debug, Clone)]
pub(super) struct Reductions {
    pub transport: Transport,
    /// What carries gradients from this rank to others.
    pub links: Vec<Link>,
    /// Rate of the connection from the previous rank, if it was measured.
    pub probed: Option<Probed>,
    /// Bytes of each all-reduce, in order; none with a single rank.
    pub bytes: Vec<u64>,
}

/// What is reduced outside of steps, to measure it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    /// All gradients, as in a step.
    Gradients,
    /// The numbers of the check before the first step.
    Check,
}

/// Adds a span to the trace of a step: its row, name, start, end, and arguments.
pub(super) type AddSpan<'a> = dyn FnMut(Row, &str, Instant, Instant, Value) + 'a;

/// What a rank computes with. All ranks call the same methods in the same order.
pub(super) trait Engine: Send {
    /// Begins a step. Returns the outcome of this step, or of the one before, or none yet.
    ///
    /// # Errors
    /// The group failed, the reader ended, or the loss of the step whose outcome is due is not finite. The weights are
    /// then of no further use.
    fn step(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Option<Told>, TrainError>;

    /// Waits for the step that has begun and whose outcome has not been told. The weights are then those after that step.
    ///
    /// # Errors
    /// See [`Engine::step`].
    fn drain(&mut self) -> Result<Option<Told>, TrainError>;

    /// Runs one batch of the validation set on the weights as they are.
    ///
    /// # Errors
    /// The device failed.
    fn evaluate(&mut self, batch: &Batch) -> Result<LossSums, TrainError>;

    fn layout(&self) -> &Layout;

    /// Names and lengths of the parts of [`Array::Statistics`], in order.
    fn statistics(&self) -> Vec<(String, usize)>;

    /// Names of the optimizer's arrays.
    fn moments(&self) -> Vec<&'static str>;

    /// Copies numbers of an array, from this index on. No step may be under way.
    ///
    /// # Errors
    /// The device failed.
    fn read(&self, array: Array, from: usize, into: &mut [f32]) -> Result<(), TrainError>;

    /// The reverse.
    ///
    /// # Errors
    /// The device failed.
    fn write(&mut self, array: Array, from: usize, numbers: &[f32]) -> Result<(), TrainError>;

    fn counters(&self) -> Counters;

    /// Goes on from these counters, after all arrays were written. Returns what the configuration has changed since, for
    /// the log.
    ///
    /// # Errors
    /// They do not match the configuration.
    fn resume(&mut self, counters: &Counters) -> Result<Option<String>, TrainError>;

    /// Name of the kernels in use.
    fn kernel(&self) -> String;

    /// Calls of the driver of a GPU in the last step; none on CPUs.
    fn calls(&self) -> Option<GpuCalls> {
        None
    }

    fn reductions(&self) -> Reductions;

    /// Reduces for a measurement.
    ///
    /// # Errors
    /// The group failed.
    fn reduce(&mut self, what: Measure) -> Result<(), TrainError>;

    /// Turns the recording of spans for [`Engine::trace`] on or off.
    fn record(&mut self, on: bool);

    /// What the kernels of a GPU took in the recorded steps; none on CPUs.
    fn kernel_times(&self) -> Option<&KernelTimes> {
        None
    }

    /// What ran in the last step.
    fn trace(&mut self, add: &mut AddSpan<'_>);
}
