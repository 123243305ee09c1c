//! Test only: the libraries of CUDA for machines without a GPU, so that the programs that are shipped run there.
//!
//! ```text
//! libcuda.so.1      ─┐                  ┌─ queue: streams, what waits, in which order it runs
//! libcublasLt.so.13 ─┼─ one file, abi ──┤  gpu: memory, races, faults ── executor of PTX
//! libcudnn.so.9     ─┤
//! libnvrtc.so.13    ─┤    blas, dnn, nvrtc,  └─ finding: ends the process
//! libnccl.so.2      ─┤    nccl ── other ranks
//! libnvidia-ml.so.1 ─┘    nvml
//! ```
//!
//! [`folder`] has one shared library under six names, so that `SWITCHYARD_CUDA_LIBRARIES` may name it, and under a seventh that of a profiler
//! (`nvtx`). Kernels run in
//! `switchyard-cuda-reference`; products and convolutions are computed by definition. NVRTC is NVIDIA's; in place of a CUBIN it gives its PTX in a
//! container that this driver takes.
//!
//! A stream runs as late as possible: when somebody waits, and then no more than is waited for. With a seed, in an order that is drawn
//! among all that streams and events allow. Two operations that use the same bytes, one of them writing, without an order between them are
//! a [`finding`] whatever the order was, as is a free of what is in use, and host memory that changes while a copy is queued.
//!
//! | variable | |
//! |---|---|
//! | `SWITCHYARD_REFERENCE_NVRTC` | folder of NVIDIA's NVRTC |
//! | `SWITCHYARD_REFERENCE_CACHE` | folder for what it compiled; none without it |
//! | `SWITCHYARD_REFERENCE_SEED` | draws the order of streams, and of blocks and warps; a process that takes its device again has the next seed |
//! | `SWITCHYARD_REFERENCE_DEVICES` | number of GPUs, 1 without it |
//! | `SWITCHYARD_REFERENCE_MEMORY` | bytes of memory of each, those of an H200 without it |
//! | `SWITCHYARD_REFERENCE_RANGES` | folder of the ranges that were written down: see `nvtx` |
//! | `SWITCHYARD_REFERENCE_FAULT` | `out-of-memory:N`, `launch:N`, `lost:N`, `hang:N`, `wrong:N`, `stale:N`, `exit`, `busy`, and those of cuDNN, NCCL and NVML: see [`fault`] |
//!
//! Not here: graphs with memory of the host or of several streams, several contexts of a device, managed memory, textures. Time is not
//! modelled: events count operations.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod abi;
#[allow(unsafe_code)]
mod blas;
mod clock;
mod code;
#[allow(unsafe_code)]
mod dnn;
pub mod fault;
#[allow(unsafe_code)]
pub mod finding;
mod folder;
mod gpu;
#[allow(unsafe_code)]
mod host;
#[allow(unsafe_code)]
mod nccl;
mod numbers;
#[allow(unsafe_code)]
mod nvml;
#[allow(unsafe_code)]
mod nvrtc;
#[allow(unsafe_code)]
mod nvtx;
mod ranks;
mod reported;
mod shadow;

pub use folder::{RECORDER, environment, folder};
pub use nvtx::VARIABLE as RANGES;
