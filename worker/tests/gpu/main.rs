//! Networks on a GPU without one: what is refused, launches that stay within the checked program, and training whose kernels run on the
//! executor of PTX, compared with the engine on CPUs.
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
#[path = "../../cuda-reference/tests/nvrtc/mod.rs"]
mod nvrtc;
mod optimizers;
mod predict;
mod program;
mod refusals;
mod training;
#[path = "../trial/mod.rs"]
mod trial;
mod update;

use switchyard_worker::gpu::{CudnnKinds, Target};
use switchyard_worker::nn::Graph;

/// The same with a cuDNN that computes all that it can of a graph.
fn with_cudnn(graph: &Graph) -> Target {
    let kinds = CudnnKinds::of(graph, false).into_iter();
    TARGET.with(CudnnKinds::new(kinds.map(|kind| (kind, 4096)).collect()))
}

/// Few blocks, so that each has several rows, and the shared memory of a block on an H200.
const TARGET: Target = Target { blocks: 4, shared_bytes: 232_448, cudnn: CudnnKinds::none(), fp8: false };
