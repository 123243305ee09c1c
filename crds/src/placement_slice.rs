//! `PlacementSlice`: a part of the placement of a job with too many nodes for its status. Only the
//! controller writes it.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// Maximum number of nodes in one slice.
pub const MAX_SLICE_NODES: i32 = 256;

/// Nodes of one job in rank order. A slice is immutable; another placement has other slices.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[kube(
    group = "training.switchyard.dev",
    version = "v1alpha1",
    kind = "PlacementSlice",
    plural = "placementslices",
    singular = "placementslice",
    namespaced,
    category = "switchyard",
    derive = "PartialEq",
    doc = "A part of the placement of a TrainJob with too many nodes for its status. Owned by the job; only the controller writes it.",
    printcolumn = r#"{"name":"Job","type":"string","jsonPath":".metadata.labels.training\\.switchyard\\.dev/job-name"}"#,
    printcolumn = r#"{"name":"Attempt","type":"integer","jsonPath":".spec.attempt"}"#,
    printcolumn = r#"{"name":"First node","type":"integer","jsonPath":".spec.firstNode"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("a PlacementSlice is immutable: another placement has other slices"))]
pub struct PlacementSliceSpec {
    /// The attempt that has this placement.
    #[schemars(range(min = 1))]
    pub attempt: i32,

    /// Node rank of the first entry of `nodes`.
    #[schemars(range(min = 0))]
    pub first_node: i32,

    /// Distinct node shapes; `nodes` refers to them by index.
    #[schemars(length(max = MAX_SLICE_NODES))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub shapes: Vec<NodeShape>,

    /// One entry per node.
    #[schemars(length(max = MAX_SLICE_NODES))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub nodes: Vec<SlicedNode>,
}

/// Cores and NICs of the processes of a node. Machines of one model share a shape.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeShape {
    /// CPU list of each process in rank order, in the kernel's format (`0-3,8`); empty if not
    /// pinned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 1024)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub cpus: Vec<String>,

    /// Names of the NICs nearest to the GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 64)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub nics: Vec<String>,

    /// NUMA nodes in use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(range(min = 0)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub numa_nodes: Vec<i32>,
}

/// The part of the job on one node.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicedNode {
    /// Lowest global rank on the node.
    #[schemars(range(min = 0))]
    pub first_rank: i32,

    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node_name: String,

    /// Index of its shape in `shapes`.
    #[schemars(range(min = 0))]
    pub shape: i32,

    /// UUIDs of the GPUs in local rank order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 96)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub gpus: Vec<String>,
}

/// Where the nodes of a placement are listed if they are not in the status.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicesStatus {
    /// Name prefix of the PlacementSlices; `-0`, `-1` and so on follow. It contains the attempt and
    /// a digest of the placement.
    #[schemars(length(max = 253))]
    pub name_prefix: String,

    /// Number of slices.
    #[schemars(range(min = 1))]
    pub count: i32,

    /// Number of nodes in them.
    #[schemars(range(min = 1))]
    pub nodes: i32,
}
