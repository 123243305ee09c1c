//! A placement request and its result.

use crate::model::NodeOrd;

/// How strictly NUMA and core limits are enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// If a limit cannot be respected, the group is not placeable.
    Required,
    /// Take the best placement found, with warnings.
    Preferred,
    /// Count processes without pinning them.
    Ignored,
}

/// Whether the cores of a process must be in one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumaBinding {
    /// They must be.
    Required,
    /// They should be.
    Preferred,
    /// NUMA nodes are ignored.
    None,
}

/// A group of processes to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// Number of nodes; at least 1.
    pub nodes: u32,
    /// Processes on each node; at least 1.
    pub processes_per_node: u32,
    /// Compute threads of each process; `None` to use all available cores.
    pub threads: Option<u32>,
    /// Total cores that the processes of one node can use; `None` for all.
    pub core_limit: Option<u32>,
    /// How strictly this is enforced.
    pub mode: Mode,
    /// How strictly NUMA nodes are respected.
    pub numa_binding: NumaBinding,
}

/// Placement of one process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    pub node: NodeOrd,
    /// Logical CPUs that the process can use, ascending; empty if not pinned.
    pub cpus: Vec<u32>,
    /// Number of physical cores among them; 0 if not pinned.
    pub cores: u32,
    /// Kernel numbers of the NUMA nodes of those CPUs, ascending.
    pub numa_nodes: Vec<u32>,
    pub threads: u32,
}

/// A placement for every process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// In rank order.
    pub places: Vec<Place>,
    /// Preferences that could not be met, with numbers.
    pub warnings: Vec<Warning>,
}

/// A preference of the request that the nodes cannot meet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Warning {
    /// Several nodes of the group share a machine.
    #[error("{requested} nodes requested, {present} present: all processes run here")]
    NodesShared {
        requested: u32,
        /// Number of nodes present.
        present: u32,
    },
    /// More threads than cores.
    #[error("oversubscribed: {processes} processes with {threads} threads each want {} cores, {cores} can be used: expect at most {}% of the speed of one core per thread",
        processes * threads, 100 * cores / (processes * threads).max(1))]
    Oversubscribed {
        processes: u32,
        threads: u32,
        /// Number of usable cores.
        cores: u32,
    },
    /// A process uses several NUMA nodes.
    #[error("rank {rank} uses cores of NUMA nodes {numa_nodes:?}: {threads} cores do not fit into one of them")]
    SpansNuma {
        /// Rank of the process.
        rank: u32,
        /// Number of its threads.
        threads: u32,
        /// NUMA nodes that it uses.
        numa_nodes: Vec<u32>,
    },
}

/// Why a group is not placeable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Reason {
    /// Not enough nodes.
    #[error("needs {need} nodes, {have} present")]
    TooFewNodes {
        need: u32,
        /// Number of nodes present.
        have: u32,
    },
    /// Not enough cores on a node.
    #[error("needs {processes} processes x {threads} threads = {} cores on one node, {have} can be used", processes * threads)]
    TooFewCores {
        node: NodeOrd,
        /// Processes for the node.
        processes: u32,
        threads: u32,
        /// Number of usable cores.
        have: u32,
    },
    /// No NUMA node can take a process.
    #[error(
        "needs {threads} cores in one NUMA node for each of {processes} processes on one node, there is room for {have}"
    )]
    NoNumaNodeFits {
        node: NodeOrd,
        /// Processes for the node.
        processes: u32,
        threads: u32,
        /// Number of processes that fit.
        have: u32,
    },
}

impl Reason {
    /// The node that is too small, if the reason is about a single node.
    pub fn node(&self) -> Option<NodeOrd> {
        match self {
            Reason::TooFewNodes { .. } => None,
            Reason::TooFewCores { node, .. } | Reason::NoNumaNodeFits { node, .. } => Some(*node),
        }
    }

    /// Smallest change to the manifest that would make the group fit.
    pub fn remedy(&self) -> String {
        match self {
            Reason::TooFewNodes { have, .. } => {
                format!(
                    "trainer.numNodes: {have}, or topologyPolicy.mode: Preferred to run all processes on the nodes present"
                )
            }
            Reason::TooFewCores { processes, have, .. } if processes <= have => {
                format!("trainer.cpuThreads: {}, or topologyPolicy.mode: Preferred to share cores", have / processes)
            }
            Reason::TooFewCores { have, .. } => {
                format!("trainer.numProcPerNode: {have}, or topologyPolicy.mode: Preferred to share cores")
            }
            Reason::NoNumaNodeFits { have, .. } if *have > 0 => {
                format!(
                    "trainer.numProcPerNode: {have}, fewer trainer.cpuThreads, or topologyPolicy.nodeTopology.numaBinding: Preferred"
                )
            }
            Reason::NoNumaNodeFits { .. } => {
                "fewer trainer.cpuThreads, or topologyPolicy.nodeTopology.numaBinding: Preferred".to_string()
            }
        }
    }
}
