//! `PlacementSlice`: a part of the place of a job that has too many nodes for its status. Written by the controller only.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// Most nodes in one slice.
pub const MAX_SLICE_NODES: i32 = 256;

/// Nodes of one job, in the order of their ranks. A slice never changes: another place has other slices.
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
    doc = "A part of the place of a TrainJob that has too many nodes for its status. Owned by the job, and written by the controller only.",
    printcolumn = r#"{"name":"Job","type":"string","jsonPath":".metadata.labels.training\\.switchyard\\.dev/job-name"}"#,
    printcolumn = r#"{"name":"Attempt","type":"integer","jsonPath":".spec.attempt"}"#,
    printcolumn = r#"{"name":"First node","type":"integer","jsonPath":".spec.firstNode"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("a PlacementSlice does not change: another place has other slices"))]
pub struct PlacementSliceSpec {
    /// The attempt that got this place.
    #[schemars(range(min = 1))]
    pub attempt: i32,

    /// Node rank of the first entry of `nodes`.
    #[schemars(range(min = 0))]
    pub first_node: i32,

    /// What several nodes have in common, once each.
    #[schemars(length(max = MAX_SLICE_NODES))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub shapes: Vec<NodeShape>,

    /// One entry per node.
    #[schemars(length(max = MAX_SLICE_NODES))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub nodes: Vec<SlicedNode>,
}

/// Cores and NICs of the processes of a node, alike on machines of one make.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeShape {
    /// CPU list of each process in rank order, as the kernel writes it (`0-3,8`); empty: not pinned.
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

    /// Position of its shape in `shapes`.
    #[schemars(range(min = 0))]
    pub shape: i32,

    /// UUIDs of the GPUs, in the order of local ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 96)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub gpus: Vec<String>,
}

/// Where the nodes of a place stand that are not in the status.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicesStatus {
    /// What the names of the PlacementSlices begin with; `-0`, `-1` and so on follow. It contains the attempt and a digest of the place.
    #[schemars(length(max = 253))]
    pub name_prefix: String,

    /// How many slices there are.
    #[schemars(range(min = 1))]
    pub count: i32,

    /// How many nodes they hold.
    #[schemars(range(min = 1))]
    pub nodes: i32,
}
