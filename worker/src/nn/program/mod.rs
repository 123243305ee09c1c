//! A training step as data: operations on lanes, with all the memory that each reads and writes.
//!
//! ```text
//! Network::program -> Program -> check    verifies order, contents and lifetimes without a device
//!                            -> Display   one line per operation, for golden files
//! ```
//!
//! A lane runs its operations in order, like a GPU stream or a communication thread. Lanes
//! synchronise only through events. A static plan fixes all addresses before anything runs, so
//! wrong orders, buffers that are reused too early, and reductions that start before their last
//! gradient are all detected here, without a device.

mod check;
mod record;

pub use check::Fault;
pub use record::Reductions;

use super::form::Form;
use std::fmt;
use std::ops::Range;

/// A device memory. Addresses are byte offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// Activations, their gradients and scratch memory, laid out by the plan.
    Arena,
    /// f32 weights in layout order; initialised before the step.
    Weights,
    /// f32 gradients in layout order.
    Gradients,
}

/// Contents of a memory range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A layer's output.
    Value(String),
    /// The complete or partial gradient of a layer's output.
    Gradient(String),
    /// A layer's contribution to an input's gradient, not yet added to it.
    Part(String, usize),
    /// Saved by a layer for backward, in f32.
    Saved(String),
    /// Saved by a layer for backward, in the network's format.
    Kept(String),
    /// Unused after the operation.
    Scratch(String),
    /// A parameter.
    Weight(String),
    /// A parameter's gradient.
    WeightGradient(String),
    /// A bucket's gradients, summed over all ranks.
    Sum(usize),
}

/// A memory range and its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    pub memory: Memory,
    /// In bytes; never empty.
    pub range: Range<usize>,
    pub content: Content,
}

/// A sequence of operations that run in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Forward, backward and the optimizer.
    Compute,
    /// A communicator.
    Reduce(usize),
}

/// A signal between lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// All gradients of this all-reduce are final on this rank.
    Ready(usize),
    /// This all-reduce is done.
    Reduced(usize),
}

/// One operation.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A layer's forward pass and its form.
    Forward(String, Form),
    /// A layer's backward pass and its form.
    Backward(String, Form),
    /// Moves or adds a layer's contribution to an input's gradient.
    Pass(String),
    /// Sums a bucket over all ranks, in place.
    Reduce(usize),
    /// Computes the norm of all gradients.
    Norm,
    /// Updates a bucket's weights.
    Update(usize),
    Record(Event),
    Wait(Event),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub lane: Lane,
    pub work: Work,
    pub reads: Vec<Access>,
    pub writes: Vec<Access>,
}

/// The operations of one training step, in an order in which a single thread can launch them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    pub steps: Vec<Step>,
    /// Arena size in bytes.
    pub arena: usize,
    /// Size of the weights, and of the gradients, in bytes.
    pub weights: usize,
}

impl Program {
    /// Size of a memory in bytes.
    fn bytes(&self, memory: Memory) -> usize {
        match memory {
            Memory::Arena => self.arena,
            Memory::Weights | Memory::Gradients => self.weights,
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "arena {} bytes, weights {} bytes", self.arena, self.weights)?;
        for (index, step) in self.steps.iter().enumerate() {
            writeln!(f, "{index:>4} {step}")?;
            for access in &step.reads {
                writeln!(f, "       < {access}")?;
            }
            for access in &step.writes {
                writeln!(f, "       > {access}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lane {
            Lane::Compute => write!(f, "compute  {}", self.work),
            Lane::Reduce(lane) => write!(f, "reduce {lane} {}", self.work),
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Forward(layer, form) => write!(f, "forward {layer}: {form}"),
            Work::Backward(layer, _) => write!(f, "backward {layer}"),
            Work::Pass(layer) => write!(f, "pass on from {layer}"),
            Work::Reduce(bucket) => write!(f, "reduce bucket {bucket}"),
            Work::Norm => write!(f, "norm of the gradients"),
            Work::Update(bucket) => write!(f, "update bucket {bucket}"),
            Work::Record(event) => write!(f, "record {event}"),
            Work::Wait(event) => write!(f, "wait for {event}"),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Ready(run) => write!(f, "all-reduce {run} ready"),
            Event::Reduced(run) => write!(f, "all-reduce {run} done"),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = match self.memory {
            Memory::Arena => "arena",
            Memory::Weights => "weights",
            Memory::Gradients => "gradients",
        };
        write!(f, "{memory} {}..{} {}", self.range.start, self.range.end, self.content)
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Content::Value(layer) => write!(f, "value of {layer}"),
            Content::Gradient(layer) => write!(f, "gradient of {layer}"),
            Content::Part(layer, input) => write!(f, "part of {layer} for input {input}"),
            Content::Saved(layer) => write!(f, "saved by {layer}"),
            Content::Kept(layer) => write!(f, "kept by {layer}"),
            Content::Scratch(layer) => write!(f, "scratch of {layer}"),
            Content::Weight(parameter) => write!(f, "weight {parameter}"),
            Content::WeightGradient(parameter) => write!(f, "gradient of weight {parameter}"),
            Content::Sum(bucket) => write!(f, "sum of bucket {bucket}"),
        }
    }
}
