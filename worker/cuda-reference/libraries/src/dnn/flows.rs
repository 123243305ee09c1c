//! Operations of graphs that are no convolution: products, reductions, and what is done number by number.

use super::attributes as known;
use super::{Answer, unsupported};
use crate::gpu::dataflow::{Dataflow, Does, Node};
use crate::gpu::tensor::{Place, Tensor};
use crate::numbers::Format;

/// What a descriptor of a kind of operation says of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct How(pub(super) Does);

impl How {
    pub(super) fn kind(self) -> i32 {
        match self.0 {
            Does::Product | Does::Reshape => known::PRODUCT,
            Does::Pointwise(..) => known::POINTWISE,
            Does::Reduction { .. } => known::REDUCTION,
        }
    }
}

/// Of a descriptor that is finalized.
pub(super) fn kind_of(node: &Node) -> i32 {
    match node.does {
        Does::Product => known::OF_PRODUCT,
        Does::Pointwise(..) => known::OF_POINTWISE,
        Does::Reduction { .. } => known::OF_REDUCTION,
        Does::Reshape => known::RESHAPE,
    }
}

/// Whether there is an engine: factors on the device have 16 bits.
pub(super) fn check(flow: &Dataflow) -> Answer<()> {
    let wide = |tensor: &&Tensor| tensor.place == Place::Device && tensor.format == Format::F32;
    let products = flow.nodes().iter().filter(|node| node.does == Does::Product);
    match products.flat_map(|node| &node.inputs).find(wide) {
        Some(tensor) => unsupported(&format!("factors in 32 bits: tensor {}", tensor.id)),
        None => Ok(()),
    }
}
