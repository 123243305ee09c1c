//! GPU networks without a GPU: refused configurations, launches that stay within the checked
//! program, and training whose kernels run on the PTX executor, compared with the CPU engine.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod accepted;
mod computation;
mod executed;
#[path = "../flat_gradients/mod.rs"]
mod flat_gradients;
mod gradients;
mod loaded;
mod network;
mod optimizers;
mod predict;
mod program;
mod refusals;
mod training;
#[path = "../trial/mod.rs"]
mod trial;
mod update;

use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_worker::lowering::{CudnnKinds, Target};
use switchyard_worker::nn::Graph;

/// A target whose cuDNN and cuBLASLt handle everything that they can of a graph.
fn with_libraries(graph: &Graph) -> Target {
    let kinds = CudnnKinds::of(graph, Arithmetic::Ieee).into_iter();
    let target = TARGET.with(CudnnKinds::new(kinds.map(|kind| (kind, 4096)).collect()));
    Target { epilogues: true, ..target }
}

/// Few blocks, so that each has several rows; shared memory per block of an H200.
const TARGET: Target = Target {
    blocks: 4,
    shared_bytes: 232_448,
    cudnn: CudnnKinds::none(),
    epilogues: false,
    fp8: false,
    arithmetic: Arithmetic::Ieee,
};
