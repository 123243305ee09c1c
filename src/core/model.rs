//! Nodes, NUMA nodes and cores.

/// Nodes that may take processes, addressed by their position.
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
    /// NUMA nodes that have usable cores, by ascending id. A machine without NUMA information has one, with id 0.
    pub numa_nodes: Vec<NumaNode>,
    /// CPU time the container may use, in thousandths of a core; `None`: not limited.
    pub quota_millicores: Option<u64>,
    /// Memory, bytes; `None`: not known.
    pub memory_bytes: Option<u64>,
}

impl Node {
    /// Physical cores that may be used, of all NUMA nodes.
    pub fn cores(&self) -> usize {
        self.numa_nodes.iter().map(|numa| numa.cores.len()).sum()
    }
}

/// Cores that share a memory controller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct NumaNode {
    /// The kernel's number.
    pub id: u32,
    /// Usable physical cores, by ascending first CPU.
    pub cores: Vec<Core>,
    /// Distance to each NUMA node of this machine in the order of [`Node::numa_nodes`]; 10 is local (ACPI SLIT). Empty: not known.
    pub distances: Vec<u32>,
}

/// A physical core: the usable logical CPUs (SMT siblings) on it, ascending.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Core {
    /// Logical CPUs; never empty.
    pub cpus: Vec<u32>,
}
