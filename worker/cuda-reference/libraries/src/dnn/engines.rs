//! The engines for graphs, and the kinds of operations.

use super::attributes::{FILTERS, FORWARD, IMAGES};
use super::flows;
use crate::gpu::convolution::{Operation, Shape};
use crate::gpu::dataflow::Dataflow;
use crate::gpu::tensor::{Place, Tensor};

/// An engine, with what it says of its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Engine(pub(super) i64);

/// Tensor cores, and sums in an order that changes.
pub(super) const UNORDERED: Engine = Engine(0);
/// Tensor cores; 32-bit factors are rounded to TF32.
pub(super) const ROUNDED: Engine = Engine(1);
/// Each product in the format of its factors.
pub(super) const EXACT: Engine = Engine(2);

/// Of several operations one kernel, on tensor cores.
pub(super) const FUSED: Engine = Engine(3);

impl Engine {
    /// `CUDNN_NUMERICAL_NOTE_TENSOR_CORE`, `CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC`.
    pub(super) fn notes(self) -> &'static [i32] {
        match self {
            UNORDERED => &[0, 4],
            ROUNDED | FUSED => &[0],
            _ => &[],
        }
    }

    pub(super) fn is_rounded(self) -> bool {
        self == ROUNDED
    }

    pub(super) fn is_unordered(self) -> bool {
        self == UNORDERED
    }

    pub(super) fn workspace_bytes(self) -> u64 {
        match self {
            EXACT => 0,
            FUSED => 256,
            _ => 4096,
        }
    }
}

/// What a graph computes.
#[derive(Debug, Clone)]
pub(super) enum Whole {
    Convolution(Box<Shape>),
    Dataflow(Dataflow),
}

impl Whole {
    /// The kind of its first operation.
    fn kind(&self) -> i32 {
        match self {
            Whole::Convolution(shape) => kind_of(shape.operation),
            Whole::Dataflow(flow) => flow.nodes().first().map_or(0, flows::kind_of),
        }
    }

    /// Tensors on the device.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Whole::Convolution(shape) => vec![&shape.images, &shape.filters, &shape.results],
            Whole::Dataflow(flow) => flow.tensors(Place::Device).concat(),
        }
    }

    pub(super) fn words(&self) -> Vec<i64> {
        match self {
            Whole::Convolution(shape) => [0].into_iter().chain(shape.words()).collect(),
            Whole::Dataflow(flow) => [1].into_iter().chain(flow.words()).collect(),
        }
    }

    /// `None` if they are none.
    pub(super) fn from_words(words: &[i64]) -> Option<Whole> {
        match words {
            [0, rest @ ..] => Shape::from_words(rest).map(|shape| Whole::Convolution(Box::new(shape))),
            [1, rest @ ..] => Dataflow::from_words(rest).map(Whole::Dataflow),
            _ => None,
        }
    }
}

/// An engine for a graph.
#[derive(Debug, Clone)]
pub(super) struct Configuration {
    pub(super) whole: Whole,
    pub(super) engine: Engine,
}

/// Whether a fault that was asked for is about a graph: about the kind of its first operation, or about all.
pub(super) fn meets(fault: Option<u64>, whole: &Whole) -> bool {
    fault.is_some_and(|kind| kind == 0 || kind == whole.kind() as u64)
}

pub(super) fn kind_of(operation: Operation) -> i32 {
    match operation {
        Operation::Forward => FORWARD,
        Operation::Images => IMAGES,
        Operation::Filters => FILTERS,
    }
}
