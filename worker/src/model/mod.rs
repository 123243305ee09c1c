//! Networks to train, and their parameters.
//!
//! ```text
//! Model: builds a graph of layers (crate::nn)
//! Layout: one flat array of parameters, in the order in which backward finishes their gradients
//! ```
//!
//! Weights, gradients and optimizer moments share the [`Layout`], so that a fused bucket of gradients is a range of it.
//! A program of its own adds networks by [`Registry`]; `examples/custom-model` shows one.

mod bert;
mod gpt;
mod initialise;
mod layout;
mod mlp;
mod registry;
mod resnet;
mod transformer;

pub use bert::Bert;
pub use gpt::Gpt;
pub use initialise::initialise;
pub use layout::{Bucket, Initial, Layout, Parameter, Role, fuse};
pub use mlp::Mlp;
pub use registry::{Build, Registry};
pub use resnet::ResNet;

use crate::nn::Graph;

/// A network to train.
pub trait Model: Send + Sync {
    /// It in a few words, such as `GPT 4x128`.
    fn words(&self) -> String;

    /// Appends its layers and losses to an empty graph, for the samples that the graph names.
    ///
    /// # Errors
    /// Sizes that do not fit together, or data of the wrong kind.
    fn build(&self, graph: &mut Graph) -> Result<(), ModelError>;
}

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A size that must be positive is 0.
    #[error("{0} is 0, expected at least 1")]
    Zero(&'static str),
    /// Heads do not divide the width.
    #[error("hidden size {hidden} is not a multiple of {heads} heads")]
    Heads {
        /// Width of the residual stream.
        hidden: usize,
        /// Heads asked for.
        heads: usize,
    },
    /// The data are of another kind.
    #[error("got {got} from the data, expected {expected}")]
    Data {
        /// What the model takes.
        expected: &'static str,
        /// What there is.
        got: String,
    },
    /// Means or deviations for another number of channels.
    #[error("got {got} means or deviations for images of {channels} channels, expected 1 or {channels}")]
    Channels {
        /// Numbers given.
        got: usize,
        /// Channels of the images.
        channels: u32,
    },
    /// A tensor does not fit a layer.
    #[error("layer {layer}: got a tensor of shape {got:?}, expected {expected}")]
    Shape {
        /// The layer.
        layer: String,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// What it takes.
        expected: String,
    },
    /// A layer makes a tensor without numbers.
    #[error("layer {layer}: its output is empty, expected sizes of at least 1")]
    Empty {
        /// The layer.
        layer: String,
    },
    /// A layer has too many inputs.
    #[error("layer {layer}: got {got} inputs, expected at most {}", crate::nn::INPUTS)]
    Inputs {
        /// The layer.
        layer: String,
        /// Inputs.
        got: usize,
    },
    /// Nobody reads what a layer computes.
    #[error("layer {layer}: its output leads to no loss")]
    Loose {
        /// The layer.
        layer: String,
    },
    /// A layer that uses its input's memory shares the input with others.
    #[error("layer {layer}: its input is read by other layers too, expected it to be the only one")]
    Shared {
        /// The layer.
        layer: String,
    },
    /// A parameter that no layer uses.
    #[error("parameter {parameter} is not used by any layer")]
    Unused {
        /// The parameter.
        parameter: String,
    },
    /// Two parameters of one name.
    #[error("two parameters have the name {parameter}")]
    Twice {
        /// The name.
        parameter: String,
    },
    /// A custom model that this program does not have.
    #[error("custom.name: got `{got}`; this worker has {has}")]
    Unknown {
        /// The name asked for.
        got: String,
        /// The names there are.
        has: String,
    },
    /// A parameter of a custom model that it cannot use.
    #[error("custom.parameters.{name}: got `{got}`, expected {expected}")]
    Parameter {
        /// Its name.
        name: String,
        /// Its value.
        got: String,
        /// What it should be.
        expected: String,
    },
    /// The plan's size overflows.
    #[error("the model does not fit into an address space")]
    TooLarge,
    /// The machine does not have the memory.
    #[error(
        "not placeable: cannot get {0} MiB for the activations; smallest change that fits: a smaller model or batchSizePerProcess"
    )]
    Memory(usize),
}

/// Where backward puts gradients.
pub trait GradientSink {
    /// True: add to what is there (a later micro-batch of a merged batch). False: overwrite.
    fn accumulate(&self) -> bool;
    /// Memory for the gradient of a parameter, exactly `len` floats.
    fn gradient(&mut self, ordinal: usize) -> &mut [f32];
    /// The same for two parameters at once, `a` before `b`.
    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]);
    /// The gradient of this parameter is final for this micro-batch. Called exactly once per parameter and backward pass,
    /// in the order of the layout.
    fn finished(&mut self, ordinal: usize);
}

/// Sizes of a model, by name, that must be positive.
fn check_sizes(sizes: &[(&'static str, u32)]) -> Result<(), ModelError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(ModelError::Zero(name)),
        None => Ok(()),
    }
}
