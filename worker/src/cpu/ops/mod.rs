//! Row and elementwise kernels.
//!
//! Rows are handed out [`ROWS`] at a time, elements [`ELEMENTS`] at a time, whatever the number of threads. A sum over rows
//! is first made inside each piece and then over the pieces in their order. All sums use 16 lanes and no fused
//! multiply-add, so that the results are the same on every [`Isa`](super::Isa).
#![allow(unsafe_code)]

mod cross_entropy;
mod embedding;
mod gelu;
mod layer_norm;
mod sums;

pub use cross_entropy::{cross_entropy, cross_entropy_backward};
pub use embedding::{embed, embed_backward, position_backward};
pub use gelu::{gelu, gelu_backward};
pub use layer_norm::{LayerNormSaved, layer_norm, layer_norm_backward};
pub use sums::{column_sums, softmax_rows};
pub(crate) use sums::{softmax_row, sum_of_products};

/// Rows in one piece of work.
pub const ROWS: usize = 32;
/// Elements in one piece of elementwise work.
pub const ELEMENTS: usize = 8192;

/// Floats of scratch memory for sums over `rows` rows of `width` columns.
pub fn partials_len(rows: usize, width: usize) -> usize {
    rows.div_ceil(ROWS) * width
}
