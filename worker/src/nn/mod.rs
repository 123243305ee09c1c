//! Networks as graphs of explicit layers with a static memory plan.
//!
//! ```text
//! Model::build(&mut Graph)   layers, tensors, parameters
//!   └─> NetworkPlan          order of parameters, readers and writers, offsets in one arena
//!         └─> Network    forward(weights, batch) -> loss, backward(weights, batch) -> GradientSink
//! ```
//!
//! A layer is an object with a forward pass and a hand-written backward pass ([`Layer`]).
//! Everything that depends on layer order is in the plan: when a tensor's memory can be reused,
//! which gradient is written first and which is added, and when a parameter's gradient is final.
//! The plan is device-independent: it receives each layer's memory needs. [`program`] lists and
//! checks the resulting operations of a step. A layer's [`Form`] describes its operation to devices
//! other than CPUs; a layer without one runs on CPUs only.

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
mod stage;
mod timeline;

pub use error::ModelError;
pub use form::{Form, Lengths};
pub use graph::{Graph, Parameter, Statistic, Tensor};
pub use layer::{
    Backward, Flow, Forward, Gradients, INPUTS, InputGradient, Kernels, Layer, LossSums, Needs, Parameters, Statistics,
    WeightSource, Weights,
};
pub use layout::{Bucket, GradientSink, Initial, Layout, ParameterSlot, Role, fuse};
pub use network::{Boundary, Network, Operation};
