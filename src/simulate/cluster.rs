//! Builds the simulated cluster from the nodes of a real one.

use crate::fabric::Fabric;
use std::collections::BTreeMap;
use switchyard_plan::cluster::levels::{LevelDomains, Levels};
use switchyard_plan::cluster::view::NodeView;

/// The simulated form of a real cluster. It starts empty: the real cluster's jobs are not included.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedCluster {
    pub fabric: Fabric,
    /// The node whose report stands for all hosts.
    pub machine: String,
    /// The labels that define leaves and blocks, if the nodes have them.
    pub keys: [Option<String>; 2],
    /// Skipped nodes with the reason.
    pub skipped: Vec<(String, String)>,
}

/// Takes the ready nodes that have the most common number of GPUs. Leaves are the smallest domains
/// that hold several nodes, blocks the next larger ones; NVLink domains count as neither.
///
/// # Errors
/// No node has a usable report of its GPUs.
pub fn from_nodes(nodes: &BTreeMap<String, NodeView>, levels: &Levels) -> Result<SimulatedCluster, String> {
    let gpus = |node: &NodeView| node.described().map_or(0, |machine| machine.gpus.len() as u32);
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for node in nodes.values().filter(|node| gpus(node) > 0) {
        *counts.entry(gpus(node)).or_default() += 1;
    }
    let most = counts.iter().max_by_key(|(gpus, nodes)| (**nodes, **gpus)).map(|(gpus, _)| *gpus);
    let most = most.ok_or("no node of this cluster has a usable report of its GPUs (GPUTopology)")?;
    let why_not = |node: &NodeView| match gpus(node) {
        _ if node.silent_since.is_some() || !node.facts.ready => Some("not ready".to_string()),
        _ if node.facts.unschedulable => Some("cordoned".to_string()),
        0 => Some("no usable report of GPUs".to_string()),
        own if own != most => Some(format!("{own} GPUs where most nodes have {most}")),
        _ => None,
    };
    let (mut selected, mut skipped) = (Vec::new(), Vec::new());
    for (name, node) in nodes {
        match why_not(node) {
            Some(why) => skipped.push((name.clone(), why)),
            None => selected.push((name.clone(), node)),
        }
    }
    let machine = selected.first().ok_or("no node with GPUs is ready and takes pods")?.0.clone();
    let views: Vec<&NodeView> = selected.iter().map(|(_, node)| *node).collect();
    let domains = levels.domains(&views);
    let (cluster, below) = domains.split_last().ok_or("a cluster without levels")?;
    let mut network = below.iter().filter(|level| !level.level.nvlink && holds_several(level));
    let (leaf, block) = (network.next(), network.next());
    let mut ids = DomainIds::default();
    let hosts = selected.iter().enumerate().map(|(at, (name, _))| {
        let block = block.map_or(Domain::Named(String::new()), |level| domain(level, at));
        let leaf = leaf.map_or(Domain::Named(String::new()), |level| domain(level, at));
        let (leaf, block) = ids.of(leaf, block);
        (name.clone(), leaf, block)
    });
    let mut fabric = Fabric::from_hosts(hosts.collect::<Vec<_>>());
    let share = |level: &LevelDomains| f64::from(level.level.share);
    fabric.gpus_per_host = most;
    fabric.oversubscription =
        [block, None].map(|above| share(leaf.unwrap_or(cluster)) / share(above.unwrap_or(cluster)));
    let keys = [leaf, block].map(|level| level.map(|level| level.key.clone()));
    Ok(SimulatedCluster { fabric, machine, keys, skipped })
}

fn holds_several(level: &LevelDomains) -> bool {
    let mut names: Vec<&String> = level.of.iter().flatten().collect();
    names.sort_unstable();
    names.windows(2).any(|two| two[0] == two[1])
}

/// A domain of a level. A node without the level's label is alone in its domain.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Domain {
    Named(String),
    Alone(usize),
}

fn domain(level: &LevelDomains, node: usize) -> Domain {
    level.of[node].clone().map_or(Domain::Alone(node), Domain::Named)
}

/// Numbers leaves and blocks from 0. Equally named leaves in two blocks are two leaves.
#[derive(Default)]
struct DomainIds {
    leaves: BTreeMap<(Domain, Domain), usize>,
    blocks: BTreeMap<Domain, usize>,
}

