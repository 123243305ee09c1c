//! The training engine: the block `engine` of a TrainJob.

mod data;
mod model;
mod optimizer;
mod parallelism;
mod precision;
mod run;
mod sync;

pub use data::{
    Augmentation, Data, DataFormat, Header, ImageShape, Normalisation, NormalisationSource, PinnedMemory, Reader,
    SampleType, TokenType,
};
pub use model::{Activation, Bert, Custom, Gpt, Head, Mlp, Model, ModelType, ResNet, Stem, Vocabulary};
pub use optimizer::{DecayExclusions, Optimizer, OptimizerType, Schedule, ScheduleType};
pub use parallelism::Parallelism;
pub use precision::{ComputeType, LossScaling, LossScalingType, Matmul, Precision, PrecisionMode};
pub use run::{Evaluation, Memory, Overlap, Profile, Recomputation, WireType};
pub use sync::{
    Algorithm, Communication, CommunicationMode, Compression, CompressionType, OuterOptimizer, OuterOptimizerType,
    ParameterServers, ServerPlacement, Sharding, SyncPolicy, SyncType, Updates,
};

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A decimal number written as a string, such as "0.001" or "1e-8". The API has no floats, because
/// they do not survive a round trip through every client.
const DECIMAL: &str = r"^[0-9]{1,12}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?$";

/// Like [`DECIMAL`], of either sign.
const SIGNED_DECIMAL: &str = r"^-?[0-9]{1,12}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?$";

/// Configuration of Switchyard's own training engine.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.steps) != has(self.epochs)")
    .message("set exactly one of steps and epochs"))]
#[x_kube(validation = Rule::new("!has(self.steps) || !has(self.schedule) || self.schedule.warmupSteps <= self.steps")
    .message("schedule.warmupSteps must not be greater than steps").field_path(".schedule.warmupSteps"))]
#[x_kube(validation = Rule::new("!has(self.steps) || !has(self.profile) || self.profile.fromStep + self.profile.steps - 1 <= self.steps")
    .message("the profiled steps must lie within steps: profile.fromStep + profile.steps - 1 must not be greater").field_path(".profile.fromStep"))]
#[x_kube(validation = Rule::new("!(self.model.type in ['GPT', 'BERT']) \
    || (self.data.format in ['Text', 'Tokens', 'Synthetic'] && !has(self.data.image) && !has(self.data.classes))")
    .message("GPT and BERT take tokens: data.format must be Text, Tokens or Synthetic, without image and classes").field_path(".data.format"))]
#[x_kube(validation = Rule::new("self.model.type != 'ResNet' || self.data.format in ['ImageFolder', 'CIFAR10', 'IDX', 'SafeTensors'] \
    || (self.data.format in ['CSV', 'Synthetic'] && has(self.data.image))")
    .message("ResNet takes images: data.format must be ImageFolder, CIFAR10, IDX, SafeTensors, or CSV or Synthetic with data.image").field_path(".data.format"))]
#[x_kube(validation = Rule::new("self.model.type != 'MLP' || !(self.data.format in ['Text', 'Tokens'])")
    .message("MLP takes images or features: data.format must not be Text or Tokens").field_path(".data.format"))]
#[x_kube(validation = Rule::new("self.data.format != 'Text' || !((has(self.model.gpt) && self.model.gpt.vocabulary == 'GPT2') \
    || (has(self.model.bert) && self.model.bert.vocabulary == 'GPT2'))")
    .message("vocabulary GPT2 needs data.format Tokens or Synthetic: with Text the tokens are bytes").field_path(".data.format"))]
#[x_kube(validation = Rule::new("self.model.type != 'ResNet' || has(self.optimizer.type) \
    || (!has(self.optimizer.beta1) && !has(self.optimizer.beta2) && !has(self.optimizer.epsilon))")
    .message("beta1, beta2 and epsilon need optimizer.type with a ResNet, whose default is SGD").field_path(".optimizer.type"))]
#[x_kube(validation = Rule::new("double(self.labelSmoothing) < 1.0")
    .message("labelSmoothing must be less than 1").field_path(".labelSmoothing"))]
#[x_kube(validation = Rule::new("self.sync.type != 'Local' || self.overlap.wireType != 'FP16'")
    .message("with sync.type Local, overlap.wireType must be FP32 or BF16").field_path(".overlap.wireType"))]
