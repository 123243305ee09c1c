//! Status of a `TrainJob`, written by the controller and by `switchyard run`.

use crate::fabric::FabricStatus;
use crate::placement_slice::{NodeShape, SlicesStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of the job, written by the controller.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrainJobStatus {
    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Start of the first attempt, or of the first one after the job was resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,

    /// When the job was first placed since `startTime`. `spec.activeDeadlineSeconds` counts from
    /// here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_time: Option<Time>,

    /// `spec.activeDeadlineSeconds` when the gang was placed. The queue relies on it: if the limit
    /// is raised later, the job runs on, but once this time has passed it yields to the head of the
    /// queue. Absent if it had no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub placed_limit_seconds: Option<i64>,

    /// Seconds for which earlier attempts were placed. The queue policy `LeastAttainedService`
    /// orders jobs by the time that they have run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ran_seconds: Option<i64>,

    /// End of the job, successful or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,

    /// Number of the current or last attempt, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub attempt: Option<i32>,

    /// When the current attempt started, or will start: failed attempts back off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt_time: Option<Time>,

    /// Ready nodes out of those desired, such as `3/4`: the READY column.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub ready: Option<String>,

    /// Nodes (pods) of the current attempt by state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeCounts>,

    /// Pods of the current attempt by role. Empty in a job without roles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub roles: Vec<RoleCounts>,

    /// Conditions. `Succeeded` is the summary: its reason is the stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// Restarts so far, by the class of their cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<Restarts>,

    /// Nodes that failed the job within the last day, newest last. The job's next attempts avoid
    /// them for a while; after failures of several jobs, all jobs do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["nodeName".into()]))]
    pub node_failures: Vec<NodeFailure>,

    /// Where the processes run, and why. After a failure, the last placement until the next one is
    /// decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementStatus>,

    /// How the pods of the current attempt get their GPUs. Absent if they request none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_allocation: Option<DeviceAllocation>,

    /// How the processes reach each other: every setting, and its reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricStatus>,

    /// Figures of the training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trainer_status: Option<TrainerStatus>,
}

impl TrainJobStatus {
    /// Returns a condition by type.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == kind)
    }

    /// Whether the condition of this type is true.
    pub fn is(&self, kind: &str) -> bool {
        self.condition(kind).is_some_and(|condition| condition.status == "True")
    }
}

/// Nodes (pods) of the current attempt by state.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCounts {
    /// Nodes that the job requests.
    #[schemars(range(min = 0))]
    pub desired: i32,

    /// Nodes whose pod is ready.
    #[schemars(range(min = 0))]
    pub ready: i32,

    /// Nodes whose pod exists and has not ended.
    #[schemars(range(min = 0))]
    pub active: i32,

    /// Nodes whose pod has succeeded.
    #[schemars(range(min = 0))]
    pub succeeded: i32,

    /// Nodes whose pod has failed.
    #[schemars(range(min = 0))]
    pub failed: i32,
}

/// Pods of a role by state.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleCounts {
    /// Name of the role.
    #[schemars(length(max = 20))]
    pub name: String,

    /// Its pods.
    #[serde(flatten)]
    pub counts: NodeCounts,
}

/// Restarts so far, by the class of their cause.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Restarts {
    /// After a process failed by itself.
    #[schemars(range(min = 0))]
    pub application: i32,

    /// After a node was lost, or a pod was evicted, deleted or killed for memory, or its image
    /// could not be pulled.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub infrastructure: i32,

    /// After a pod was preempted by one of higher priority, or the job left a cordoned node.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub preemption: i32,

    /// Of all classes, including restarts that a rule does not charge.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub total: i32,

    /// Restarts of the last 24 hours, by hour. They count against the budgets of the classes
    /// infrastructure and preemption.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 26))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub recent: Vec<RecentRestarts>,
}

/// Restarts within an hour.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecentRestarts {
    /// Time of the first one.
    pub since: Time,

    /// Of the class infrastructure.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub infrastructure: i32,

    /// Of the class preemption.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub preemption: i32,
}

/// A node that failed the job.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeFailure {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node_name: String,

    /// What happened, as a single word: `NodeLost`, `NodeOutOfService`, `NodeGone`, `NotStarted`,
    /// `Unschedulable`, or the kubelet's reason, such as `UnexpectedAdmissionError`.
    #[schemars(length(max = 64))]
    pub reason: String,

    /// Message of the kubelet or the scheduler.
    #[schemars(length(max = 256))]
    pub message: String,

    /// Number of failures, each within an hour of the one before. The pause before the node is used
    /// again grows with it.
    #[schemars(range(min = 1))]
    pub count: i32,

    /// Time of the last failure.
    pub last_time: Time,
}

