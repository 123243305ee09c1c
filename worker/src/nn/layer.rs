//! The layer interface.

use super::form::Form;
use super::layout::{GradientSink, Layout, ParameterSlot, Role};
use crate::cpu::{Cpu, Gemm, Values, ValuesMut};
use crate::data::Batch;
use std::ops::Range;

/// Maximum number of inputs of a layer.
pub const INPUTS: usize = 3;

/// An operation of a network, with its gradient.
///
/// A layer receives everything through its context: it owns no tensors and does not allocate when
/// it runs. The memory requested by [`Layer::needs`] is part of the network's plan.
pub trait Layer: Send {
    /// Operation kind, for profiles: `Linear`, `LayerNorm`.
    fn kind(&self) -> &'static str;

    /// The operation as data, for devices other than CPUs. They reject layers without a form.
    fn form(&self) -> Form {
        Form::Opaque
    }

    /// The memory and tensors that the layer needs on `cpu`.
    fn needs(&self, cpu: &Cpu) -> Needs;

    /// Computes the output from the inputs. If the layer's block is recomputed, called twice before
    /// `backward`, with the same inputs: state of its own, such as random numbers, advances in
    /// `backward`.
    fn forward(&mut self, cx: &mut Forward<'_>);

    /// Computes the gradients of inputs and parameters from the gradient of the output. Called once
    /// for each micro-batch, after its forward passes.
    fn backward(&mut self, cx: &mut Backward<'_>);
}

/// How a layer delivers the gradient of an input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flow {
    /// Writes it to its own memory.
    #[default]
    Write,
    /// Writes it to its own memory, or adds it to the gradient from other layers.
    Accumulate,
    /// Turns the output's gradient into it in place (or leaves it unchanged: a sum passes its
    /// gradient on).
    InPlace,
    /// Overwrites the input with it. No other layer can use the input.
    OverInput,
}

/// Memory requirements of a layer. Sizes are in elements, not bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Needs {
    /// Inputs that backward reads.
    pub inputs: [bool; INPUTS],
    /// Whether backward reads the output.
    pub output: bool,
    /// f32 elements saved for backward.
    pub saved: usize,
    /// Elements in the network's format saved for backward.
    pub kept: usize,
    /// f32 scratch elements in forward.
    pub scratch: usize,
    /// f32 scratch elements in backward.
    pub backward_scratch: usize,
    /// How the gradient of each input is delivered.
    pub flow: [Flow; INPUTS],
    /// Inputs whose gradient is computed together with the parameter gradients: it has memory even
    /// if it is unused.
    pub always: [bool; INPUTS],
}

/// The weights used by a step.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// All parameters in [`Layout`] order. Of those that are not a [`Role::Vector`], layers read
    /// `half`, if there is one.
    pub master: &'a [f32],
    /// The same values rounded to 16 bits, for mixed precision.
    pub half: Option<Values<'a>>,
    /// Running statistics, for evaluation.
    pub statistics: &'a [f32],
}

/// Weights for a forward pass that can begin before all of them have arrived.
pub trait WeightSource {
    /// The weights, once these parameters have arrived.
    fn weights(&mut self, ordinals: &[usize]) -> Weights<'_>;
}

impl WeightSource for Weights<'_> {
    fn weights(&mut self, _: &[usize]) -> Weights<'_> {
        *self
    }
}

pub struct Kernels {
    /// Threads and instruction set.
    pub cpu: Cpu,
    /// GEMM with its buffers.
    pub gemm: Gemm,
}

/// Loss statistics of a network.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossSums {
    /// Mean cross entropy of a micro-batch in nats, summed over all losses of the model.
    pub loss: f64,
    /// Correct predictions among `predicted`; both are 0 if no loss counts them.
    pub correct: u64,
    pub predicted: u64,
}

