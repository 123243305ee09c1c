//! The request, and its result.

use crate::model::NodeOrd;

/// How strictly the structure of the nodes is respected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// If it cannot be respected, the group is not placeable.
    Required,
    /// The best placement found is taken, with warnings.
    Preferred,
    /// Processes are counted, not pinned.
    Ignored,
}

/// Whether the cores of a process must lie in one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumaBinding {
    /// They must.
    Required,
    /// They should.
    Preferred,
    /// NUMA nodes are ignored.
    None,
}

/// A group of processes to be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// Nodes of the group; at least 1.
    pub nodes: u32,
    /// Processes on each node; at least 1.
    pub processes_per_node: u32,
    /// Compute threads of each process; `None`: as many as there are cores for it.
    pub threads: Option<u32>,
    /// Cores that the processes of one node may use together; `None`: all.
    pub core_limit: Option<u32>,
    /// How strictly this is enforced.
    pub mode: Mode,
    /// How strictly NUMA nodes are respected.
    pub numa_binding: NumaBinding,
}

/// Where one process runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    pub node: NodeOrd,
    /// Logical CPUs the process may use, ascending; empty: not pinned.
    pub cpus: Vec<u32>,
    /// Physical cores among them; 0: not pinned.
    pub cores: u32,
    /// Kernel numbers of the NUMA nodes of those CPUs, ascending.
    pub numa_nodes: Vec<u32>,
    pub threads: u32,
}

/// A place for every process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// In rank order.
    pub places: Vec<Place>,
    /// Preferences that were not met, with numbers.
    pub warnings: Vec<Warning>,
}

/// A preference of the request that the nodes cannot meet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Warning {
    /// Processes of several nodes share one.
    #[error("{asked} nodes were asked for and {present} present: the processes of all of them run here")]
    NodesShared {
        asked: u32,
        /// Nodes there are.
        present: u32,
    },
    /// More threads than cores.
    #[error("oversubscribed: {processes} processes with {threads} threads each want {} cores, {cores} can be used: expect at most {}% of the speed of one core per thread",
        processes * threads, 100 * cores / (processes * threads).max(1))]
    Oversubscribed {
        processes: u32,
        threads: u32,
        /// Cores that can be used.
        cores: u32,
    },
    /// A process uses several NUMA nodes.
    #[error("rank {rank} uses cores of NUMA nodes {numa_nodes:?}: {threads} cores do not fit into one of them")]
    SpansNuma {
        /// The process.
        rank: u32,
        /// Threads it has.
        threads: u32,
        /// NUMA nodes it uses.
        numa_nodes: Vec<u32>,
    },
}

/// Why there is no placement.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Reason {
    /// Not enough nodes.
    #[error("needs {need} nodes, {have} present")]
    TooFewNodes {
        need: u32,
        /// Nodes there are.
        have: u32,
    },
    /// Not enough cores on a node.
    #[error("needs {processes} processes x {threads} threads = {} cores on one node, {have} can be used", processes * threads)]
    TooFewCores {
        node: NodeOrd,
        /// Processes for it.
        processes: u32,
        threads: u32,
        /// Cores that can be used.
        have: u32,
    },
    /// No NUMA node can take a process.
    #[error(
        "needs {threads} cores in one NUMA node for each of {processes} processes on one node, there is room for {have}"
    )]
    NoNumaNodeFits {
        node: NodeOrd,
        /// Processes for it.
        processes: u32,
        threads: u32,
        /// Processes that fit.
        have: u32,
    },
}

impl Reason {
    /// The node that is too small, if it is a single one.
    pub fn node(&self) -> Option<NodeOrd> {
        match self {
            Reason::TooFewNodes { .. } => None,
            Reason::TooFewCores { node, .. } | Reason::NoNumaNodeFits { node, .. } => Some(*node),
        }
    }

    /// The smallest change of the manifest that would make it fit.
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
