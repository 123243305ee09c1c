//! A placement request for a fleet and its result.

use super::ring::MinLink;
use crate::model::NodeOrd;

/// Maximum number of groups in a gang. Every set of groups is checked.
pub const MAX_GROUPS: usize = 6;

/// Equal pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    /// Number of pods, at least 1. Each gets its own node.
    pub pods: u32,
    /// GPUs of each pod; 0 for a process without GPUs.
    pub gpus: u8,
}

/// Pods that must stay together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slices {
    /// Level of the domains that take whole slices.
    pub level: usize,
    /// Pods per slice.
    pub pods: u32,
}

/// A gang to place.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// 1 to [`MAX_GROUPS`] groups of pods.
    pub groups: Vec<Group>,
    /// Worst acceptable link between the GPUs of a pod.
    pub min_link: MinLink,
    /// The whole gang must fit in one domain of this level.
    pub within: Option<usize>,
    /// Keeps slices whole within domains of a level. For gangs of one group only.
    pub slices: Option<Slices>,
}

/// A placement for every pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Pods in rank order: neighbours in the tree are neighbours in the ring.
    pub pods: Vec<Pod>,
    /// Bandwidth of the gang's ring, one-way, in MB/s; [`super::UNLIMITED`] for a single GPU.
    pub bandwidth: u32,
    /// Level of the smallest domain that contains the gang; `None` if it is on a single node.
    pub level: Option<usize>,
    /// Number of domains that the gang spans, per level.
    pub domains: Vec<u32>,
}

/// Placement of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub group: usize,
    pub node: NodeOrd,
    /// Its GPUs as a bit mask.
    pub set: u32,
    /// Its GPUs in local rank order, which is rail order.
    pub gpus: Vec<u8>,
    /// Ring capacity between its GPUs.
    pub ring: u32,
    /// Bandwidth from this pod to the other pods.
    pub outward: u32,
}

/// Why no placement exists, in node counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusal {
    /// Set if the request itself is invalid.
    pub invalid: Option<&'static str>,
    /// Number of nodes that cannot be used.
    pub closed: u32,
    /// For each group, the number of nodes with too few free GPUs, with free GPUs that are not
    /// joined well enough, and that fit.
    pub groups: Vec<[u32; 3]>,
    /// Within the level that must contain the gang: the highest number of fitting nodes in one
    /// domain, and a node of that domain.
    pub fullest: Option<(u32, NodeOrd)>,
}
