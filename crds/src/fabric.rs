//! The fabric of a TrainJob: what is asked of it, and what was decided and found.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the processes of a job on GPUs reach each other.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.onFallback) || self.onFallback == 'Report' || (has(self.mode) && self.mode == 'Required')")
    .message("onFallback: Fail needs mode: Required; the other modes take TCP where nothing better is there"))]
pub struct FabricPolicy {
    /// `Auto` (default): settings are derived from the nodes, and RDMA is used if available. `Required`: data between nodes must
    /// not go over TCP: the transport is pinned, and a job that would fall back waits with the reason. `Disabled`: TCP on
    /// purpose.
    #[serde(default)]
    pub mode: FabricMode,

    /// What happens if the ranks report after their start that their data takes another transport than `mode: Required` demands.
    /// `Report` (default): `FabricReady` becomes `False`, with the nodes and what was observed. `Fail`: the job is stopped as
    /// well.
    #[serde(default)]
    pub on_fallback: FallbackAction,

    /// Checks of the chosen nodes before anything starts.
    #[serde(default)]
    pub preflight: PreflightPolicy,
}

/// What happens when data takes another transport than the job demands.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FallbackAction {
    /// `FabricReady` becomes `False`; the job goes on.
    #[default]
    Report,
    /// The job is stopped.
    Fail,
}

/// What may carry data between nodes.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricMode {
    /// RDMA if available, else TCP.
    #[default]
    Auto,
    /// TCP between nodes is not allowed.
    Required,
    /// TCP.
    Disabled,
}

/// Checks before anything starts.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.minBusBandwidth) || !has(self.mode) || self.mode != 'None'")
    .message("minBusBandwidth is a check: mode must be Report or Enforce").field_path(".minBusBandwidth"))]
pub struct PreflightPolicy {
    /// `Report` (default): findings are written to the status. `Enforce`: a finding that blocks keeps the job from starting.
    /// `None`: nothing is checked.
    #[serde(default)]
    pub mode: PreflightMode,

    /// Bandwidth that the ranks measure before the first step, bytes per second such as `40G`: what an all-reduce over all of
    /// them must achieve (bus bandwidth as NCCL's tests define it). If it is less, the status says so, or with `Enforce` the job
    /// fails. Only with `trainer.framework: Switchyard`, whose worker measures the path that the engine uses. Default: nothing is
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bus_bandwidth: Option<Quantity>,
}

/// What happens with findings of the preflight.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PreflightMode {
    /// Nothing is checked.
    None,
    /// Findings are written to the status.
    #[default]
    Report,
    /// Those that block keep the job from starting.
    Enforce,
}

/// How the processes of a job reach each other, and why so.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricStatus {
    /// What carries data between the nodes; for one node what carries it between its GPUs. Absent: nothing is known about the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,

    /// The forecast in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub summary: Option<String>,

    /// Whether NICs are predicted to reach the memory of all GPUs directly. Absent: no RDMA, or unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_direct: Option<GpuDirect>,

    /// What the ranks of this attempt reported after their start, compared with the forecast. Absent: not all have reported yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<FabricObservation>,

    /// The data pack or the administrator's profile that the settings come from. Absent: none fits the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub profile: Option<String>,

    /// What the ranks measured before the first step; with `preflight.minBusBandwidth` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<FabricMeasurement>,

    /// Resources that each pod requests to reach the fabric, in addition to what the job requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub resources: Vec<FabricResource>,

    /// Every setting that was considered: set, left alone, or the user's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub decisions: Vec<FabricDecision>,

    /// What the checks of the chosen nodes found, blocking findings first; checks that found nothing are only counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preflight: Option<PreflightStatus>,
}

/// What carries data.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// NVLink, inside a node or a domain of nodes.
    NVLink,
    /// PCIe peer to peer, inside a node.
    PCIe,
    /// Host memory, inside a node.
    SharedMemory,
    /// RDMA between nodes.
    RDMA,
    /// A network plugin of a cloud.
    Plugin,
    /// TCP.
    TCP,
    /// A value of a newer version.
    #[serde(other)]
    Unknown,
}

/// Whether NICs reach GPU memory directly (GPUDirect RDMA).
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuDirect {
    /// NICs reach the memory of every rank's GPU.
    Yes,
    /// Some rank goes through host memory.
    No,
    /// A value of a newer version.
    #[serde(other)]
    Unknown,
}