#[x_kube(validation = Rule::new("self.sync.type != 'Local' || self.communication.compression.type == 'None'")
    .message("communication.compression needs sync.type EveryStep: with Local no gradients are sent").field_path(".communication.compression.type"))]
#[x_kube(validation = Rule::new("self.communication.compression.type == 'None' || self.overlap.wireType == 'FP32'")
    .message("with communication.compression, overlap.wireType must be FP32: positions cannot be rounded").field_path(".overlap.wireType"))]
#[x_kube(validation = Rule::new("self.sharding == 'None' || self.sync.type == 'EveryStep'")
    .message("sharding needs sync.type EveryStep: with Local each rank has its own optimizer state").field_path(".sharding"))]
#[x_kube(validation = Rule::new("self.sharding == 'None' || self.communication.compression.type == 'None'")
    .message("sharding needs communication.compression.type None: TopK sends no sums of parts").field_path(".sharding"))]
#[x_kube(validation = Rule::new("self.sharding == 'None' || self.communication.mode == 'Collective'")
    .message("sharding needs communication.mode Collective: parameter servers hold the optimizer's state").field_path(".sharding"))]
#[x_kube(validation = Rule::new("self.sync.type != 'Local' || self.communication.mode == 'Collective'")
    .message("sync.type Local needs communication.mode Collective: use parameterServer.updates Geo with servers").field_path(".sync.type"))]
#[x_kube(validation = Rule::new("!has(self.communication.parameterServer) || self.communication.parameterServer.updates == 'Synchronous' \
    || self.precision.mode == 'FP32' || ((!has(self.precision.computeType) || self.precision.computeType == 'BF16') && !has(self.precision.lossScaling))")
    .message("asynchronous parameter servers need precision FP32, or BF16 without lossScaling: ranks cannot skip a step together").field_path(".precision"))]
#[x_kube(validation = Rule::new("self.communication.mode == 'Collective' || self.overlap.wireType == 'FP32'")
    .message("with communication.mode ParameterServer, overlap.wireType must be FP32: servers take no rounded gradients yet").field_path(".overlap.wireType"))]
#[x_kube(validation = Rule::new("self.communication.algorithm != 'RecursiveDoubling' || self.overlap.wireType == 'FP32'")
    .message("with communication.algorithm RecursiveDoubling, overlap.wireType must be FP32: every rank rounds its own sum").field_path(".overlap.wireType"))]
#[x_kube(validation = Rule::new("self.parallelism.pipelineStages == 1 || self.sharding == 'None'")
    .message("parallelism.pipelineStages needs sharding None: a stage's optimizer state is whole on its ranks").field_path(".sharding"))]
#[x_kube(validation = Rule::new("self.parallelism.pipelineStages == 1 || self.sync.type == 'EveryStep'")
    .message("parallelism.pipelineStages needs sync.type EveryStep: all stages take the same steps").field_path(".sync.type"))]
#[x_kube(validation = Rule::new("self.parallelism.pipelineStages == 1 || (self.communication.mode == 'Collective' && self.communication.compression.type == 'None')")
    .message("parallelism.pipelineStages needs communication.mode Collective without compression: the ranks of a stage reduce all of its gradients").field_path(".communication"))]
#[x_kube(validation = Rule::new("self.sharding != 'Gradients' || self.batchMerge == 1")
    .message("sharding Gradients needs batchMerge 1: merged batches add up whole gradients").field_path(".sharding"))]
#[x_kube(validation = Rule::new("self.sharding != 'Gradients' || self.overlap.mode == 'Enabled'")
    .message("sharding Gradients needs overlap.mode Enabled: without it, all gradients wait for the end of the backward pass").field_path(".sharding"))]
#[x_kube(validation = Rule::new("self.recomputation == 'None' || self.model.type != 'MLP'")
    .message("recomputation needs a model with blocks: GPT, BERT, ResNet or Custom").field_path(".recomputation"))]
pub struct Engine {
    /// What the ranks compute on. `Auto` (default): `Cuda` if the trainer requests
    /// `nvidia.com/gpu`, otherwise `Cpu`. `Cpu`: the cores of the pod. `Cuda`: an NVIDIA GPU for
    /// each rank; the image, or the node, must have cuBLASLt and NVRTC. A job with operations that
    /// the GPU backend does not support yet is rejected before anything starts.
    #[serde(default)]
    pub device: Device,

