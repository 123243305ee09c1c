//! CUDA libraries: [`find`] finds and opens them at run time, the other modules call them.
//!
//! ```text
//! find ── Library ──┬── driver    devices, memory, streams, kernels, timing
//!                   ├── cublaslt  GEMM
//!                   ├── cudnn     convolution and attention graphs; operation: queries and plans
//!                   ├── nccl      all-reduce
//!                   ├── nvml      errors, clocks, temperature and users of a GPU
//!                   └── nvrtc     CUDA C to machine code; kernels: sources and calls
//! inventory: libraries on a machine; nvtx: profiler ranges, whose library the profiler provides
//! ```
//!
//! Signatures, constants and layouts match the headers of CUDA 13.2, cuDNN 9.26 and NCCL 2.30.
//! Unless a comment says otherwise, the calls used here are unchanged since CUDA 12.4 (which
//! introduced `cuFuncGetParamInfo`), cuDNN 9.11 and NCCL 2.19.
//!
//! Functions check the sizes of buffers, and that they are still allocated, before passing
//! addresses on, so callers need no unsafe code. No CUDA library is linked: on a machine without
//! CUDA, functions return an [`Error`].
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
