//! What a layer is, and what it sees when it runs.

use super::layout::{GradientSink, Layout};
use crate::cpu::{Cpu, Gemm, Values, ValuesMut};
use crate::data::Batch;
use std::ops::Range;

/// Most inputs of a layer.
pub const INPUTS: usize = 3;

/// One operation of a network with its gradient.
///
/// A layer is told everything by its context: it keeps no tensors itself, and allocates nothing when it runs. The memory it asks for by
/// [`Layer::needs`] is part of the network's plan.
pub trait Layer: Send {
    /// Kind of operation, for profiles: `Linear`, `LayerNorm`.
    fn kind(&self) -> &'static str;

    /// Memory and inputs that it needs. `cpu` is what it will run on.
    fn needs(&self, cpu: &Cpu) -> Needs;

    /// Computes the output from the inputs.
    fn forward(&mut self, cx: &mut Forward<'_>);

    /// Computes the gradients of inputs and parameters from that of the output. Called once after each forward of a training step.
    fn backward(&mut self, cx: &mut Backward<'_>);
}

/// How a layer gives the gradient of an input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flow {
    /// It writes it to memory of its own.
    #[default]
    Write,
    /// It writes it to memory of its own, or adds it to what other layers have given.
    Accumulate,
    /// It turns the gradient of the output into it, where it lies (or leaves it: a sum passes its gradient on).
    InPlace,
    /// It turns the input itself into it, where it lies. The input must not be used by another layer.
    OverInput,
}

/// What a layer needs. Sizes are numbers, not bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Needs {
    /// Inputs whose values backward reads.
    pub inputs: [bool; INPUTS],
    /// Backward reads the output's values.
    pub output: bool,
    /// f32 that are kept from forward to backward.
    pub saved: usize,
    /// Numbers of the network's format that are kept from forward to backward.
    pub kept: usize,
    /// f32 of scratch memory in forward.
    pub scratch: usize,
    /// f32 of scratch memory in backward.
    pub backward_scratch: usize,
    /// How the gradient of each input is given.
    pub flow: [Flow; INPUTS],
}

/// Weights as a step sees them.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// All parameters, in the order of the [`Layout`].
    pub master: &'a [f32],
    /// The same rounded to 16 bits, in mixed precision.
    pub half: Option<Values<'a>>,
    /// Running statistics, for evaluation.
    pub statistics: &'a [f32],
}

/// Threads and kernels.
pub struct Kernels {
    /// Threads and instruction set.
    pub cpu: Cpu,
    /// Matrix products with their buffers.
    pub gemm: Gemm,
}

/// What a loss layer adds up.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    /// Mean cross entropy of a micro-batch, nats; the sum where a model has several losses.
    pub loss: f64,
    /// Predictions that are right, of `predicted`; both 0 where nobody counts.
    pub correct: u64,
    /// Predictions.
    pub predicted: u64,
}

/// Values of a layer's parameters, by the order in which the layer named them.
#[derive(Clone, Copy)]
pub struct Parameters<'a> {
    pub(super) layout: &'a Layout,
    pub(super) ordinals: &'a [usize],
    pub(super) weights: Weights<'a>,
}

impl<'a> Parameters<'a> {
    fn range(&self, index: usize) -> Range<usize> {
        self.layout.parameters[self.ordinals[index]].range()
    }

    /// A parameter in 32 bits.
    pub fn master(&self, index: usize) -> &'a [f32] {
        &self.weights.master[self.range(index)]
    }

    /// A parameter in the format of computation.
    pub fn compute(&self, index: usize) -> Values<'a> {
        match self.weights.half {
            Some(half) => half.part(self.range(index)),
            None => Values::F32(self.master(index)),
        }
    }
}

/// Where the gradients of a layer's parameters go.
pub struct Gradients<'a> {
    pub(super) ordinals: &'a [usize],
    /// Parameters that a later layer wrote before in this pass.
    pub(super) written: &'a [bool],
    pub(super) sink: &'a mut dyn GradientSink,
}

