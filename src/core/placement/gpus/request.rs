//! The request to a fleet, and its result.

use super::ring::MinLink;
use crate::model::NodeOrd;

/// Most groups of a gang: every set of groups is checked.
pub const MOST_GROUPS: usize = 6;

/// Equal pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    /// How many, at least 1, each on a node of its own.
    pub pods: u32,
    /// GPUs of each; 0: a process without GPUs.
    pub gpus: u8,
}

/// Pods that stay together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slices {
    /// Level of the domains that take whole slices.
    pub level: usize,
    /// Pods of a slice.
    pub pods: u32,
}

/// A gang to be placed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// Its pods: 1 to [`MOST_GROUPS`] groups.
    pub groups: Vec<Group>,
    /// The worst link between GPUs of a pod.
    pub min_link: MinLink,
    /// Level of the domains of which one must contain the gang.
    pub within: Option<usize>,
    /// Whole slices in domains of a level. For gangs of one group only.
    pub slices: Option<Slices>,
}

/// A place for every pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The pods in the order of their ranks: neighbours in the tree are neighbours in the ring.
    pub pods: Vec<Pod>,
    /// Bandwidth of the gang's ring, megabytes per second, one direction; [`super::UNLIMITED`] for a single GPU.
    pub bandwidth: u32,
    /// Level of the smallest domain with all of it; `None`: a single node.
    pub level: Option<usize>,
    /// Number of domains of each level that it is spread over.
    pub domains: Vec<u32>,
}

/// A place for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub group: usize,
    pub node: NodeOrd,
    /// Its GPUs as a mask.
    pub set: u32,
    /// Its GPUs in the order of local ranks, which is that of their rails.
    pub gpus: Vec<u8>,
    /// Ring capacity between them.
    pub ring: u32,
    /// What it can send to the other pods.
    pub outward: u32,
}

/// Why there is no place, in numbers of nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusal {
    /// The request itself is at fault.
    pub nonsense: Option<&'static str>,
    /// Nodes that may not be used.
    pub closed: u32,
    /// For each group: nodes with too few free GPUs, nodes whose free GPUs are not joined well enough, nodes that fit.
    pub groups: Vec<[u32; 3]>,
    /// Of the level that must contain the gang: the most nodes of one domain that fit, and a node of that domain.
    pub fullest: Option<(u32, NodeOrd)>,
}
