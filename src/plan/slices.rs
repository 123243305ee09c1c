//! Stores the placement of a job with many nodes in slices. A status that grew with the job would
//! exceed etcd's limit, and would be rewritten as a whole with every figure.
//!
//! ```text
//! placement decided ─> slices written ─> status that references them written ─> readers of the job restore the nodes
//! ```
//!
//! The planner is mostly unaware of this: in its snapshots a job has all its nodes. Names contain
//! the attempt and a digest of the placement. Two controllers that decide differently therefore
//! write different slices, and the one status that is accepted references the slices that belong to
//! it.

use std::collections::BTreeMap;
use switchyard_core::digest::fnv1a;
use switchyard_crds::{MAX_SLICE_NODES, NodeShape, PlacedNode, PlacementSliceSpec, SlicedNode, SlicesStatus, TrainJob};

/// Maximum number of nodes stored in the status itself.
pub const INLINE: usize = 128;

/// The reference that replaces the nodes of a placement in the status. `None` if there are few
/// enough nodes to store them inline.
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

/// Splits the nodes of a placement into slices.
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

/// Names of the slices, in node order.
pub fn names(slices: &SlicesStatus) -> impl Iterator<Item = String> {
    (0..slices.count).map(|number| format!("{}-{number}", slices.name_prefix))
}

/// The reference to a job's slices, if its placement is stored in slices.
pub fn of(job: &TrainJob) -> Option<&SlicesStatus> {
    job.status.as_ref()?.placement.as_ref()?.slices.as_ref()
}

/// Reassembles a placement. `None` if a slice is missing, or if the slices do not match the digest
/// in the status.
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

/// Stores the nodes of its placement in a job's status.
pub fn set_nodes(job: &mut TrainJob, nodes: Vec<PlacedNode>) {
    if let Some(placement) = job.status.as_mut().and_then(|status| status.placement.as_mut()) {
        placement.nodes = nodes;
    }
}

#[cfg(test)]
mod tests;
