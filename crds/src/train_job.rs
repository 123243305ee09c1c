//! `TrainJob`: what a user asks for, and what became of it.
//!
//! Every field here works today; a field appears together with the feature behind it.

use crate::train_job_status::TrainJobStatus;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A decimal number written as a string, such as "0.001" or "1e-8": the API has no floats, since they do not survive a round
/// trip through every client.
const DECIMAL: &str = r"^[0-9]{1,12}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?$";

/// What to train and how. Immutable after creation.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "training.switchyard.dev",
    version = "v1alpha1",
    kind = "TrainJob",
    plural = "trainjobs",
    singular = "trainjob",
    shortname = "tj",
    category = "switchyard",
    namespaced,
    cel,
    status = "TrainJobStatus",
    derive = "PartialEq",
    doc = "A distributed training job: one group of processes that starts, trains and ends together.",
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must have at most 50 characters and be lower-case letters, digits and '-', starting with a letter and not ending with '-': names of pods and Services are derived from it"),
    printcolumn(name = "Stage", type_ = "string", json_path = ".status.conditions[?(@.type==\"Succeeded\")].reason", description = "Stage of the job"),
    printcolumn(name = "Attempt", type_ = "integer", json_path = ".status.attempt", description = "Attempt number, from 1"),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts.application", description = "Restarts after failures of the application"),
    printcolumn(name = "Progress", type_ = "integer", json_path = ".status.trainerStatus.progressPercentage", description = "Percent of the steps done"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Loss", type_ = "string", json_path = ".status.trainerStatus.loss", priority = 1, description = "Training loss, nats per token"),
    printcolumn(name = "ETA", type_ = "integer", json_path = ".status.trainerStatus.estimatedRemainingSeconds", priority = 1, description = "Estimated remaining seconds")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("spec is immutable: delete the TrainJob and create it again with the new values"))]
pub struct TrainJobSpec {
    /// Processes, their resources and environment. Default: one node with one process.
    #[serde(default)]
    pub trainer: Trainer,

    /// How strictly the structure of the nodes is respected when processes are placed.
    #[serde(default)]
    pub topology_policy: TopologyPolicy,

    /// What happens when a process fails. Default: the job fails with it.
    #[serde(default)]
    pub failure_policy: FailurePolicy,

    /// The training itself, done by Switchyard's own engine.
    pub engine: Engine,
}

/// Processes, their resources and environment.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trainer {
    /// Nodes (one pod each). Default 1. `switchyard run` has one machine: with `topologyPolicy.mode: Preferred` it starts
    /// the processes of all nodes there and says so, with `Required` it refuses.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub num_nodes: i32,

    /// Processes on each node. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub num_proc_per_node: i32,

    /// Compute threads of each process. Default: the physical cores that placement gives to the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub cpu_threads: Option<i32>,

    /// Resources of each node's pod. Default: the whole node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources_per_node: Option<ResourcesPerNode>,

    /// Environment of every process, added to what Switchyard sets. Names that begin with `SWITCHYARD_` are reserved, except
    /// the settings documented for users (`SWITCHYARD_TRANSPORT`, `SWITCHYARD_KERNEL`, …).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer { num_nodes: 1, num_proc_per_node: 1, cpu_threads: None, resources_per_node: None, env: Vec::new() }
    }
}

/// Resources of each node's pod.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourcesPerNode {
    /// Upper limits by resource name: `cpu` (cores) bounds the cores that processes of a node are placed on, `memory` (bytes)
    /// is compared with what the engine will allocate before anything starts. Other names are not supported yet: the engine
    /// of this version computes on CPUs.
    #[serde(default)]
    #[schemars(extend("maxProperties" = 16))]
    #[x_kube(validation = Rule::new("self.all(name, name in ['cpu', 'memory'])")
        .message("only cpu and memory are supported: the engine of this version computes on CPUs"))]
    pub limits: BTreeMap<String, Quantity>,
}

/// One environment variable.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    /// Name of the variable.
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^[A-Za-z_][A-Za-z0-9_]*$"))]
    #[x_kube(validation = Rule::new("!self.startsWith('SWITCHYARD_') || self in ['SWITCHYARD_TRANSPORT', 'SWITCHYARD_HOST_ID', 'SWITCHYARD_KERNEL', 'SWITCHYARD_PEER_TIMEOUT_SECONDS', 'SWITCHYARD_CONNECT_TIMEOUT_SECONDS', 'SWITCHYARD_FAULT']")
        .message("names that begin with SWITCHYARD_ are set by Switchyard: choose another name"))]
    pub name: String,

    /// Value of the variable. Default: empty.
    #[serde(default)]
    #[schemars(length(max = 32768))]
    pub value: String,
}

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
    /// NUMA nodes are not looked at.
    None,
}