/// The values of a layer's parameters, in the layer's order.
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

    /// A parameter in f32.
    ///
    /// # Panics
    /// If its role is not [`Role::Vector`]: ranks exchange the others in the compute format.
    pub fn master(&self, index: usize) -> &'a [f32] {
        let ParameterSlot { name, role, .. } = &self.layout.parameters[self.ordinals[index]];
        assert!(*role == Role::Vector, "`{name}` is read in f32 as {role:?}, expected Vector");
        &self.weights.master[self.range(index)]
    }

    /// A parameter in the compute format.
    pub fn compute(&self, index: usize) -> Values<'a> {
        match self.weights.half {
            Some(half) => half.part(self.range(index)),
            None => Values::F32(&self.weights.master[self.range(index)]),
        }
    }
}

/// Destination of a layer's parameter gradients.
pub struct Gradients<'a> {
    pub(super) ordinals: &'a [usize],
    /// Whether a later layer has already written the gradient in this pass.
    pub(super) written: &'a [bool],
    pub(super) sink: &'a mut dyn GradientSink,
}

impl Gradients<'_> {
    /// Memory for the gradient of a parameter, and whether to add to it.
    pub fn of(&mut self, index: usize) -> (&mut [f32], bool) {
        let accumulate = self.sink.accumulate() || self.written[index];
        (self.sink.gradient(self.ordinals[index]), accumulate)
    }

    /// [`Gradients::of`] for a parameter and the next one.
    pub fn pair(&mut self, first: usize) -> ((&mut [f32], &mut [f32]), bool) {
        let accumulate = self.sink.accumulate() || self.written[first];
        (self.sink.gradients2(self.ordinals[first], self.ordinals[first + 1]), accumulate)
    }
}

/// Context of a forward pass.
pub struct Forward<'a> {
    /// Inputs in the layer's order; unused ones are empty.
    pub inputs: [Values<'a>; INPUTS],
    /// The layer must write all of it.
    pub output: ValuesMut<'a>,
    /// Saved for backward.
    pub saved: &'a mut [f32],
    /// Saved for backward, in the network's format.
    pub kept: ValuesMut<'a>,
    /// Initially undefined.
    pub scratch: &'a mut [f32],
    pub batch: &'a Batch,
    pub kernels: &'a mut Kernels,
    /// In training, this batch's statistics, to be written; in evaluation, the running ones.
    pub statistics: Statistics<'a>,
    pub loss_sums: &'a mut LossSums,
    pub parameters: Parameters<'a>,
}

pub enum Statistics<'a> {
    /// Training: this batch's statistics, to be written.
    Batch(&'a mut [f32]),
    /// Evaluation: the running statistics.
    Running(&'a [f32]),
}

impl Forward<'_> {
    /// Whether a backward pass follows.
    pub fn training(&self) -> bool {
        matches!(self.statistics, Statistics::Batch(_))
    }
}

/// Destination of an input's gradient.
#[derive(Debug)]
pub enum InputGradient<'a> {
    /// Not needed.
    None,
    /// Write it.
    Write(ValuesMut<'a>),
    /// Add to the contents.
    Add(ValuesMut<'a>),
    /// In place of the output's gradient ([`Flow::InPlace`]).
    InPlace,
    /// In place of the input, which still holds its values ([`Flow::OverInput`]).
    OverInput(ValuesMut<'a>),
}

impl InputGradient<'_> {
    /// The memory to write or add to, and whether to add. `None` if there is nothing to do, or if
    /// in place.
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

/// Context of a backward pass.
pub struct Backward<'a> {
    /// The inputs requested in [`Needs`].
    pub inputs: [Values<'a>; INPUTS],
    /// The output, if requested in [`Needs`].
    pub output: Values<'a>,
    /// Gradient of the output. It can be overwritten, unless an input's gradient shares its memory.
    pub d_output: ValuesMut<'a>,
    pub d_inputs: [InputGradient<'a>; INPUTS],
    /// Saved by forward.
    pub saved: &'a mut [f32],
    /// Saved by forward, in the network's format.
    pub kept: ValuesMut<'a>,
    /// Initially undefined.
    pub scratch: &'a mut [f32],
    pub batch: &'a Batch,
    pub kernels: &'a mut Kernels,
    /// For loss layers: loss scale times this micro-batch's share of the step.
    pub scale: f32,
    pub parameters: Parameters<'a>,
    pub gradients: Gradients<'a>,
}
