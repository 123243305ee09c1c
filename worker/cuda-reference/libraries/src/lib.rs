//! Test only: emulated CUDA libraries for machines without a GPU, so that the shipped programs run
//! there.
//!
//! ```text
//! libcuda.so.1      ─┐                  ┌─ queue: streams, pending work, execution order
//! libcublasLt.so.13 ─┼─ one file, abi ──┤  gpu: memory, races, faults ── executor of PTX
//! libcudnn.so.9     ─┤
//! libnvrtc.so.13    ─┤    blas, dnn, nvrtc,  └─ finding: ends the process
//! libnccl.so.2      ─┤    nccl ── other ranks
//! libnvidia-ml.so.1 ─┘    nvml
//! ```
//!
//! [`folder`] contains one shared library under six names, for `SWITCHYARD_CUDA_LIBRARIES`, and
//! under a seventh as a profiler (`nvtx`). Kernels run in `switchyard-cuda-reference`; matrix
//! products and convolutions are computed by definition. NVRTC is NVIDIA's; instead of a CUBIN it
//! returns its PTX in a container that this driver accepts.
//!
//! A stream runs as late as possible: only when the host waits, and only what it waits for. With a
//! seed, the order is drawn from all orders that streams and events allow. Independently of the
//! order, it is a [`finding`] if two unordered operations use the same bytes and at least one
//! writes them, if memory in use is freed, or if host memory changes while a copy of it is queued.
//!
//! | variable | |
//! |---|---|
//! | `SWITCHYARD_REFERENCE_NVRTC` | folder of NVIDIA's NVRTC |
//! | `SWITCHYARD_REFERENCE_CACHE` | folder for compiled kernels; unset disables the cache |
//! | `SWITCHYARD_REFERENCE_SEED` | seed for the order of streams, blocks and warps; a process that retains its device again gets the next seed |
//! | `SWITCHYARD_REFERENCE_DEVICES` | number of GPUs; default 1 |
//! | `SWITCHYARD_REFERENCE_MEMORY` | bytes of memory per GPU; default: an H200's |
//! | `SWITCHYARD_REFERENCE_RANGES` | folder for recorded ranges: see `nvtx` |
//! | `SWITCHYARD_REFERENCE_FAULT` | `out-of-memory:N`, `launch:N`, `lost:N`, `hang:N`, `wrong:N`, `stale:N`, `exit`, `busy`, and those of cuDNN, NCCL and NVML: see [`fault`] |
//!
//! Not supported: graphs with host memory or several streams, several contexts per device, managed
//! memory, textures. Time is not modelled: events count operations.
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
