//! The engine on GPUs of NVIDIA, as far as it exists: the graph of a network turned into launches, which are data.
//!
//! ```text
//! nn::Graph -> forms -> Needs -> plan of nn (addresses) -> Plan::launches -> Launch: kernel, product, convolution, attention, copy
//!                └─ Refused                                                    with the memory that each uses
//! ```
//!
//! A layer says what it computes ([`crate::nn::Form`]), and [`Plan`] says how a GPU does that. What has no form, and what has no kernel yet,
//! is refused before anything is allocated. [`Update`] does the same for what follows backward: loss, norm, loss scale and optimizer.
//! Nothing here calls a device: the caller says what the memory of a launch is, and runs it.
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
pub use cudnn::{AttentionKind, ConvolutionKind, CudnnKind, CudnnKinds};
pub use input::{Inputs, Share};
pub use launch::{Attention, AttentionPass, Convolution, Epilogue, Launch, Matrix, Memory, Product, Span, Table, Work};
pub use plan::Plan;
pub use program::{Access, Action, Event, Lane, Marked, Program, Step, Unordered, marked};
pub use refused::Refused;
pub use target::Target;
pub use update::Update;