/// Where the processes run, and why.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementStatus {
    /// Why this placement, in one sentence.
    #[schemars(length(max = 1024))]
    pub reason: String,

    /// One entry per node. Empty if `slices` lists the nodes.
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["firstRank".into()]))]
    pub nodes: Vec<PlacedNode>,

    /// The PlacementSlices that list the nodes of a large job: more than 128.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<SlicesStatus>,

    /// Predicted bandwidth of the job's ring from the nodes' reports, in bytes per second one-way,
    /// such as `192G`. Absent for a single process, or if nothing is known about the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_bus_bandwidth: Option<Quantity>,

    /// Bandwidth that the job could have if all nodes available to it were free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_possible: Option<Quantity>,

    /// What limits the predicted bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<Limit>,
}

impl PlacementStatus {
    /// Number of nodes of the job, wherever they are listed.
    pub fn node_count(&self) -> usize {
        self.slices.as_ref().map_or(self.nodes.len(), |slices| slices.nodes.unsigned_abs() as usize)
    }
}

/// What limits the bandwidth of a job's ring.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// The links between the GPUs of a node.
    Ring,
    /// The NICs of a node.
    NICs,
    /// The bandwidth between the domains of the job.
    Domain,
    /// The NVLink domain.
    NVLinkDomain,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// How pods get their GPUs.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceAllocation {
    /// Through a ResourceClaim per pod that names the GPUs.
    Claims,
    /// As an extended resource: the kubelet's device plugin chooses. Whole nodes are exact
    /// nevertheless.
    DevicePlugin,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// The part of the job on one node.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacedNode {
    /// Lowest global rank on the node.
    #[schemars(range(min = 0))]
    pub first_rank: i32,

    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node_name: String,

    /// UUIDs of the GPUs in local rank order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 96)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub gpus: Vec<String>,

    /// Its cores and NICs.
    #[serde(flatten)]
    pub shape: NodeShape,
}

/// Training metrics from rank 0's last report.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrainerStatus {
    /// Optimizer steps done.
    #[schemars(range(min = 0))]
    pub step: i64,

    /// Total number of optimizer steps.
    #[schemars(range(min = 0))]
    pub total_steps: i64,

    /// Percentage of the steps done.
    #[schemars(range(min = 0, max = 100))]
    pub progress_percentage: i32,

    /// Mean training loss of the last interval, nats, a decimal string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub loss: Option<String>,

    /// Loss on the validation split at the last evaluation, nats, a decimal string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub validation_loss: Option<String>,

    /// Fraction of the validation split that was classified correctly at the last evaluation, a
    /// decimal string from 0 to 1. Absent if the model does not classify.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub validation_accuracy: Option<String>,

    /// Throughput of the whole job per second, a decimal string; `throughputUnit` is its unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub throughput: Option<String>,

    /// What `throughput` counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throughput_unit: Option<ThroughputUnit>,

    /// Steps skipped because of an overflow in 16 bits. Absent without mixed precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub skipped_steps: Option<i64>,

    /// Estimated seconds until the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub estimated_remaining_seconds: Option<i64>,

    /// Percentage of the step time that the slowest rank waited for reductions, a decimal string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub exposed_communication_percent: Option<String>,

    /// Percentage of the step time that the slowest rank waited for the reader, a decimal string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub input_wait_percent: Option<String>,

    /// The rank with the longest compute and input time, which the others wait for. Absent for a
    /// single rank, or if too little is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowest: Option<SlowestRank>,

    /// Time of the last report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated_time: Option<Time>,
}

/// The slowest rank over the last 100 steps or slightly more, or over all steps if there are fewer.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlowestRank {
    /// Rank among all ranks of the job.
    #[schemars(range(min = 0))]
    pub rank: i32,

    /// Its node, as a node rank from 0.
    #[schemars(range(min = 0))]
    pub node_rank: i32,

    /// Percentage by which its own step time, without waiting for others, exceeds the median of the
    /// other ranks, a decimal string.
    #[schemars(length(max = 32))]
    pub over_median_percent: String,
}

/// Unit of the throughput, per second.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ThroughputUnit {
    /// Tokens of language models.
    Tokens,
    /// Images of networks that classify them.
    Images,
    /// Samples of any other kind.
    Samples,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}
