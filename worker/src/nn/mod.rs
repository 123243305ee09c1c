//! Networks as graphs of explicit layers on a static plan.
//!
//! ```text
//! Model::build(&mut Graph)   layers, tensors, parameters
//!   └─> NetworkPlan          order of parameters, readers and writers, offsets in one arena
//!         └─> Network        forward(weights, batch) -> loss      backward(weights, batch) -> GradientSink
//! ```
//!
//! A layer is an object with a forward and a hand-written backward ([`Layer`]). Everything that depends on the order of
//! layers belongs to the plan: when a tensor's memory is free again, which gradient is written first and which is
//! added, when the gradient of a parameter is final. The plan knows no device: it is told what each layer needs. What it comes to for a
//! step is written down, and checked, by [`program`]. What a layer computes is its [`Form`], which a device reads instead of the
//! layer's code; a layer without one runs on CPUs only.

pub(crate) mod arena;
mod error;
mod form;
pub(crate) mod graph;
mod layer;
pub mod layers;
mod layout;
mod memory;
mod network;
pub(crate) mod plan;
pub mod program;

pub use error::ModelError;
pub use form::{Form, Lengths};
pub use graph::{Graph, Parameter, Statistic, Tensor};
pub use layer::{
    Backward, Flow, Forward, Gradients, INPUTS, InputGradient, Kernels, Layer, LossSums, Needs, Parameters, Statistics,
    Weights,
};
pub use layout::{Bucket, GradientSink, Initial, Layout, ParameterSlot, Role, fuse};
pub use network::{Network, Operation};
