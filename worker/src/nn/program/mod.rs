//! What a device is told to do in one training step: operations on lanes, what each computes, and all the memory
//! that it reads and writes.
//!
//! ```text
//! Network::program -> Program -> check    orders, contents and life times, without a device
//!                            -> Display   one line per operation, for golden files
//! ```
//!
//! A lane runs its operations in order, like a stream of a GPU or a communication thread. Lanes wait for each other by events only. The
//! addresses of a static plan are known before anything runs, so a wrong order, a buffer that is used again too early, and a reduction that
//! starts before its last gradient are found here, where no device is.

mod check;
mod record;

pub use check::Fault;
pub use record::Reductions;

use super::form::Form;
use std::fmt;
use std::ops::Range;

/// A memory of the device. Addresses are bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// Activations, their gradients and scratch memory, placed by the plan.
    Arena,
    /// 32-bit weights in the order of the layout; they hold values before the step.
    Weights,
    /// 32-bit gradients in the order of the layout.
    Gradients,
}

/// What memory holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// The output of a layer.
    Value(String),
    /// The complete or partial gradient of that output.
    Gradient(String),
    /// What a layer delivers for one of its inputs before it is added to that input's gradient.
    Part(String, usize),
    /// What a layer keeps from forward to backward, in 32 bits.
    Saved(String),
    /// The same in the network's format.
    Kept(String),
    /// Of no use to anybody after the operation.
    Scratch(String),
    /// A parameter.
    Weight(String),
    /// The gradient of a parameter.
    WeightGradient(String),
    /// The gradients of a bucket, summed over all ranks.
    Sum(usize),
}

/// A content and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    pub memory: Memory,
    /// Bytes; never empty.
    pub range: Range<usize>,
    pub content: Content,
}

/// What runs in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Forward, backward and the optimizer.
    Compute,
    /// One of the communicators.
    Reduce(usize),
}

/// What one lane tells another.
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
    /// Of a layer, and what it computes.
    Forward(String, Form),
    /// The gradients of the same.
    Backward(String, Form),
    /// Moves or adds what a layer delivered to the gradient of an input.
    Pass(String),
    /// Sums a bucket over all ranks, in place.
    Reduce(usize),
    /// The norm of all gradients.
    Norm,
    /// Moves the weights of a bucket.
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

/// The operations of one training step, in an order in which one thread may launch them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    pub steps: Vec<Step>,
    /// Bytes of the arena.
    pub arena: usize,
    /// Bytes of the weights, and of the gradients.
    pub weights: usize,
}

impl Program {
    /// Bytes of a memory.
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
