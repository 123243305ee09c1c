//! The fabric of a TrainJob: requirements, decisions and findings.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the processes of a job on GPUs reach each other.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.onFallback) || self.onFallback == 'Report' || (has(self.mode) && self.mode == 'Required')")
    .message("onFallback: Fail needs mode: Required; the other modes fall back to TCP"))]
pub struct FabricPolicy {
    /// `Auto` (default): settings are derived from the nodes, and RDMA is used if available.
    /// `Required`: data between nodes must not use TCP. The transport is pinned, and a job that
    /// would fall back waits with a reason. `Disabled`: always TCP.
    #[serde(default)]
    pub mode: FabricMode,

    /// Reaction if the ranks report after their start that their data uses a different transport
    /// than `mode: Required` demands. `Report` (default): `FabricReady` becomes `False`, with the
    /// nodes and the observation. `Fail`: the job is also stopped.
    #[serde(default)]
    pub on_fallback: FallbackAction,

    /// Checks of the chosen nodes before anything starts.
    #[serde(default)]
    pub preflight: PreflightPolicy,
}

/// Reaction if data uses a different transport than the job demands.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FallbackAction {
    /// `FabricReady` becomes `False`; the job continues.
    #[default]
    Report,
    /// The job is stopped.
    Fail,
}

/// Allowed transports between nodes.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricMode {
    /// RDMA if available, otherwise TCP.
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
    /// `Report` (default): findings are written to the status. `Enforce`: a blocking finding keeps
    /// the job from starting. `None`: the checks are skipped.
    #[serde(default)]
    pub mode: PreflightMode,

    /// Minimum bandwidth, in bytes per second such as `40G`, of an all-reduce over all ranks before
    /// the first step (bus bandwidth as NCCL's tests define it). If the measurement is lower, the
    /// status reports it, or with `Enforce` the job fails. Only with `trainer.framework:
    /// Switchyard`, whose worker measures the path that the engine uses. Default: no measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bus_bandwidth: Option<Quantity>,
}

/// Reaction to preflight findings.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PreflightMode {
    /// The checks are skipped.
    None,
    /// Findings are written to the status.
    #[default]
    Report,
    /// Blocking findings keep the job from starting.
    Enforce,
}

/// How the processes of a job reach each other, and why.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricStatus {
    /// Transport between the nodes; for a single node, between its GPUs. Absent if nothing is known
    /// about the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,

    /// The forecast in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub summary: Option<String>,

    /// Whether NICs are predicted to access the memory of all GPUs directly. Absent if there is no
    /// RDMA, or if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_direct: Option<GpuDirect>,

    /// What the ranks of this attempt reported after their start, compared with the forecast.
    /// Absent until all have reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<FabricObservation>,

    /// Built-in pack or administrator's profile that the settings come from. Absent if none matches
    /// the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub profile: Option<String>,

    /// Measurement by the ranks before the first step; only with `preflight.minBusBandwidth`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<FabricMeasurement>,

    /// Resources that each pod requests to reach the fabric, in addition to those of the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub resources: Vec<FabricResource>,

    /// Every setting that was considered: set, left alone, or the user's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub decisions: Vec<FabricDecision>,

    /// Result of the checks of the chosen nodes, blocking findings first. Checks without findings
    /// are only counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preflight: Option<PreflightStatus>,
}

