//! CPU kernels: what the models are computed with.
//!
//! ```text
//! pool (threads) + isa (which instructions)  ->  Cpu
//! Cpu -> gemm (matrix products), attention (per head), ops (row and elementwise kernels)
//! ```
//!
//! Every kernel gives the same bits for any number of threads on the same [`Isa`]: work is cut into pieces whose size
//! depends on the shape alone, and sums over pieces run in a fixed order. The kernels of [`ops`] use no fused
//! multiply-add and give the same bits on every [`Isa`] too; [`gemm`] does not promise that.
//! Nothing here allocates after construction.

mod aligned;
pub mod attention;
pub mod gemm;
pub(crate) mod isa;
pub mod math;
pub mod ops;
pub mod pool;

pub use aligned::AlignedBuffer;
pub use gemm::{Epilogue, Gemm, Matrix};
pub use isa::{Isa, IsaError};
pub use pool::Pool;

use std::sync::Arc;

/// Threads and instruction set, handed to every kernel.
#[derive(Clone)]
pub struct Cpu {
    /// The compute threads.
    pub pool: Arc<Pool>,
    /// The instructions the kernels may use.
    pub isa: Isa,
}
