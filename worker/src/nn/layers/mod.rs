//! The layers of networks. Tensors are row-major; images are `[batch, height, width, channels]`.
//!
//! Each type has a method `add(graph, name, inputs)` that names its parameters as PyTorch does and returns its output.

mod attention;
mod convolution;
mod embedding;
mod input;
mod linear;
mod loss;
mod norm;
mod pooling;
mod rows;

pub use attention::Attention;
pub use convolution::Convolution;
pub use embedding::Embedding;
pub use input::{features, pixels};
pub use linear::{Activation, Linear};
pub use loss::{CrossEntropy, Target};
pub use norm::{BatchNorm, LayerNorm};
pub use pooling::{average_pool, max_pool};
pub use rows::{Pick, pick_rows};
