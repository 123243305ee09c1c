//! Engines for graphs, and their operation kinds.

use super::attributes::{FILTERS, FORWARD, IMAGES};
use super::flows;
use crate::gpu::convolution::{Operation, Shape};
use crate::gpu::dataflow::Dataflow;
use crate::gpu::tensor::{Place, Tensor};

/// An engine; its numerical notes describe its arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Engine(pub(super) i64);

/// Tensor cores, with a varying accumulation order.
pub(super) const UNORDERED: Engine = Engine(0);
/// Tensor cores; f32 factors are rounded to TF32.
pub(super) const ROUNDED: Engine = Engine(1);
/// Products in the format of their factors.
pub(super) const EXACT: Engine = Engine(2);

/// Several operations fused into one tensor core kernel.
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

/// The computation of a graph.
#[derive(Debug, Clone)]
pub(super) enum Computation {
    Convolution(Box<Shape>),
    Dataflow(Dataflow),
}

impl Computation {
    /// Kind of the first operation.
    fn kind(&self) -> i32 {
        match self {
            Computation::Convolution(shape) => kind_of(shape.operation),
            Computation::Dataflow(flow) => flow.nodes().first().map_or(0, flows::kind_of),
        }
    }

    /// Tensors on the device.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Computation::Convolution(shape) => vec![&shape.images, &shape.filters, &shape.results],
            Computation::Dataflow(flow) => flow.tensors(Place::Device).concat(),
        }
    }
}

/// An engine configured for a graph.
#[derive(Debug, Clone)]
pub(super) struct Configuration {
    pub(super) computation: Computation,
    pub(super) engine: Engine,
}

/// Whether an injected fault applies to a graph: to the kind of its first operation, or to every
/// graph.
pub(super) fn fault_applies(fault: Option<u64>, computation: &Computation) -> bool {
    fault.is_some_and(|kind| kind == 0 || kind == computation.kind() as u64)
}

pub(super) fn kind_of(operation: Operation) -> i32 {
    match operation {
        Operation::Forward => FORWARD,
        Operation::Images => IMAGES,
        Operation::Filters => FILTERS,
    }
}
