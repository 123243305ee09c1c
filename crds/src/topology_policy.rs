//! What a TrainJob asks of the structure of the machines.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A label's key: an optional DNS prefix, and a name.
const LABEL_KEY: &str = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// How strictly the structure of the nodes is respected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TopologyMode {
    /// What cannot be respected makes the job not placeable.
    Required,
    /// The best placement found is taken, with a warning that says what it costs.
    #[default]
    Preferred,
    /// Processes are not pinned.
    Ignored,
}

/// Whether a process may use cores of several NUMA nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NumaBinding {
    /// The cores of a process must lie in one NUMA node, or the job is not placeable.
    Required,
    /// In one NUMA node where possible.
    #[default]
    Preferred,
    /// NUMA nodes are ignored.
    None,
}

/// How strictly placement respects the structure of the nodes.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyPolicy {
    /// `Required`: enough nodes, and separate cores for every process, or the job is not placeable. `Preferred` (default):
    /// oversubscription is allowed with a warning. `Ignored`: processes are not pinned to cores.
    #[serde(default)]
    pub mode: TopologyMode,

    /// Requirements inside a node.
    #[serde(default)]
    pub node_topology: NodeTopology,

    /// Domains of nodes that the job should stay inside, by the label that names them, small to large. Levels that the operator
    /// knows are always considered: the smallest domain with the most bandwidth is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["key".into()]))]
    pub domains: Vec<TopologyDomain>,

    /// Whether jobs of lower priority may be stopped for this one. `LowerPriority`: as few as possible, and only if it fits
    /// afterwards. Default `Never`.
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

    /// `Required`: one domain of this level contains all nodes of the job, or the job waits. `Preferred` (default): as few as possible.
    #[serde(default)]
    pub mode: DomainMode,
}

/// Requirements inside a node.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTopology {
    /// Whether a process may use cores of several NUMA nodes. Default `Preferred`.
    #[serde(default)]
    pub numa_binding: NumaBinding,

    /// The slowest link that the ring between the GPUs of a node may contain, best first: `NVLink`, `PCIeSwitch` (inside PCIe
    /// switches), `PCIeHost` (over a host bridge), `NUMA` (inside a NUMA node), `System` (default, any). With `mode: Preferred`
    /// it is dropped, with a warning, if nothing else is available.
    #[serde(default)]
    pub min_link: MinLink,
}

/// How strictly a level of domains is meant.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DomainMode {
    /// One domain contains the job, or it waits.
    Required,
    /// As few domains as possible.
    #[default]
    Preferred,
}

/// Whether jobs of lower priority may be stopped for this one.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preemption {
    /// The job waits until there is room.
    #[default]
    Never,
    /// The fewest jobs of lower priority without which it fits are stopped; they start again when there is room.
    LowerPriority,
}

/// The slowest link that a ring may contain.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinLink {
    /// NVLink.
    NVLink,
    /// Inside PCIe switches.
    PCIeSwitch,
    /// Over a host bridge.
    PCIeHost,
    /// Inside a NUMA node.
    NUMA,
    /// Any.
    #[default]
    System,
}
