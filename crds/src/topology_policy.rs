//! Topology requirements of a TrainJob.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A label key: an optional DNS prefix, and a name.
const LABEL_KEY: &str = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// How strictly topology is respected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TopologyMode {
    /// A requirement that cannot be met makes the job unplaceable.
    Required,
    /// The best placement found is used, with a warning that states its cost.
    #[default]
    Preferred,
    /// Processes are not pinned.
    Ignored,
}

/// Whether a process can use cores of several NUMA nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NumaBinding {
    /// The cores of a process must be in one NUMA node, or the job is unplaceable.
    Required,
    /// In one NUMA node if possible.
    #[default]
    Preferred,
    /// NUMA nodes are ignored.
    None,
}

/// How strictly placement respects topology.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyPolicy {
    /// `Required`: enough nodes, and separate cores for every process, or the job is unplaceable.
    /// `Preferred` (default): oversubscription is allowed with a warning. `Ignored`: processes are
    /// not pinned to cores.
    #[serde(default)]
    pub mode: TopologyMode,

    /// Requirements inside a node.
    #[serde(default)]
    pub node_topology: NodeTopology,

    /// Domains of nodes that the job should stay inside, by the label that names them, small to
    /// large. Levels that the operator knows are always considered: the smallest domain with the
    /// highest bandwidth is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["key".into()]))]
    pub domains: Vec<TopologyDomain>,

    /// Whether jobs of lower priority can be stopped for this one. `LowerPriority`: as few as
    /// possible, and only if it fits afterwards. Default `Never`.
    #[serde(default)]
    pub preemption: Preemption,
}

/// A level of domains of nodes, such as racks.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyDomain {
    /// Label of the nodes; its value names the domain.
    #[schemars(length(min = 1, max = 317), regex(pattern = LABEL_KEY))]
    pub key: String,

    /// `Required`: one domain of this level contains all nodes of the job, or the job waits.
    /// `Preferred` (default): as few domains as possible.
    #[serde(default)]
    pub mode: DomainMode,
}

/// Requirements inside a node.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTopology {
    /// Whether a process can use cores of several NUMA nodes. Default `Preferred`.
    #[serde(default)]
    pub numa_binding: NumaBinding,

    /// The slowest link that the ring between the GPUs of a node can contain, best first: `NVLink`,
    /// `PCIeSwitch` (within PCIe switches), `PCIeHost` (across a host bridge), `NUMA` (within a
    /// NUMA node), `System` (default, any). With `mode: Preferred` the requirement is dropped, with
    /// a warning, if nothing better is available.
    #[serde(default)]
    pub min_link: MinLink,
}

/// How strictly a level of domains is enforced.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DomainMode {
    /// One domain contains the job, or it waits.
    Required,
    /// As few domains as possible.
    #[default]
    Preferred,
}

/// Whether jobs of lower priority can be stopped for this one.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preemption {
    /// The job waits until there is room.
    #[default]
    Never,
    /// The fewest jobs of lower priority that make room are stopped; they start again when there is
    /// room.
    LowerPriority,
}

/// The slowest link that a ring can contain.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinLink {
    /// NVLink.
    NVLink,
    /// Within PCIe switches.
    PCIeSwitch,
    /// Across a host bridge.
    PCIeHost,
    /// Within a NUMA node.
    NUMA,
    /// Any link.
    #[default]
    System,
}
