//! Network layers. Tensors are row-major; images are `[batch, height, width, channels]`.
//!
//! Each type has a method `add(graph, name, inputs)` that names its parameters as in PyTorch and
//! returns its output. The appended [`Layer`](super::Layer) has the layer's sizes in public fields;
//! it is also the [`Form`](super::Form) for other devices.

mod attention;
mod boundary;
mod convolution;
mod embedding;
mod input;
mod linear;
mod loss;
mod norm;
mod pooling;
mod rows;

pub use attention::Attention;
pub(super) use boundary::{RECEIVED, SENT, StageEnd};
pub use convolution::Convolution;
pub use embedding::{Embedding, Tables};
pub use input::{Features, Pixels, features, pixels};
pub use linear::{Activation, Linear, Product};
pub use loss::{CrossEntropy, Loss, Target};
pub use norm::{BatchNorm, ChannelNorm, LayerNorm, RowNorm};
pub use pooling::{AveragePool, average_pool, max_pool};
pub use rows::{Pick, Rows, pick_rows};