/// How strictly the structure of the nodes is respected when processes are placed.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyPolicy {
    /// `Required`: enough nodes and cores of its own for every process, or the job is not placeable. `Preferred` (default):
    /// oversubscription is allowed with a warning. `Ignored`: processes are not pinned to cores.
    #[serde(default)]
    pub mode: TopologyMode,

    /// What is asked of the inside of a node.
    #[serde(default)]
    pub node_topology: NodeTopology,
}

/// What is asked of the inside of a node.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTopology {
    /// Whether a process may use cores of several NUMA nodes. Default `Preferred`.
    #[serde(default)]
    pub numa_binding: NumaBinding,
}

/// What happens when a process fails.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailurePolicy {
    /// How many times the whole group is started again after a failure. Default 0. Wrong data or a wrong manifest are not
    /// restarted: they would fail the same way.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub max_restarts: i32,
}

/// The training itself.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.steps) != has(self.epochs)")
    .message("set exactly one of steps and epochs"))]
#[x_kube(validation = Rule::new("!has(self.steps) || !has(self.schedule) || self.schedule.warmupSteps <= self.steps")
    .message("schedule.warmupSteps must not be greater than steps").field_path(".schedule.warmupSteps"))]
pub struct Engine {
    /// The network.
    pub model: Model,

    /// Where the samples come from.
    pub data: Data,

    /// Sequences per process and micro-batch. The global batch of one optimizer step has
    /// numNodes * numProcPerNode * batchSizePerProcess * batchMerge sequences. Default 8.
    #[serde(default = "eight")]
    #[schemars(range(min = 1, max = 65536))]
    pub batch_size_per_process: i32,

    /// Micro-batches whose gradients are accumulated before one reduction and one optimizer step. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 4096))]
    pub batch_merge: i32,

    /// Optimizer steps. Exactly one of `steps` and `epochs` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub steps: Option<i64>,

    /// Passes over the training data. Exactly one of `steps` and `epochs` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub epochs: Option<i64>,

    /// Seed of the initial weights and of the order of samples. Default 1. The same seed gives the same run.
    #[serde(default = "one_i64")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub seed: i64,

    /// The optimizer. Default AdamW.
    #[serde(default)]
    pub optimizer: Optimizer,

    /// Learning rate over the steps. Default: cosine to a tenth of the peak after a warm-up of 10 % of the steps, at most 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,

    /// Overlap of communication with the backward pass. Default: enabled.
    #[serde(default)]
    pub overlap: Overlap,

    /// Validation during training.
    #[serde(default)]
    pub evaluation: Evaluation,

    /// Steps between two progress reports of a rank. Default 10.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub fetch_every_steps: i32,
}

/// Kind of network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum ModelType {
    /// Decoder-only transformer.
    GPT,
}

/// The network: `type` and the block of that name.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type == 'GPT' ? has(self.gpt) : !has(self.gpt)")
    .message("the block named by type must be set, and no other: type GPT needs gpt"))]
pub struct Model {
    /// Kind of network.
    #[serde(rename = "type")]
    pub kind: ModelType,

    /// Shape of a GPT: pre-LN blocks, causal attention, GELU, learned positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpt: Option<Gpt>,
}

/// Vocabulary of a language model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Vocabulary {
    /// The 256 byte values.
    #[default]
    Bytes,
}

/// Output layer of a language model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Head {
    /// Shares its weights with the token embedding.
    #[default]
    Tied,
    /// Has weights of its own.
    Untied,
}

/// Shape of a GPT.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.hiddenSize % self.heads == 0")
    .message("heads must divide hiddenSize").field_path(".heads"))]
pub struct Gpt {
    /// Transformer blocks.
    #[schemars(range(min = 1, max = 256))]
    pub layers: i32,

    /// Width of the residual stream; a multiple of `heads`.
    #[schemars(range(min = 1, max = 32768))]
    pub hidden_size: i32,

    /// Attention heads.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: i32,

    /// Tokens per sequence.
    #[schemars(range(min = 1, max = 131_072))]
    pub context_length: i32,

    /// Vocabulary. Default `Bytes`.
    #[serde(default)]
    pub vocabulary: Vocabulary,

    /// Output layer. Default `Tied`.
    #[serde(default)]
    pub head: Head,
}

/// Format of the training data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum DataFormat {
    /// Text files, read as bytes.
    #[default]
    Text,
}

/// Where the samples come from.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("double(self.validationFraction) <= 0.5")
    .message("validationFraction must be between 0 and 0.5").field_path(".validationFraction"))]
pub struct Data {
    /// Format of the data. Default `Text`: the bytes of text files.
    #[serde(default)]
    pub format: DataFormat,

    /// A file or a directory. In `switchyard run` relative paths start at the current directory; in a cluster it is a path in
    /// the container. In a directory hidden entries and directories marked by a CACHEDIR.TAG (build output) are left out.
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,

