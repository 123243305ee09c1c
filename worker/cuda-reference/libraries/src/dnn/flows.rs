//! Graph operations other than convolutions: matrix products, reductions and elementwise
//! operations.

use super::attributes;
use super::{CallResult, unsupported};
use crate::gpu::dataflow::{Dataflow, Node, OperationKind};
use crate::gpu::tensor::{Place, Tensor};
use crate::numbers::Format;

/// Operation parameters given by a descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) struct OperationParameters(pub(super) OperationKind);

impl OperationParameters {
    pub(super) fn kind(self) -> i32 {
        match self.0 {
            OperationKind::Product | OperationKind::Reshape => attributes::PRODUCT,
            OperationKind::Pointwise(..) => attributes::POINTWISE,
            OperationKind::Reduction { .. } => attributes::REDUCTION,
        }
    }
}

/// Kind of the finalized operation descriptor.
pub(super) fn kind_of(node: &Node) -> i32 {
    match node.kind {
        OperationKind::Product => attributes::OF_PRODUCT,
        OperationKind::Pointwise(..) => attributes::OF_POINTWISE,
        OperationKind::Reduction { .. } => attributes::OF_REDUCTION,
        OperationKind::Reshape => attributes::RESHAPE,
    }
}

/// Checks that there is an engine: factors on the device must be 16-bit.
pub(super) fn check(flow: &Dataflow) -> CallResult<()> {
    let wide = |tensor: &&Tensor| tensor.place == Place::Device && tensor.format == Format::F32;
    let products = flow.nodes().iter().filter(|node| node.kind == OperationKind::Product);
    match products.flat_map(|node| &node.inputs).find(wide) {
        Some(tensor) => unsupported(&format!("factors in 32 bits: tensor {}", tensor.id)),
        None => Ok(()),
    }
}
