//! Models as explicit layers on a static plan.
//!
//! ```text
//! Layout: one flat array of parameters, in the order in which backward finishes their gradients
//! Plan:   one arena of activations, every tensor at a fixed place
//! forward(weights, tokens) -> loss        backward(weights) -> GradientSink, parameter after parameter
//! ```
//!
//! Weights, gradients and optimizer moments share the [`Layout`], so that a fused bucket of gradients is a range of it.

mod gpt;
mod initialise;
mod layout;
mod plan;

pub use gpt::Gpt;
pub use layout::{Bucket, Initial, Layout, Parameter, fuse};

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
    /// Tokens are 16-bit numbers.
    #[error("vocabulary of {0} tokens, expected at most 65536")]
    Vocabulary(usize),
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

/// A trainable model.
pub trait Model {
    /// The parameters.
    fn layout(&self) -> &Layout;
    /// Writes initial weights: the same for a seed on every machine. `weights` has the layout's length.
    fn initialise(&self, seed: u64, weights: &mut [f32]);
    /// Mean cross entropy in nats per token over a micro-batch (`inputs` and `targets`: sequence after sequence). Keeps
    /// what [`Model::backward`] needs.
    ///
    /// # Panics
    /// If a slice has the wrong length or a token is outside the vocabulary.
    fn forward(&mut self, weights: &[f32], inputs: &[u16], targets: &[u16]) -> f64;
    /// Gradients of `scale` times the loss of the last [`Model::forward`], with the same weights. Once per forward.
    fn backward(&mut self, weights: &[f32], scale: f32, sink: &mut dyn GradientSink);
    /// The loss alone. It uses the memory of forward: no [`Model::backward`] may follow.
    fn evaluate(&mut self, weights: &[f32], inputs: &[u16], targets: &[u16]) -> f64;
    /// Memory that the model holds (activations and scratch, not weights and gradients).
    fn memory_bytes(&self) -> usize;
    /// Tokens in a micro-batch.
    fn tokens_per_batch(&self) -> usize;
}
