//! Operations of graphs that are no convolution: products, reductions, and what is done number by number.

use super::attributes::{self as known, Attributes};
use super::graphs::Made;
use super::{Answer, BAD_PARAM, SHAPE_MISMATCH, refused, unsupported};
use crate::gpu::dataflow::{Dataflow, Does, MODES, Node};
use crate::gpu::tensor::{Place, Tensor};
use crate::numbers::Format;

/// What a descriptor of a kind of operation says of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct How(Does);

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

pub(super) fn how(call: &str, kind: i32, of: &Attributes<Made>) -> Answer<How> {
    let (precision, does) = match kind {
        known::PRODUCT => (1500, Does::Product),
        known::REDUCTION => match of.int(1600) {
            0 => (1601, Does::Reduction { max: false }),
            3 => (1601, Does::Reduction { max: true }),
            other => return refused(call, BAD_PARAM, &format!("reduction {other}")),
        },
        _ => (1, Does::Pointwise(of.int(0).into(), of.long(9) as u64)),
    };
    if of.int(precision) != 0 {
        return refused(call, BAD_PARAM, "sums in another format than 32 bits");
    }
    if let Does::Pointwise(mode, _) = does
        && !MODES.iter().any(|(known, _)| *known == mode)
    {
        return refused(call, BAD_PARAM, &format!("pointwise mode {mode}"));
    }
    Ok(How(does))
}

pub(super) fn node(call: &str, kind: i32, of: &Attributes<Made>) -> Answer<Node> {
    let (how, inputs, output) = match kind {
        known::OF_PRODUCT => (Some(1523), &[1520, 1521][..], 1522),
        known::OF_REDUCTION => (Some(1612), &[1610][..], 1611),
        known::OF_POINTWISE => (Some(750), &[751, 752, 758][..], 753),
        _ => (None, &[2200][..], 2201),
    };
    let does = match how.map(|name| of.part(name)) {
        None => Does::Reshape,
        Some(Some(Made::How(How(does)))) => *does,
        Some(_) => return refused(call, BAD_PARAM, "no descriptor of what is done"),
    };
    let tensor = |name: &i32| match of.part(*name) {
        Some(Made::Tensor(tensor)) => Some(tensor.clone()),
        _ => None,
    };
    let inputs: Vec<Tensor> = inputs.iter().filter(|name| of.has(**name)).filter_map(tensor).collect();
    let Some(output) = tensor(&output) else {
        return refused(call, BAD_PARAM, "no tensor for the result");
    };
    let node = Node { does, inputs, output };
    if kind_of(&node) != kind {
        return refused(call, BAD_PARAM, "a descriptor of what another operation does");
    }
    if !node.fits() {
        return refused(call, SHAPE_MISMATCH, &format!("axes that do not fit: {node:?}"));
    }
    Ok(node)
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