    /// Whether GPUs run the operations of a micro-batch as one CUDA graph, which saves a driver
    /// call per kernel. `Enabled` (default). `Disabled` is for profilers that attribute kernels to
    /// the calls that launch them. Both give the same numbers.
    #[serde(default)]
    pub cuda_graphs: Switch,

    /// Whether repeating a run on GPUs gives bit-identical results. `Enabled` (default): only
    /// operations that sum in a fixed order are used; runs on CPUs are always deterministic.
    /// `Disabled`: cuDNN can also choose convolutions that sum in arbitrary order, so two runs can
    /// differ in the last bits.
    #[serde(default)]
    pub deterministic: Switch,

    /// How ranks run. `MultiProcess` (default): each rank is a separate process. `SingleProcess`:
    /// the ranks of a node are devices of one process, each with a share of its cores. Both give
    /// the same numbers.
    #[serde(default)]
    pub execution_mode: ExecutionMode,

    /// The network.
    pub model: Model,

    /// Probability mass of the target that is spread over all classes, a decimal string below 1.
    /// Default "0".
    #[serde(default = "zero")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub label_smoothing: String,

    /// Where the samples come from.
    pub data: Data,

    /// How the samples are read.
    #[serde(default)]
    pub reader: Reader,

    /// Samples per process and micro-batch. The global batch of one optimizer step has numNodes *
    /// numProcPerNode * batchSizePerProcess * batchMerge samples, divided by
    /// parallelism.pipelineStages. Default 8.
    #[serde(default = "eight")]
    #[schemars(range(min = 1, max = 65536))]
    pub batch_size_per_process: i32,

    /// Micro-batches whose gradients are accumulated before one all-reduce and one optimizer step.
    /// Default 1.
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

    /// Seed of the initial weights and of the sample order. Default 1. The same seed gives the same
    /// run.
    #[serde(default = "one_i64")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub seed: i64,

    /// The optimizer. Default: SGD with momentum for a ResNet, AdamW otherwise.
    #[serde(default)]
    pub optimizer: Optimizer,

    /// Learning rate schedule. Default: cosine decay to a tenth of the peak after a warm-up of 10 %
    /// of the steps, at most 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,

    /// Number formats. Default: FP32.
    #[serde(default)]
    pub precision: Precision,

    /// Overlap of communication with the backward pass. Default: enabled.
    #[serde(default)]
    pub overlap: Overlap,

    /// What the ranks exchange, and in which steps. Default: gradients, in every step.
    #[serde(default)]
    pub sync: SyncPolicy,

    /// State that is divided among the ranks. `None` (default). `Optimizer`: the optimizer's state,
    /// as in ZeRO-1. Each rank updates its part of the weights and receives the others.
    /// `Gradients`: gradients too, as in ZeRO-2. A rank keeps its part of the sums only. Weights
    /// have the same bits, and checkpoints the same contents. CPUs only.
    #[serde(default)]
    pub sharding: Sharding,

    /// How one network is divided over several ranks. Default: every rank has the whole network.
    #[serde(default)]
    pub parallelism: Parallelism,

    /// How ranks exchange gradients, and which. Default: all gradients, without servers.
    #[serde(default)]
    pub communication: Communication,

    /// Memory of a rank.
    #[serde(default)]
    pub memory: Memory,

    /// What the backward pass computes again instead of keeping it. `None` (default). `Blocks`:
    /// within each block of the model (a layer of GPT or BERT, a residual block of ResNet), the
    /// forward pass keeps the inputs only, and the backward pass computes the block once more.
    /// Weights have the same bits. CPUs only.
    #[serde(default)]
    pub recomputation: Recomputation,

    /// Validation during training.
    #[serde(default)]
    pub evaluation: Evaluation,

    /// Steps between two progress reports of a rank. Default 10.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub fetch_every_steps: i32,

    /// Steps to record operation by operation for a trace. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
}

/// What the ranks compute on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Device {
    /// GPUs if the trainer requests them.
    #[default]
    Auto,
    /// CPU cores.
    Cpu,
    /// An NVIDIA GPU for each rank.
    Cuda,
}

/// How ranks run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ExecutionMode {
    /// Each rank is a process.
    #[default]
    MultiProcess,
    /// Each rank is a device of its node's only process.
    SingleProcess,
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

impl Switch {
    /// Whether it is on.
    pub fn is_on(self) -> bool {
        self == Switch::Enabled
    }
}

fn disabled() -> Switch {
    Switch::Disabled
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
fn zero() -> String {
    "0".into()
}
