//! Topology levels: which node labels identify racks, blocks and NVLink domains, and the bandwidth
//! across them.

use super::view::NodeView;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use switchyard_core::placement::gpus::{Level, MAX_LEVELS};
use switchyard_crds::{DomainMode, TopologyDomain, TopologyPolicy};

/// Label with a node's NVLink domain: the cluster UUID and clique number, set by NVIDIA GPU feature
/// discovery. If the label is absent, the node's report is used.
pub const CLIQUE: &str = "nvidia.com/gpu.clique";
/// Name of the level that contains all nodes.
const CLUSTER: &str = "cluster";

/// Labels that are read unless the operator configures others, smallest domain first: NVLink
/// domains, Topograph's labels, those set by Google, Amazon and Oracle, and the zone.
/// (NVIDIA/topograph docs/k8s.md; cloud.google.com "view the physical topology of nodes"; AWS
/// "Amazon EC2 instance topology"; Oracle's "RDMA network locality" labels; kubernetes.io
/// well-known labels.)
const KNOWN: [&str; 13] = [
    "network.topology.nvidia.com/accelerator",
    "network.topology.nvidia.com/leaf",
    "network.topology.nvidia.com/spine",
    "network.topology.nvidia.com/core",
    "cloud.google.com/gce-topology-host",
    "cloud.google.com/gce-topology-subblock",
    "cloud.google.com/gce-topology-block",
    "topology.k8s.aws/network-node-layer-3",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-1",
    "oci.oraclecloud.com/rdma.local_block_id",
    "oci.oraclecloud.com/rdma.network_block_id",
    "topology.kubernetes.io/zone",
];

/// A topology level as the operator configures it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainLevel {
    /// Label whose value names the domain, or `cluster` for all nodes together.
    pub key: String,
    /// Thousandths of the injection bandwidth that can cross the domain boundary. `None`: the same
    /// as the level below.
    pub share: Option<u32>,
    /// NVLink joins its nodes.
    pub nvlink: bool,
}

impl fmt::Display for DomainLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)?;
        match self.share {
            _ if self.nvlink => f.write_str(":NVLink"),
            Some(share) => write!(f, ":{}", 1000.0 / f64::from(share)),
            None => Ok(()),
        }
    }
}

/// Why a level is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LevelError {
    /// Not a valid oversubscription factor.
    #[error(
        "`{got}`: expected KEY, KEY:NVLink, or KEY:FACTOR with an oversubscription from 1 to 1000, such as example.com/rack:2"
    )]
    Factor { got: String },
    /// The same level twice.
    #[error("`{0}` twice: expected each level once")]
    Twice(String),
    /// `cluster` is not the last level.
    #[error("`cluster` before `{0}`: expected it last, as it contains all other levels")]
    Order(String),
    /// A larger domain with less oversubscription than a smaller one.
    #[error(
        "`{key}`: oversubscription 1:{got} is less than that of the level below (1:{below}): a larger domain cannot carry more than the \
         smaller ones in it"
    )]
    Grows {
        key: String,
        got: String,
        /// Oversubscription of the level below.
        below: String,
    },
    #[error("{0} levels: expected at most {most}", most = MAX_LEVELS - 1)]
    TooMany(usize),
}

impl FromStr for DomainLevel {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<DomainLevel, LevelError> {
        let wrong = || LevelError::Factor { got: text.to_string() };
        let (key, share, nvlink) = match text.rsplit_once(':') {
            None => (text, None, false),
            Some((key, "NVLink")) => (key, None, true),
            Some((key, factor)) => {
                let factor: f64 = factor.parse().map_err(|_| wrong())?;
                if !(1.0..=1000.0).contains(&factor) {
                    return Err(wrong());
                }
                (key, Some(((1000.0 / factor).round() as u32).max(1)), false)
            }
        };
        if key.is_empty() || key.chars().any(|c| c.is_whitespace() || c == ':') {
            return Err(wrong());
        }
        Ok(DomainLevel { key: key.to_string(), share, nvlink })
    }
}

