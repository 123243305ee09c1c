//! Test only: executes the PTX that NVRTC makes of a CUDA kernel, without a GPU, and checks every access to memory.
//!
//! ```text
//! PTX text -> ptx: Module, Entry (decoded once) -> Device::launch -> block -> warp -> memory
//!                                                        |                    |
//!                                                     Counts           the first Finding
//! ```
//!
//! A warp has 32 lanes; those with the lowest program counter run first, which joins branches again. The order of blocks,
//! and of the warps between two barriers, is drawn from a seed. What is checked of a launch is in [`Fault`].
//!
//! Absent on purpose: local memory (our kernels must not spill), device functions that were not inlined, `wgmma`, textures,
//! and any order of memory beyond barriers. An instruction that is not known is an error with its line. Approximate
//! instructions (`ex2.approx`, `rsqrt.approx`) are computed exactly. Time is not modelled.
#![forbid(unsafe_code)]

mod block;
pub mod compiler;
mod counts;
mod device;
mod fetched;
mod finding;
pub mod fp8;
mod machine;
mod memory;
mod ptx;
mod race;
mod random;
mod record;
mod warp;

pub use counts::{Counts, Shared, Traffic};
pub use device::{Bare, Device, Launch, LaunchError, Span, Touched};
pub use fetched::fetched;
pub use finding::{Fault, Finding};
pub use ptx::{Module, ParseError};
pub use random::Random;
pub use record::Recorder;
