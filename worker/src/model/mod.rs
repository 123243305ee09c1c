//! Trainable networks: each is a [`Model`], which appends its layers to a graph of [`crate::nn`].
//!
//! Other programs add networks through the [`Registry`]; see `examples/custom-model`.

mod bert;
mod gpt;
mod initialise;
mod mlp;
mod registry;
mod resnet;
mod transformer;

pub use bert::Bert;
pub use gpt::Gpt;
pub use initialise::initialise;
pub use mlp::Mlp;
pub use registry::{Build, Registry};
pub use resnet::ResNet;

use crate::nn::{Graph, ModelError};

/// A trainable network.
pub trait Model: Send + Sync {
    /// A short description, for example `GPT 4x128`.
    fn words(&self) -> String;

    /// Appends the layers and losses of the model to an empty graph, for the samples that the graph
    /// describes.
    ///
    /// # Errors
    /// The sizes are inconsistent, or the data are of the wrong kind.
    fn build(&self, graph: &mut Graph) -> Result<(), ModelError>;
}

/// Checks that named sizes are positive.
fn check_sizes(sizes: &[(&'static str, u32)]) -> Result<(), ModelError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(ModelError::Zero(name)),
        None => Ok(()),
    }
}