/// The forecast compared with what the ranks reported after their start.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricObservation {
    /// How the two compare.
    pub verdict: ObservedVerdict,
    /// What carries data between the nodes, or inside the one node, as the ranks report it. Absent: they do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// The forecast and what was observed where; or why it cannot be judged, and what would make that possible.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// What the ranks measured before the first step.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricMeasurement {
    /// Whether it is enough.
    pub verdict: MeasuredVerdict,
    /// Bus bandwidth of an all-reduce over all ranks, bytes per second.
    pub bus_bandwidth: Quantity,
    /// The figures, what was required and what was predicted; slow links by node, GPU, NIC and address.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// Whether the measured bandwidth is enough.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MeasuredVerdict {
    /// At least the bandwidth that was required.
    Passed,
    /// Less than the bandwidth that was required.
    Failed,
    /// A value of a newer version.
    #[serde(other)]
    Unknown,
}

/// How forecast and observation compare.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ObservedVerdict {
    /// As predicted, or better.
    AsForecast,
    /// The predicted transport, but through host memory somewhere.
    Slower,
    /// A lesser transport than predicted.
    OtherTransport,
    /// The ranks do not report it, or a newer version wrote another value.
    #[serde(other)]
    Unknown,
}

/// A resource that pods request.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricResource {
    /// Name of the resource.
    #[schemars(length(max = 317))]
    pub name: String,
    /// How much each pod requests.
    pub quantity: Quantity,
    /// Why the pods need it.
    #[schemars(length(max = 512))]
    pub reason: String,
}

/// One setting, and why it is as it is.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricDecision {
    /// The environment variable.
    #[schemars(length(max = 256))]
    pub name: String,
    /// Who decided.
    pub outcome: DecisionOutcome,
    /// The value, for `Set` and `User`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1023))]
    pub value: Option<String>,
    /// How much depends on it.
    pub class: DecisionClass,
    /// Why it is set, or left alone.
    #[schemars(length(max = 512))]
    pub reason: String,
    /// The fact behind the decision, and its source.
    #[schemars(length(max = 512))]
    pub evidence: String,
    /// Node ranks to which it applies, as a list such as `0-3,6`. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16384))]
    pub nodes: Option<String>,
    /// Releases of NCCL that read the variable, such as `2.21-` or `2.23-`. Absent: it is not NCCL's, or all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub releases: Option<String>,
    /// The vendor's documentation.
    #[schemars(length(max = 256))]
    pub link: String,
}

/// Who decided about a setting.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DecisionOutcome {
    /// Switchyard sets it.
    Set,
    /// The user's own value stays.
    User,
    /// Left alone on purpose.
    NotSet,
    /// A value of a newer version.
    #[serde(other)]
    Unknown,
}

/// How much depends on a setting.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DecisionClass {
    /// The job breaks, or falls back silently, without it.
    Must,
    /// It helps, and may stay.
    May,
    /// For finding faults only: it is never set without an administrator's word.
    Never,
    /// A value of a newer version.
    #[serde(other)]
    Unknown,
}

/// What the checks of the chosen nodes found.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightStatus {
    /// Checks that found nothing.
    #[schemars(range(min = 0))]
    pub passed: i32,
    /// Checks that do not apply to these nodes or this job.
    #[schemars(range(min = 0))]
    pub not_applicable: i32,
    /// What was found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub findings: Vec<PreflightFinding>,
    /// The checks that do not apply, with the reason, including those whose facts are not reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub skipped: Vec<PreflightSkip>,
}

/// A check that does not apply.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightSkip {
    /// Number of the check.
    #[schemars(range(min = 1))]
    pub check: i32,
    /// What is checked, in a few words.
    #[schemars(length(max = 64))]
    pub title: String,
    /// Why it does not apply, or which fact is missing, on which nodes.
    #[schemars(length(max = 512))]
    pub reason: String,
}

/// What one check found.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightFinding {
    /// Number of the check.
    #[schemars(range(min = 1))]
    pub check: i32,
    /// What is checked, in a few words.
    #[schemars(length(max = 64))]
    pub title: String,
    /// How bad it is.
    pub severity: PreflightSeverity,
    /// What is wrong, where.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// The consequence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    pub effect: String,
    /// The fact, and its source.
    #[schemars(length(max = 1024))]
    pub evidence: String,
    /// What to do.
    #[schemars(length(max = 1024))]
    pub fix: String,
}

/// How bad a finding is.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PreflightSeverity {
    /// The job would fail, or run over TCP without a word.
    Block,
    /// It runs, slower than it could or at a risk.
    Warn,
    /// A value of a newer version.
    #[serde(other)]
    Unknown,
}