/// Levels of a cluster, smallest domain first. The last one is the whole cluster.
#[derive(Debug, Clone)]
pub struct Levels {
    list: Vec<(String, Level)>,
    trees: Trees,
}

impl Default for Levels {
    fn default() -> Levels {
        let level = |key: &str, nvlink: bool| (key.to_string(), Level { share: 1000, nvlink });
        let known = KNOWN.into_iter().map(|key| level(key, false));
        Levels::of([level(CLIQUE, true)].into_iter().chain(known).chain([level(CLUSTER, false)]).collect())
    }
}

impl Levels {
    fn of(list: Vec<(String, Level)>) -> Levels {
        Levels { list, trees: Trees::default() }
    }

    /// Only the cluster level.
    pub fn none() -> Levels {
        Levels::of(vec![(CLUSTER.to_string(), Level { share: 1000, nvlink: false })])
    }

    /// Builds levels from a list, smallest domain first. The cluster is always the last level,
    /// whether it is named or not.
    ///
    /// # Errors
    /// The levels contradict each other.
    pub fn new(levels: Vec<DomainLevel>) -> Result<Levels, LevelError> {
        let mut known: Vec<(String, Level)> = Vec::new();
        for DomainLevel { key, share, nvlink } in levels {
            if known.iter().any(|(other, _)| *other == key) {
                return Err(LevelError::Twice(key));
            }
            let below = known.last().map_or(1000, |(_, level)| level.share);
            let share = share.unwrap_or(below);
            if share > below {
                let factor = |share: u32| format!("{}", 1000.0 / f64::from(share));
                return Err(LevelError::Grows { key, got: factor(share), below: factor(below) });
            }
            if known.last().is_some_and(|(last, _)| last == CLUSTER) {
                return Err(LevelError::Order(key));
            }
            known.push((key, Level { share, nvlink }));
        }
        if known.last().is_none_or(|(last, _)| last != CLUSTER) {
            let share = known.last().map_or(1000, |(_, level)| level.share);
            known.push((CLUSTER.to_string(), Level { share, nvlink: false }));
        }
        if known.len() > MAX_LEVELS {
            return Err(LevelError::TooMany(known.len() - 1));
        }
        Ok(Levels::of(known))
    }

    /// Levels that occur among these nodes, smallest domain first, the cluster last.
    pub fn domains(&self, nodes: &[&NodeView]) -> Vec<LevelDomains> {
        let tree = self.tree(&TopologyPolicy::default(), nodes, true);
        let of = |level: usize| {
            (0..nodes.len()).map(|node| tree.domain(node, level).map(str::to_string)).collect::<Vec<_>>()
        };
        let levels = tree.keys.iter().zip(&tree.levels).enumerate();
        levels.map(|(number, (key, level))| LevelDomains { key: key.clone(), level: *level, of: of(number) }).collect()
    }

    /// Topology tree of these nodes. It is built once for all jobs that name the same domains, and
    /// rebuilt when a node's labels change. `has_channel`: the pods can access the memory of other
    /// nodes, so NVLink between nodes counts.
    pub(super) fn tree(&self, policy: &TopologyPolicy, nodes: &[&NodeView], has_channel: bool) -> Arc<Tree> {
        let mut cache = self.trees.0.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.nodes.len() != nodes.len() || !cache.nodes.iter().zip(nodes).all(|(read, node)| read.is_of(node)) {
            *cache = TreeCache { nodes: nodes.iter().map(|node| TreeInput::of(node)).collect(), trees: Vec::new() };
        }
        let is_same = |(domains, channel, _): &&(Vec<TopologyDomain>, bool, _)| {
            *channel == has_channel && *domains == policy.domains
        };
        if let Some((.., tree)) = cache.trees.iter().find(is_same) {
            return Arc::clone(tree);
        }
        let tree = Arc::new(Tree::of(&self.list, policy, nodes, has_channel));
        if cache.trees.len() == MAX_TREES {
            cache.trees.remove(0);
        }
        cache.trees.push((policy.domains.clone(), has_channel, Arc::clone(&tree)));
        tree
    }
}

/// Size of the tree cache. The jobs of a cluster name only a few different domains.
const MAX_TREES: usize = 16;