/// Transport of the data.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// NVLink, inside a node or an NVLink domain of several nodes.
    NVLink,
    /// PCIe peer to peer, inside a node.
    PCIe,
    /// Host memory, inside a node.
    SharedMemory,
    /// RDMA between nodes.
    RDMA,
    /// A cloud's network plugin.
    Plugin,
    /// TCP.
    TCP,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// Whether NICs access GPU memory directly (GPUDirect RDMA).
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuDirect {
    /// NICs access the memory of every rank's GPU.
    Yes,
    /// Some rank uses host memory.
    No,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// The forecast compared with what the ranks reported after their start.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricObservation {
    /// Result of the comparison.
    pub verdict: ObservedVerdict,
    /// Transport between the nodes, or inside the single node, as the ranks report it. Absent if
    /// they do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// The forecast and the observation with its nodes; or why there is no verdict, and what would
    /// make one possible.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// Measurement by the ranks before the first step.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricMeasurement {
    /// Whether the bandwidth is sufficient.
    pub verdict: MeasuredVerdict,
    /// Bus bandwidth of an all-reduce over all ranks, bytes per second.
    pub bus_bandwidth: Quantity,
    /// The measured, required and predicted figures; slow links by node, GPU, NIC and address.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// Whether the measured bandwidth is sufficient.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MeasuredVerdict {
    /// At least the required bandwidth.
    Passed,
    /// Less than the required bandwidth.
    Failed,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// Result of comparing forecast and observation.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ObservedVerdict {
    /// As predicted, or better.
    AsForecast,
    /// The predicted transport, but through host memory somewhere.
    Slower,
    /// An inferior transport.
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
    /// Amount that each pod requests.
    pub quantity: Quantity,
    /// Why the pods need it.
    #[schemars(length(max = 512))]
    pub reason: String,
}

/// One setting, and the reason for it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricDecision {
    /// The environment variable.
    #[schemars(length(max = 256))]
    pub name: String,
    /// Origin of the decision.
    pub outcome: DecisionOutcome,
    /// The value, for `Set` and `User`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1023))]
    pub value: Option<String>,
    /// Importance of the setting.
    pub class: DecisionClass,
    /// Why it is set, or left alone.
    #[schemars(length(max = 512))]
    pub reason: String,
    /// The fact behind the decision, and its source.
    #[schemars(length(max = 512))]
    pub evidence: String,
    /// Node ranks to which it applies, as a list such as `0-3,6`. Absent for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16384))]
    pub nodes: Option<String>,
    /// NCCL releases that read the variable, such as `2.21-` or `2.23-`. Absent if it is not an
    /// NCCL variable, or if all releases read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub releases: Option<String>,
    /// The vendor's documentation.
    #[schemars(length(max = 256))]
    pub link: String,
}

/// Origin of a decision about a setting.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DecisionOutcome {
    /// Switchyard sets it.
    Set,
    /// The user's own value is kept.
    User,
    /// Deliberately left alone.
    NotSet,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// Importance of a setting.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DecisionClass {
    /// Without it, the job breaks or silently falls back.
    Must,
    /// Optional: it helps, and can stay.
    May,
    /// For debugging only: never set unless an administrator's profile does so.
    Never,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}

/// Result of the checks of the chosen nodes.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightStatus {
    /// Number of checks without findings.
    #[schemars(range(min = 0))]
    pub passed: i32,
    /// Number of checks that do not apply to these nodes or this job.
    #[schemars(range(min = 0))]
    pub not_applicable: i32,
    /// Findings of the checks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub findings: Vec<PreflightFinding>,
    /// Checks that do not apply, with the reason. Includes checks whose facts are not reported.
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
    /// Short title of the check.
    #[schemars(length(max = 64))]
    pub title: String,
    /// Why it does not apply, or which fact is missing on which nodes.
    #[schemars(length(max = 512))]
    pub reason: String,
}

/// A finding of one check.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightFinding {
    /// Number of the check.
    #[schemars(range(min = 1))]
    pub check: i32,
    /// Short title of the check.
    #[schemars(length(max = 64))]
    pub title: String,
    /// Severity of the finding.
    pub severity: PreflightSeverity,
    /// The problem and its location.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// The consequence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    pub effect: String,
    /// The fact, and its source.
    #[schemars(length(max = 1024))]
    pub evidence: String,
    /// How to fix it.
    #[schemars(length(max = 1024))]
    pub fix: String,
}

/// Severity of a finding.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PreflightSeverity {
    /// The job would fail, or silently use TCP.
    Block,
    /// The job runs, but slower than possible or at a risk.
    Warn,
    /// A value from a newer version.
    #[serde(other)]
    Unknown,
}
