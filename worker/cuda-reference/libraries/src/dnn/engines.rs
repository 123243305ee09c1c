//! The engines for a convolution, and the kinds of operations.

use super::attributes::{FILTERS, FORWARD, IMAGES};
use crate::gpu::convolution::{Operation, Shape};

/// An engine, with what it says of its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Engine(pub(super) i64);

/// Tensor cores, and sums in an order that changes.
pub(super) const UNORDERED: Engine = Engine(0);
/// Tensor cores; 32-bit factors are rounded to TF32.
pub(super) const ROUNDED: Engine = Engine(1);
/// Each product in the format of its factors.
pub(super) const EXACT: Engine = Engine(2);

impl Engine {
    /// `CUDNN_NUMERICAL_NOTE_TENSOR_CORE`, `CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC`.
    pub(super) fn notes(self) -> &'static [i32] {
        match self {
            UNORDERED => &[0, 4],
            ROUNDED => &[0],
            _ => &[],
        }
    }

    pub(super) fn is_rounded(self) -> bool {
        self == ROUNDED
    }

    pub(super) fn is_unordered(self) -> bool {
        self == UNORDERED
    }

    /// The last engine needs none.
    pub(super) fn workspace_bytes(self) -> u64 {
        if self == EXACT { 0 } else { 4096 }
    }
}

/// An engine for a graph.
#[derive(Debug, Clone)]
pub(super) struct Configuration {
    pub(super) shape: Shape,
    pub(super) engine: Engine,
}

/// Whether a fault that was asked for is about an operation: about its kind, or about all.
pub(super) fn meets(fault: Option<u64>, shape: &Shape) -> bool {
    fault.is_some_and(|kind| kind == 0 || kind == kind_of(shape.operation) as u64)
}

pub(super) fn kind_of(operation: Operation) -> i32 {
    match operation {
        Operation::Forward => FORWARD,
        Operation::Images => IMAGES,
        Operation::Filters => FILTERS,
    }
}