/// Cache of topology trees. Building one on every pass took three quarters of the controller's time
/// with 10,000 nodes. A tree depends only on its nodes.
#[derive(Default)]
struct Trees(Mutex<TreeCache>);

#[derive(Default)]
struct TreeCache {
    nodes: Vec<TreeInput>,
    trees: Vec<(Vec<TopologyDomain>, bool, Arc<Tree>)>,
}

/// Inputs that a tree takes from a node.
struct TreeInput {
    /// Held so that the allocation cannot be reused: labels are compared by address.
    labels: Arc<BTreeMap<String, String>>,
    clique: Option<String>,
}

impl TreeInput {
    fn of(node: &NodeView) -> TreeInput {
        TreeInput { labels: Arc::clone(&node.facts.labels), clique: clique(node).map(str::to_string) }
    }

    fn is_of(&self, node: &NodeView) -> bool {
        Arc::ptr_eq(&self.labels, &node.facts.labels) && self.clique.as_deref() == clique(node)
    }
}

/// The NVLink domain in a node's report.
fn clique(node: &NodeView) -> Option<&str> {
    node.described()?.clique.as_deref()
}

impl Clone for Trees {
    fn clone(&self) -> Trees {
        Trees::default()
    }
}

impl fmt::Debug for Trees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

/// A topology level and the nodes' domains in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LevelDomains {
    /// Label of the nodes, or `cluster`.
    pub key: String,
    /// Bandwidth across the level.
    pub level: Level,
    /// Domain of each node. `None` if the node lacks the label; always `None` for the cluster
    /// level.
    pub of: Vec<Option<String>>,
}

/// Topology tree of the nodes for one job.
#[derive(Debug)]
pub(super) struct Tree {
    /// Labels of the levels, smallest domain first, the cluster last.
    pub keys: Vec<String>,
    pub levels: Vec<Level>,
    /// Levels whose NVLink the job cannot use. They count as levels without NVLink.
    pub unused: Vec<usize>,
    /// For each node, its domain in each level except the last.
    pub domains: Vec<Arc<[Option<u32>]>>,
    /// Domain names of each level.
    names: Vec<Vec<String>>,
    /// The level whose domain must contain the whole job.
    pub within: Option<usize>,
}

impl Tree {
    /// Builds the tree from the operator's levels that occur on some node, and the levels that the
    /// job names.
    ///
    /// The job's own levels are ordered by their number of domains: more domains mean smaller
    /// domains. They inherit the bandwidth of the level below.
    fn of(levels: &[(String, Level)], policy: &TopologyPolicy, nodes: &[&NodeView], has_channel: bool) -> Tree {
        let requested_domain = |key: &str| policy.domains.iter().find(|domain| domain.key == key);
        let mut found: Vec<(String, Level, Domains)> = Vec::new();
        let (cluster, known) = levels.split_last().expect("invariant: the cluster is always a level");
        for (key, level) in known {
            let domains = Domains::of(key, nodes);
            if !domains.names.is_empty() || requested_domain(key).is_some() {
                found.push((key.clone(), *level, domains));
            }
        }
        for domain in policy.domains.iter().filter(|domain| !known.iter().any(|(key, _)| *key == domain.key)) {
            let domains = Domains::of(&domain.key, nodes);
            let index = found.iter().position(|(.., other)| other.names.len() < domains.names.len());
            let index = index.unwrap_or(found.len());
            let share = index.checked_sub(1).map_or(1000, |below| found[below].1.share);
            found.insert(index, (domain.key.clone(), Level { share, nvlink: false }, domains));
        }
        // If there are too many levels, drop those that the job does not name, the largest first.
        while found.len() >= MAX_LEVELS {
            let spare = found.iter().rposition(|(key, ..)| requested_domain(key).is_none()).unwrap_or(found.len() - 1);
            found.remove(spare);
        }
        let mut domains: Vec<Arc<[Option<u32>]>> = Vec::with_capacity(nodes.len());
        for node in 0..nodes.len() {
            let own_domains = found.iter().map(|(.., domains)| domains.of[node]);
            let shared = domains.last().filter(|before| own_domains.clone().eq(before.iter().copied())).cloned();
            domains.push(shared.unwrap_or_else(|| own_domains.collect()));
        }
        let is_required = |key: &str| requested_domain(key).is_some_and(|domain| domain.mode == DomainMode::Required);
        let levels: Vec<Level> = found.iter().map(|(_, level, _)| *level).chain([cluster.1]).collect();
        let usable = |level: &Level| Level { nvlink: level.nvlink && has_channel, ..*level };
        let is_unused = |number: &usize| levels[*number].nvlink && !has_channel;
        Tree {
            within: found.iter().position(|(key, ..)| is_required(key)),
            unused: (0..levels.len()).filter(is_unused).collect(),
            domains,
            keys: found.iter().map(|(key, ..)| key.clone()).chain([cluster.0.clone()]).collect(),
            levels: levels.iter().map(usable).collect(),
            names: found.into_iter().map(|(.., domains)| domains.names).collect(),
        }
    }