impl DomainIds {
    fn of(&mut self, leaf: Domain, block: Domain) -> (usize, usize) {
        let next = self.leaves.len();
        let leaf = *self.leaves.entry((block.clone(), leaf)).or_insert(next);
        let next = self.blocks.len();
        (leaf, *self.blocks.entry(block).or_insert(next))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};
    use switchyard_ledger::offline::Cluster;
    use switchyard_ledger::queue::QueueSettings;
    use switchyard_plan::objects::Defaults;

    /// The example's cluster of two racks with four nodes each, modified.
    fn selected(domains: &[&str], change: impl Fn(&str, &mut Value)) -> Result<SimulatedCluster, String> {
        let text = include_str!("../../examples/clusters/two-racks.json");
        let mut cluster: Value = serde_json::from_str(text).unwrap();
        for item in cluster["items"].as_array_mut().unwrap() {
            let name = item["metadata"]["name"].as_str().unwrap().to_string();
            change(&name, item);
        }
        let levels = Levels::new(domains.iter().map(|level| level.parse().unwrap()).collect()).unwrap();
        let items = cluster["items"].as_array().unwrap();
        let cluster = Cluster::of(items, Defaults::default(), levels, QueueSettings::default(), jiff::Timestamp::MIN)?;
        from_nodes(cluster.nodes(), cluster.levels())
    }

    #[test]
    fn racks_are_leaves_and_the_shared_level_divides_the_bandwidth() {
        let got = selected(&["example.com/rack", "cluster:2"], |_, _| ()).unwrap();
        assert_eq!(got.fabric.leaves, [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
        assert_eq!((got.fabric.oversubscription, got.fabric.gpus_per_host), ([2.0, 2.0], 8));
        assert_eq!((got.machine.as_str(), got.keys), ("gpu-01", [Some("example.com/rack".into()), None]));
        assert_eq!(got.skipped, []);
    }

    #[test]
    fn two_levels_are_leaves_and_blocks() {
        let split = |name: &str, item: &mut Value| {
            let half = if name < "gpu-03" || ("gpu-05".."gpu-07").contains(&name) { "a" } else { "b" };
            item["metadata"]["labels"]["example.com/half"] = json!(half);
        };
        // Half a rack is one leaf, even if another rack uses the same label value.
        let got = selected(&["example.com/half:2", "example.com/rack:4", "cluster:8"], split).unwrap();
        assert_eq!(got.fabric.leaves, [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!((got.fabric.blocks, got.fabric.oversubscription), (vec![vec![0, 1], vec![2, 3]], [2.0, 4.0]));
    }

    #[test]
    fn a_cluster_without_levels_is_one_leaf() {
        let got = selected(&["cluster:2"], |_, _| ()).unwrap();
        assert_eq!((got.fabric.leaves.len(), got.fabric.oversubscription), (1, [1.0, 1.0]));
    }

    #[test]
    fn unusable_nodes_are_named() {
        let change = |name: &str, item: &mut Value| match (name, item["kind"].as_str()) {
            ("gpu-02", Some("Node")) => item["spec"]["unschedulable"] = json!(true),
            ("gpu-03", Some("Node")) => item["status"]["conditions"][0]["status"] = json!("False"),
            ("gpu-04", Some("GPUTopology")) => item["kind"] = json!("Other"),
            ("gpu-05", Some("Node")) => item["metadata"]["labels"] = json!({}),
            _ => (),
        };
        let got = selected(&["example.com/rack", "cluster:2"], change).unwrap();
        let skipped: Vec<(&str, &str)> = got.skipped.iter().map(|(name, why)| (name.as_str(), why.as_str())).collect();
        let expected = [("gpu-02", "cordoned"), ("gpu-03", "not ready"), ("gpu-04", "no usable report of GPUs")];
        assert_eq!(skipped, expected);
        assert_eq!(got.fabric.leaves, [vec![0], vec![1], vec![2, 3, 4]], "gpu-05 has no label: it is alone");
        let none = selected(&["cluster"], |_, item| item["kind"] = json!("Other")).unwrap_err();
        assert!(none.contains("no node of this cluster has a usable report"), "{none}");
    }
}
