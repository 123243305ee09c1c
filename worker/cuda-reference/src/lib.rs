//! Test only: executes the PTX that NVRTC generates for a CUDA kernel, without a GPU, and checks
//! every memory access.
//!
//! ```text
//! PTX text -> ptx: Module, Entry (decoded once) -> Device::launch -> block -> warp -> memory
//!                                                        |                    |
//!                                                     Counts           the first Finding
//! ```
//!
//! A warp has 32 lanes. Those with the lowest program counter run first, which makes divergent
//! branches reconverge. The order of blocks, and of the warps between two barriers, is drawn from a
//! seed. [`Fault`] lists what is checked.
//!
//! Deliberately absent: local memory (our kernels must not spill), device functions that were not
//! inlined, `wgmma`, textures, and memory ordering other than barriers. An unknown instruction is
//! an error with its line. Approximate instructions (`ex2.approx`, `rsqrt.approx`) are computed
//! exactly. Time is not modelled.
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
pub use device::{Device, Launch, LaunchError, RawLaunch, Span, Touched};
pub use fetched::fetched;
pub use finding::{Fault, Finding};
pub use ptx::{Module, ParseError};
pub use random::Random;
pub use record::Recorder;
