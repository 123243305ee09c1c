//! NVIDIA GPU backend: lowers a network graph to a list of launches. Launches are plain data.
//!
//! ```text
//! nn::Graph -> forms -> Needs -> memory plan (nn) -> Plan::launches -> Launch: kernel, product,
//!                └─ Refused                        cuDNN operation or copy, with its memory
//! ```
//!
//! A layer describes its operation ([`crate::nn::Form`]), and [`Plan`] lowers it. Layers without a
//! form or a kernel are rejected before anything is allocated. [`Update`] lowers the rest of the
//! step after backward: loss, norm, loss scale and optimizer. Nothing here calls a device: the
//! caller maps the memory of a launch and runs it.
#![forbid(unsafe_code)]

mod computation;
mod contents;
mod cost;
mod cudnn;
mod format;
mod input;
mod launch;
mod layers;
mod plan;
mod predict;
mod program;
mod refused;
mod target;
mod update;

pub use computation::{Computation, Costs, Pass, Works};
pub use contents::{Contents, Initial};
pub use cost::Costed;
pub use cudnn::CudnnKinds;
pub use input::{Inputs, Share};
pub use launch::{Cudnn, Launch, Memory, Span, Table, Work};
pub use plan::Plan;
pub use program::{Access, Action, Event, Lane, Marked, Program, Step, Unordered, marked};
pub use refused::Refused;
pub use switchyard_cuda::cublaslt::Arithmetic;
pub use target::Target;
pub use update::Update;
