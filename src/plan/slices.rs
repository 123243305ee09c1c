//! The place of a job with many nodes, in slices: a status that grew with the job would pass what etcd takes, and would be written as a
//! whole with every figure.
//!
//! ```text
//! a place is decided ─> its slices are written ─> the status that names them ─> whoever reads the job puts the nodes back
//! ```
//!
//! The plan knows little of that: in its snapshots a job has all its nodes. Names contain the attempt and a digest of the place, so that
//! two controllers that decide differently write different slices, and the one status that is accepted names those that belong to it.

use std::collections::BTreeMap;
use switchyard_core::digest::fnv1a;
use switchyard_crds::{MAX_SLICE_NODES, NodeShape, PlacedNode, PlacementSliceSpec, SlicedNode, SlicesStatus, TrainJob};

/// Most nodes that stand in the status itself.
pub const INLINE: usize = 128;

/// What the status says instead of the nodes of a place; `None`: they are few enough to stand in it.
pub fn named(job: &str, attempt: u32, nodes: &[PlacedNode]) -> Option<SlicesStatus> {
    if nodes.len() <= INLINE {
        return None;
    }
    let slices = cut(attempt, nodes);
    Some(SlicesStatus {
        name_prefix: format!("{job}-{attempt}-{}", digest(&slices)),
        count: slices.len() as i32,
        nodes: nodes.len() as i32,
    })
}

/// Cuts the nodes of a place into slices.
pub fn cut(attempt: u32, nodes: &[PlacedNode]) -> Vec<PlacementSliceSpec> {
    let slices = nodes.chunks(MAX_SLICE_NODES as usize);
    let slices = (0..).step_by(MAX_SLICE_NODES as usize).zip(slices);
    slices.map(|(first_node, nodes)| slice(attempt as i32, first_node, nodes)).collect()
}

fn slice(attempt: i32, first_node: i32, nodes: &[PlacedNode]) -> PlacementSliceSpec {
    let mut slice = PlacementSliceSpec { attempt, first_node, ..PlacementSliceSpec::default() };
    let mut known: BTreeMap<&NodeShape, i32> = BTreeMap::new();
    for node in nodes {
        let next = slice.shapes.len() as i32;
        let position = *known.entry(&node.shape).or_insert(next);
        if position == next {
            slice.shapes.push(node.shape.clone());
        }
        slice.nodes.push(SlicedNode {
            first_rank: node.first_rank,
            node_name: node.node_name.clone(),
            shape: position,
            gpus: node.gpus.clone(),
        });
    }
    slice
}

fn digest(slices: &[PlacementSliceSpec]) -> String {
    let text = serde_json::to_string(slices).expect("invariant: the API's types serialise to JSON");
    format!("{:016x}", fnv1a(&text))
}

/// Names of the slices, in the order of their nodes.
pub fn names(slices: &SlicesStatus) -> impl Iterator<Item = String> {
    (0..slices.count).map(|number| format!("{}-{number}", slices.name_prefix))
}

/// The slices of a job that stand elsewhere than in its status.
pub fn of(job: &TrainJob) -> Option<&SlicesStatus> {
    job.status.as_ref()?.placement.as_ref()?.slices.as_ref()
}

/// Puts a place together; `None`: a slice is missing, or they are not those that the status names.
pub fn join(named: &SlicesStatus, known: &BTreeMap<String, PlacementSliceSpec>) -> Option<Vec<PlacedNode>> {
    let slices: Vec<PlacementSliceSpec> = names(named).map(|name| known.get(&name).cloned()).collect::<Option<_>>()?;
    if !named.name_prefix.ends_with(&format!("-{}", digest(&slices))) {
        return None;
    }
    let nodes: Option<Vec<PlacedNode>> = slices.iter().flat_map(nodes_of).collect();
    nodes.filter(|nodes| nodes.len() == named.nodes.unsigned_abs() as usize)
}

fn nodes_of(slice: &PlacementSliceSpec) -> impl Iterator<Item = Option<PlacedNode>> {
    slice.nodes.iter().map(|node| {
        let shape = slice.shapes.get(usize::try_from(node.shape).ok()?)?.clone();
        Some(PlacedNode {
            first_rank: node.first_rank,
            node_name: node.node_name.clone(),
            gpus: node.gpus.clone(),
            shape,
        })
    })
}

/// Puts the nodes of its place into the status of a job.
pub fn set_nodes(job: &mut TrainJob, nodes: Vec<PlacedNode>) {
    if let Some(placement) = job.status.as_mut().and_then(|status| status.placement.as_mut()) {
        placement.nodes = nodes;
    }
}

#[cfg(test)]
mod tests;