impl Gradients<'_> {
    /// Memory for the gradient of a parameter, and whether to add to what is there.
    pub fn of(&mut self, index: usize) -> (&mut [f32], bool) {
        let accumulate = self.sink.accumulate() || self.written[index];
        (self.sink.gradient(self.ordinals[index]), accumulate)
    }

    /// The same for a parameter and the one that was named after it.
    pub fn pair(&mut self, first: usize) -> ((&mut [f32], &mut [f32]), bool) {
        let accumulate = self.sink.accumulate() || self.written[first];
        (self.sink.gradients2(self.ordinals[first], self.ordinals[first + 1]), accumulate)
    }
}

/// What forward sees.
pub struct Forward<'a> {
    /// Inputs in the order in which they were named; those that do not exist are empty.
    pub inputs: [Values<'a>; INPUTS],
    /// The output, to be written in full.
    pub output: ValuesMut<'a>,
    /// Kept for backward.
    pub saved: &'a mut [f32],
    /// Kept for backward, in the network's format.
    pub kept: ValuesMut<'a>,
    /// Undefined when the layer starts.
    pub scratch: &'a mut [f32],
    /// The micro-batch.
    pub batch: &'a Batch,
    /// Threads and kernels.
    pub kernels: &'a mut Kernels,
    /// Statistics of this batch, to be written in training; the running ones in evaluation.
    pub statistics: Statistics<'a>,
    /// Sums of the losses.
    pub outcome: &'a mut Outcome,
    /// Values of its parameters.
    pub parameters: Parameters<'a>,
}

/// Statistics of a layer's batches.
pub enum Statistics<'a> {
    /// In training: what this batch has, to be written.
    Batch(&'a mut [f32]),
    /// In evaluation: the running ones.
    Running(&'a [f32]),
}

impl Forward<'_> {
    /// Whether a backward pass follows.
    pub fn training(&self) -> bool {
        matches!(self.statistics, Statistics::Batch(_))
    }
}

/// Where the gradient of an input goes.
#[derive(Debug)]
pub enum InputGradient<'a> {
    /// Nobody wants it.
    None,
    /// Write it.
    Write(ValuesMut<'a>),
    /// Add to what is there.
    Add(ValuesMut<'a>),
    /// It is where the gradient of the output is ([`Flow::InPlace`]).
    InPlace,
    /// It takes the place of the input, whose values are there ([`Flow::OverInput`]).
    OverInput(ValuesMut<'a>),
}

impl InputGradient<'_> {
    /// The memory to write or add to, and whether to add. `None`: nothing to do, or in place.
    pub fn target(&mut self) -> Option<(ValuesMut<'_>, bool)> {
        match self {
            InputGradient::Write(values) => Some((values.reborrow(), false)),
            InputGradient::Add(values) => Some((values.reborrow(), true)),
            _ => None,
        }
    }

    /// Whether anybody wants it.
    pub fn wanted(&self) -> bool {
        !matches!(self, InputGradient::None)
    }
}

/// What backward sees.
pub struct Backward<'a> {
    /// The inputs that were asked for.
    pub inputs: [Values<'a>; INPUTS],
    /// The output, if it was asked for.
    pub output: Values<'a>,
    /// Gradient of the output. It may be overwritten, unless an input's gradient lies in the same place.
    pub d_output: ValuesMut<'a>,
    /// Gradients of the inputs.
    pub d_inputs: [InputGradient<'a>; INPUTS],
    /// What forward kept.
    pub saved: &'a mut [f32],
    /// What forward kept, in the network's format.
    pub kept: ValuesMut<'a>,
    /// Undefined when the layer starts.
    pub scratch: &'a mut [f32],
    /// The micro-batch.
    pub batch: &'a Batch,
    /// Threads and kernels.
    pub kernels: &'a mut Kernels,
    /// Factor of the loss: loss scale and share of this micro-batch in the step. For loss layers.
    pub scale: f32,
    /// Values of its parameters.
    pub parameters: Parameters<'a>,
    /// Gradients of its parameters.
    pub gradients: Gradients<'a>,
}
