//! CPU kernels.
//!
//! ```text
//! pool (threads) + isa (instruction set) + half (bf16 GEMM kernel)  ->  Cpu
//! Cpu -> gemm (matrix products), convolution, attention (per head), ops (rows, elementwise)
//! ```
//!
//! Every kernel is bit-identical for any number of threads on the same [`Isa`]: work is cut into
//! pieces whose size depends only on the shape, and sums over pieces run in a fixed order. The
//! kernels of [`ops`] use no fused multiply-add and are also bit-identical across [`Isa`]s;
//! [`gemm`] does not guarantee that. Nothing here allocates after construction.

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
pub use half::{HalfKernel, ProbeResult};
pub use isa::{Isa, IsaError};
pub use pool::Pool;
pub use values::{Values, ValuesMut, with_format};

use std::sync::Arc;

/// Threads and instruction set, passed to every kernel.
#[derive(Clone)]
pub struct Cpu {
    pub pool: Arc<Pool>,
    /// The instruction set of the kernels.
    pub isa: Isa,
    /// The kernel for bf16 GEMM.
    pub half: HalfKernel,
}
