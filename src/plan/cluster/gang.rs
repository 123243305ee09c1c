//! A place for the whole gang: one node for each pod, from what is free.

use super::attempt::Attempt;
use crate::placement::gang::{self, FreeNode};
use crate::plan::eligible;
use crate::plan::objects;
use crate::plan::resources::Resources;
use std::collections::BTreeMap;
use switchyard_crds::{PlacedNode, PlacementStatus};

/// Chooses the nodes, or says in one sentence why there are none.
pub(super) fn place(attempt: &Attempt<'_>) -> Result<PlacementStatus, String> {
    let snapshot = &attempt.snapshot;
    let pod = objects::pod(snapshot.job, attempt.valid, snapshot.defaults, attempt.number, 0);
    let spec = pod.spec.unwrap_or_default();
    let need = Resources::of_pod(&spec);
    let mut refused: BTreeMap<String, usize> = BTreeMap::new();
    let mut candidates = Vec::new();
    for node in snapshot.nodes.values() {
        match eligible::may_run(&spec, &node.facts) {
            Ok(()) => candidates.push(node),
            Err(why) => *refused.entry(why.to_string()).or_default() += 1,
        }
    }
    let names: Vec<&str> = need.names().collect();
    let free: Vec<FreeNode> = candidates
        .iter()
        .map(|node| FreeNode { free: names.iter().map(|name| node.free.get(name)).collect() })
        .collect();
    let amounts: Vec<i64> = names.iter().map(|name| need.get(name)).collect();
    let count = attempt.valid.request.nodes;
    match gang::solve(&free, &amounts, count) {
        Ok(chosen) => {
            let nodes = (0_i32..).zip(chosen).map(|(rank, node)| PlacedNode {
                first_rank: rank * attempt.valid.request.processes_per_node as i32,
                node_name: candidates[node.0 as usize].facts.name.clone(),
                ..PlacedNode::default()
            });
            let nodes: Vec<PlacedNode> = nodes.collect();
            let reason = format!(
                "{count} of {} node{} with room for {need}, in the order of their names",
                candidates.len(),
                if candidates.len() == 1 { "" } else { "s" },
            );
            Ok(PlacementStatus { reason, nodes })
        }
        Err(short) => {
            let mut text = format!("{} of {count} nodes have room for {need}", short.fit);
            if let Some((resource, best)) = short.lacking {
                let name = names[resource];
                text.push_str(&format!("; most free {name} on the others: {}", Resources::amount(name, best)));
            }
            if let Some((why, nodes)) = refused.iter().max_by_key(|(_, nodes)| **nodes) {
                text.push_str(&format!("; {nodes} node{} cannot be used: {why}", if *nodes == 1 { "" } else { "s" }));
            }
            if snapshot.nodes.is_empty() {
                text.push_str("; the cluster has no nodes");
            }
            Err(text)
        }
    }
}
