//! The libraries of CUDA: [`find`] finds and opens them at run time, the other modules call them.
//!
//! ```text
//! find ── Library ──┬── driver    devices, memory, streams, kernels, time
//!                   ├── cublaslt  products of matrices
//!                   ├── cudnn     convolution, attention: graphs; operation: whether it computes one, and how
//!                   ├── nccl      sums over ranks
//!                   ├── nvml      errors, clocks, temperature and users of a GPU
//!                   └── nvrtc     CUDA C to machine code; kernels: what is compiled, and its calls
//! inventory: which of them a machine has; nvtx: names for profilers, which bring their library themselves
//! ```
//!
//! Signatures, constants and layouts are those of the headers of CUDA 13.2, cuDNN 9.26 and NCCL 2.30. The calls used here
//! have not changed since CUDA 12.4, which has `cuFuncGetParamInfo`, cuDNN 9.11 and NCCL 2.19, except where a comment says so.
//!
//! A function checks the sizes of buffers, and that they still exist, before it passes addresses on, so that its callers need no unsafe code. Nothing of
//! CUDA is linked: a machine without it gets an [`Error`].
#![deny(unsafe_code)]

pub mod attention;
pub mod convolution;
pub mod cublaslt;
pub mod cudnn;
pub mod driver;
mod error;
pub mod find;
mod graph;
#[cfg(test)]
mod header;
pub mod inventory;
pub mod kernels;
mod library;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod nvtx;
pub mod operation;
pub mod version;

pub use error::Error;
pub use library::Library;
