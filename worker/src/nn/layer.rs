//! What a layer is, and what it gets when it runs.

use super::form::Form;
use super::layout::{GradientSink, Layout};
use crate::cpu::{Cpu, Gemm, Values, ValuesMut};
use crate::data::Batch;
use std::ops::Range;

/// Most inputs of a layer.
pub const INPUTS: usize = 3;

/// One operation of a network with its gradient.
///
/// A layer gets everything from its context: it keeps no tensors, and allocates nothing when it runs. The memory that
/// it asks for in [`Layer::needs`] is part of the network's plan.
pub trait Layer: Send {
    /// Kind of operation, for profiles: `Linear`, `LayerNorm`.
    fn kind(&self) -> &'static str;

    /// What the layer computes, for devices that are not CPUs. They refuse a layer that has no form.
    fn form(&self) -> Form {
        Form::Own
    }

    /// Memory and inputs that the layer needs. `cpu` is what it will run on.
    fn needs(&self, cpu: &Cpu) -> Needs;

    /// Computes the output from the inputs.
    fn forward(&mut self, cx: &mut Forward<'_>);

    /// Computes the gradients of inputs and parameters from that of the output. Called once after each forward pass of
    /// a training step.
    fn backward(&mut self, cx: &mut Backward<'_>);
}

/// How a layer delivers the gradient of an input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flow {
    /// Writes it to its own memory.
    #[default]
    Write,
    /// Writes it to its own memory, or adds it to what other layers have delivered.
    Accumulate,
    /// Turns the gradient of the output into it in place (or leaves it as it is: a sum passes its gradient on).
    InPlace,
    /// Overwrites the input with it. No other layer may use the input.
    OverInput,
}

/// What a layer needs. Sizes are in numbers, not bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Needs {
    /// Inputs whose values backward reads.
    pub inputs: [bool; INPUTS],
    /// Backward reads the values of the output.
    pub output: bool,
    /// f32 numbers kept from forward to backward.
    pub saved: usize,
    /// Numbers of the network's format kept from forward to backward.
    pub kept: usize,
    /// f32 numbers of scratch memory in forward.
    pub scratch: usize,
    /// f32 numbers of scratch memory in backward.
    pub backward_scratch: usize,
    /// How the gradient of each input is delivered.
    pub flow: [Flow; INPUTS],
    /// Inputs whose gradient the layer computes together with those of its parameters: there is memory for it even if nobody reads it.
    pub always: [bool; INPUTS],
}

/// Weights as a step sees them.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// All parameters, in the order of the [`Layout`].
    pub master: &'a [f32],
    /// The same values rounded to 16 bits, in mixed precision.
    pub half: Option<Values<'a>>,
    /// Running statistics, for evaluation.
    pub statistics: &'a [f32],
}

pub struct Kernels {
    /// Threads and instruction set.
    pub cpu: Cpu,
    /// Matrix products with their buffers.
    pub gemm: Gemm,
}

/// Sums over the losses of a network.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossSums {
    /// Mean cross entropy of a micro-batch in nats; the sum if a model has several losses.
    pub loss: f64,
    /// Right predictions among `predicted`; both are 0 if no loss counts them.
    pub correct: u64,
    pub predicted: u64,
}

/// Values of a layer's parameters, in the order in which the layer named them.
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

    /// A parameter in the format that is computed with.
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
    /// Whether a later layer has already written the gradient in this pass.
    pub(super) written: &'a [bool],
    pub(super) sink: &'a mut dyn GradientSink,
}

impl Gradients<'_> {
    /// Memory for the gradient of a parameter, and whether to add to its contents.
    pub fn of(&mut self, index: usize) -> (&mut [f32], bool) {
        let accumulate = self.sink.accumulate() || self.written[index];
        (self.sink.gradient(self.ordinals[index]), accumulate)
    }

    /// The same for a parameter and the next one.
    pub fn pair(&mut self, first: usize) -> ((&mut [f32], &mut [f32]), bool) {
        let accumulate = self.sink.accumulate() || self.written[first];
        (self.sink.gradients2(self.ordinals[first], self.ordinals[first + 1]), accumulate)
    }
}

/// What a layer gets in forward.
pub struct Forward<'a> {
    /// Inputs in the order in which they were named; missing ones are empty.
    pub inputs: [Values<'a>; INPUTS],
    /// The layer must write all of it.
    pub output: ValuesMut<'a>,
    /// Kept for backward.
    pub saved: &'a mut [f32],
    /// Kept for backward, in the network's format.
    pub kept: ValuesMut<'a>,
    /// Undefined when the layer starts.
    pub scratch: &'a mut [f32],
    pub batch: &'a Batch,
    pub kernels: &'a mut Kernels,
    /// Statistics of this batch, to be written, in training; the running ones in evaluation.
    pub statistics: Statistics<'a>,
    /// Sums of the losses.
    pub loss_sums: &'a mut LossSums,
    pub parameters: Parameters<'a>,
}

pub enum Statistics<'a> {
    /// In training: the statistics of this batch, to be written.
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
    /// Not needed.
    None,
    /// Write it.
    Write(ValuesMut<'a>),
    /// Add to the contents.
    Add(ValuesMut<'a>),
    /// In the memory of the output's gradient ([`Flow::InPlace`]).
    InPlace,
    /// In the memory of the input, which still holds its values ([`Flow::OverInput`]).
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

    /// Whether the gradient is needed at all.
    pub fn wanted(&self) -> bool {
        !matches!(self, InputGradient::None)
    }
}

/// What a layer gets in backward.
pub struct Backward<'a> {
    /// The inputs that the layer asked for.
    pub inputs: [Values<'a>; INPUTS],
    /// The output, if the layer asked for it.
    pub output: Values<'a>,
    /// Gradient of the output. It may be overwritten, unless the gradient of an input is in the same memory.
    pub d_output: ValuesMut<'a>,
    pub d_inputs: [InputGradient<'a>; INPUTS],
    /// What forward kept.
    pub saved: &'a mut [f32],
    /// What forward kept, in the network's format.
    pub kept: ValuesMut<'a>,
    /// Undefined when the layer starts.
    pub scratch: &'a mut [f32],
    pub batch: &'a Batch,
    pub kernels: &'a mut Kernels,
    /// Factor of the loss for loss layers: loss scale times the share of this micro-batch in the step.
    pub scale: f32,
    pub parameters: Parameters<'a>,
    pub gradients: Gradients<'a>,
}
