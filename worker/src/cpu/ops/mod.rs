//! Row and elementwise kernels. Tensors are row-major, images `[batch, height, width, channels]`.
//!
//! Tensors can have any element format ([`Element`](super::Element)); arithmetic, normalisation
//! parameters, biases, parameter gradients and tensors saved for backward are f32.
//!
//! Rows are processed [`ROWS`] at a time, elements [`ELEMENTS`] at a time, for any number of
//! threads. A sum over rows is computed within each piece first and then over the pieces in order.
//! All sums use 16 lanes and no fused multiply-add, so the results are the same on every
//! [`Isa`](super::Isa).

mod activation;
mod add;
mod batch_norm;
mod convert;
mod cross_entropy;
mod embedding;
mod gather;
mod layer_norm;
mod pieces;
mod pooling;
mod sums;

pub use activation::{gelu, gelu_backward, relu, relu_backward, tanh, tanh_backward};
pub use add::{add, add_to};
pub use batch_norm::{BatchNorm, batch_norm, batch_norm_backward, batch_norm_evaluate, batch_norm_partials_len};
pub use convert::{PixelTable, convert, normalise, pixel_table};
pub use cross_entropy::{IGNORE, Targets, cross_entropy, cross_entropy_backward};
pub use embedding::{embed, embed_backward, position_backward, segment_backward};
pub use gather::{gather_rows, scatter_add_rows};
pub use layer_norm::{LayerNormSaved, layer_norm, layer_norm_backward};
pub use pieces::{Pieces, in_pieces, per_task, rows};
pub use pooling::{Window, average_pool, average_pool_backward, max_pool, max_pool_backward};
pub use sums::{column_sums, softmax_rows};
pub(crate) use sums::{softmax_row, sum_of_products};

/// Rows per piece of work.
pub const ROWS: usize = 32;
/// Elements per piece of elementwise work.
pub const ELEMENTS: usize = 8192;

/// Scratch floats for sums over `rows` rows of `width` columns.
pub fn partials_len(rows: usize, width: usize) -> usize {
    rows.div_ceil(ROWS) * width
}
