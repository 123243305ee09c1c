//! Nodes, NUMA nodes and cores.

/// Candidate nodes for processes, addressed by position.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Cluster {
    /// The nodes, in a stable order.
    pub nodes: Vec<Node>,
}

/// Position of a node in [`Cluster::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeOrd(pub u32);

/// One machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Node {
    /// NUMA nodes with usable cores, by ascending id. A machine without NUMA information has one,
    /// with id 0.
    pub numa_nodes: Vec<NumaNode>,
    /// CPU quota of the container, in thousandths of a core; `None` if unlimited.
    pub quota_millicores: Option<u64>,
    /// Memory in bytes; `None` if unknown.
    pub memory_bytes: Option<u64>,
}

impl Node {
    /// Number of usable physical cores in all NUMA nodes.
    pub fn cores(&self) -> usize {
        self.numa_nodes.iter().map(|numa| numa.cores.len()).sum()
    }
}

/// Cores that share a memory controller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct NumaNode {
    /// Kernel number of the NUMA node.
    pub id: u32,
    /// Usable physical cores, by ascending first CPU.
    pub cores: Vec<Core>,
    /// Distance to each NUMA node of this machine, in the order of [`Node::numa_nodes`]; 10 is
    /// local (ACPI SLIT). Empty if unknown.
    pub distances: Vec<u32>,
}

/// A physical core: the usable logical CPUs (SMT siblings) on it, ascending.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Core {
    /// Logical CPUs; never empty.
    pub cpus: Vec<u32>,
}