    /// Name of a node's domain, `None` if it has no label for this level.
    pub fn domain(&self, node: usize, level: usize) -> Option<&str> {
        let domain = (*self.domains[node].get(level)?)?;
        Some(&self.names[level][domain as usize])
    }
}

/// The domains of one level.
struct Domains {
    /// Domain of each node.
    of: Vec<Option<u32>>,
    names: Vec<String>,
}

impl Domains {
    fn of<'a>(key: &str, nodes: &[&'a NodeView]) -> Domains {
        let is_clique = key == CLIQUE;
        let value = |node: &&'a NodeView| {
            let reported = || clique(node).filter(|_| is_clique);
            node.facts.labels.get(key).map(String::as_str).or_else(reported).filter(|value| !value.is_empty())
        };
        let values: Vec<Option<&str>> = nodes.iter().map(value).collect();
        // Nodes with neighbouring names are mostly in the same domain.
        let runs = values.chunk_by(|a, b| a == b);
        let mut names: Vec<&str> = runs.clone().filter_map(|run| run[0]).collect();
        names.sort_unstable();
        names.dedup();
        let number = |value: &str| names.binary_search(&value).ok().map(|number| number as u32);
        let of = runs.flat_map(|run| std::iter::repeat_n(run[0].and_then(number), run.len())).collect();
        Domains { of, names: names.into_iter().map(str::to_string).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: every pass over a job read the same labels of all nodes again.
    #[test]
    fn a_tree_is_cached_until_a_node_label_changes() {
        let rack = "example.com/rack";
        let node = |number: usize| {
            let mut node = NodeView::default();
            node.facts.labels = Arc::new([(rack.to_string(), format!("r{}", number / 2))].into());
            node
        };
        let mut nodes: Vec<NodeView> = (0..4).map(node).collect();
        let levels = Levels::new(vec![rack.parse().unwrap()]).unwrap();
        let policy = TopologyPolicy::default();
        let tree = |nodes: &[NodeView], policy| levels.tree(policy, &nodes.iter().collect::<Vec<_>>(), false);
        let first = tree(&nodes, &policy);
        assert_eq!((first.domain(1, 0), first.domain(2, 0)), (Some("r0"), Some("r1")));
        // The cache also serves a copy of the nodes, and is still valid after a job that names
        // another domain.
        let domain = TopologyDomain { key: "example.com/pod".into(), ..TopologyDomain::default() };
        let other = TopologyPolicy { domains: vec![domain], ..TopologyPolicy::default() };
        assert_eq!(tree(&nodes, &other).keys.len(), 3);
        assert!(Arc::ptr_eq(&first, &tree(&nodes.clone(), &policy)));
        assert!(!Arc::ptr_eq(&first, &levels.tree(&policy, &nodes.iter().collect::<Vec<_>>(), true)), "with a channel");
        Arc::make_mut(&mut nodes[1].facts.labels).insert(rack.into(), "r9".into());
        assert_eq!(tree(&nodes, &policy).domain(1, 0), Some("r9"));
        assert_eq!(tree(&nodes[..1], &policy).domains.len(), 1, "a node is gone");
    }
}
