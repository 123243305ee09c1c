//! Processors, caches and NUMA nodes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Processors and caches.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Cpus {
    /// Marketing name of the first processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub model: Option<String>,
    /// Vendor as the processor names it, for example `GenuineIntel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub vendor: Option<String>,
    /// Instruction set as `uname -m` prints it, for example `x86_64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub architecture: Option<String>,
    /// Processor packages with at least one online CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u32>,
    /// Cores with at least one online CPU, over all sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Online CPUs (hardware threads), over all sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// All online CPUs, as a CPU list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub online: Option<String>,
    /// CPUs that the agent itself can run on, as a CPU list: its affinity mask, which is that of
    /// its container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub usable: Option<String>,
    /// CPU time limit of the agent's control group, in thousandths of a CPU: the lowest limit up to
    /// the root. Absent if there is no limit or it is unreadable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_millicores: Option<u64>,
    /// The CPUs of each core, one CPU list per core, in ascending order of the first CPU. A core
    /// without simultaneous multithreading has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub siblings: Vec<String>,
    /// Caches by kind, nearest to the core first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub caches: Vec<Cache>,
}

/// All caches of one kind.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Cache {
    /// Distance from the core: 1, 2, 3 or 4.
    pub level: u32,
    /// Content of the cache.
    #[serde(rename = "type")]
    pub kind: CacheKind,
    /// Size of one cache, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The CPUs that share a cache, one CPU list per cache, in ascending order of the first CPU.
    #[schemars(length(max = 4096), inner(length(max = 8192)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub shared_by: Vec<String>,
}

/// Content of a cache.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKind {
    /// Data only.
    Data,
    /// Instructions only.
    Instruction,
    /// Both.
    Unified,
}

/// One NUMA node.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NumaNode {
    /// Kernel number of the node. Numbers can have gaps.
    pub id: u32,
    /// Its online CPUs, as a CPU list. Empty for a node with only memory; absent if unreadable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub cpus: Option<String>,
    /// Its memory, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Relative cost of memory access from this node to every node of `numaNodes`, itself included,
    /// in that order. 10 is local; 21 is 2.1 times as far. These are the firmware's figures, not
    /// measurements.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub distances: Vec<u32>,
}
