//! CPU kernels with which the models are computed.
//!
//! ```text
//! pool (threads) + isa (which instructions) + half (how bf16 is multiplied)  ->  Cpu
//! Cpu -> gemm (matrix products), convolution, attention (per head), ops (row and elementwise kernels)
//! ```
//!
//! Every kernel gives the same bits for any number of threads on the same [`Isa`]: work is cut into pieces whose size
//! depends only on the shape, and sums over pieces run in a fixed order. The kernels of [`ops`] use no fused
//! multiply-add and also give the same bits on every [`Isa`]; [`gemm`] does not promise that. Nothing here allocates
//! after construction.

mod aligned;
pub mod attention;
mod convolution;
pub mod element;
pub mod gemm;
mod half;
pub(crate) mod isa;
pub mod math;
pub mod ops;
pub mod pool;
pub(crate) mod values;

pub use aligned::AlignedBuffer;
pub use convolution::ConvolutionShape;
pub use element::{Element, Format, bf16, f16};
pub use gemm::{Epilogue, Gemm, Matrix};
pub use half::{HalfKernel, Probed};
pub use isa::{Isa, IsaError};
pub use pool::Pool;
pub use values::{Values, ValuesMut, with_format};

use std::sync::Arc;

/// Threads and instruction set, passed to every kernel.
#[derive(Clone)]
pub struct Cpu {
    pub pool: Arc<Pool>,
    /// The instructions the kernels may use.
    pub isa: Isa,
    /// How products of bf16 with bf16 are computed.
    pub half: HalfKernel,
}