    /// Glob patterns relative to `path`, such as `**/*.rs`; a file of a directory is read when one of them matches.
    /// Default: every file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub include: Vec<String>,

    /// Glob patterns relative to `path`; a file that one of them matches is left out. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub exclude: Vec<String>,

    /// Share of the text that is kept for validation, a decimal string between "0" and "0.5"; chosen by the hash of the
    /// content. Default "0.1".
    #[serde(default = "tenth")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub validation_fraction: String,
}

/// Kind of optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OptimizerType {
    /// Adam with decoupled weight decay.
    #[default]
    AdamW,
}

/// The optimizer. All numbers are decimal strings.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("double(self.learningRate) > 0.0").message("learningRate must be greater than 0").field_path(".learningRate"))]
#[x_kube(validation = Rule::new("double(self.beta1) < 1.0").message("beta1 must be less than 1").field_path(".beta1"))]
#[x_kube(validation = Rule::new("double(self.beta2) < 1.0").message("beta2 must be less than 1").field_path(".beta2"))]
#[x_kube(validation = Rule::new("double(self.epsilon) > 0.0").message("epsilon must be greater than 0").field_path(".epsilon"))]
pub struct Optimizer {
    /// Kind of optimizer. Default `AdamW`.
    #[serde(default, rename = "type")]
    pub kind: OptimizerType,

    /// Peak learning rate, a decimal string. Default "0.001".
    #[serde(default = "thousandth")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub learning_rate: String,

    /// Decay of the first moment, a decimal string. Default "0.9".
    #[serde(default = "beta1")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub beta1: String,

    /// Decay of the second moment, a decimal string. Default "0.95".
    #[serde(default = "beta2")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub beta2: String,

    /// Added to the root of the second moment, a decimal string. Default "1e-8".
    #[serde(default = "epsilon")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub epsilon: String,

    /// Decoupled weight decay, a decimal string; not applied to biases and layer norms. Default "0.1".
    #[serde(default = "tenth")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub weight_decay: String,

    /// Largest global norm of the gradient, a decimal string; a larger gradient is scaled down to it. "0" switches clipping
    /// off. Default "1.0".
    #[serde(default = "unity")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub gradient_clip_norm: String,
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer {
            kind: OptimizerType::AdamW,
            learning_rate: thousandth(),
            beta1: beta1(),
            beta2: beta2(),
            epsilon: epsilon(),
            weight_decay: tenth(),
            gradient_clip_norm: unity(),
        }
    }
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ScheduleType {
    /// Stays at the peak.
    Constant,
    /// Half a cosine down to `finalLearningRate`.
    #[default]
    Cosine,
}

/// Learning rate over the steps.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    /// Shape after the warm-up. Default `Cosine`.
    #[serde(default, rename = "type")]
    pub kind: ScheduleType,

    /// Steps of linear growth from 0 to the peak. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: i64,

    /// Learning rate at the last step of `Cosine`, a decimal string. Default "0".
    #[serde(default = "zero")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub final_learning_rate: String,
}

/// A switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Switch {
    /// On.
    #[default]
    Enabled,
    /// Off.
    Disabled,
}

/// Overlap of communication with the backward pass.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Overlap {
    /// `Enabled` (default): the all-reduce of a bucket starts as soon as its last gradient is final. `Disabled`: all start after
    /// the backward pass. Both give the same numbers.
    #[serde(default)]
    pub mode: Switch,

    /// Largest size of a fused gradient bucket, MiB. Default 25.
    #[serde(default = "twenty_five", rename = "bucketSizeMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_size_mib: i32,
}

impl Default for Overlap {
    fn default() -> Self {
        Overlap { mode: Switch::Enabled, bucket_size_mib: 25 }
    }
}

/// Validation during training.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evaluation {
    /// Steps between two evaluations; 0: only at the end. Default 100.
    #[serde(default = "hundred")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub every_steps: i64,

    /// Batches of `batchSizePerProcess` sequences per process in one evaluation. Default 20.
    #[serde(default = "twenty")]
    #[schemars(range(min = 1, max = 100_000))]
    pub batches: i32,
}

impl Default for Evaluation {
    fn default() -> Self {
        Evaluation { every_steps: 100, batches: 20 }
    }
}

fn one() -> i32 {
    1
}
fn one_i64() -> i64 {
    1
}
fn eight() -> i32 {
    8
}
fn ten() -> i32 {
    10
}
fn twenty() -> i32 {
    20
}
fn twenty_five() -> i32 {
    25
}
fn hundred() -> i64 {
    100
}
fn zero() -> String {
    "0".into()
}
fn tenth() -> String {
    "0.1".into()
}
fn thousandth() -> String {
    "0.001".into()
}
fn unity() -> String {
    "1.0".into()
}
fn beta1() -> String {
    "0.9".into()
}
fn beta2() -> String {
    "0.95".into()
}
fn epsilon() -> String {
    "1e-8".into()
}
