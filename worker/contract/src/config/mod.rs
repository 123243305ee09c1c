//! Engine configuration: everything in a TrainJob that the engine needs, with all defaults
//! resolved.
//!
//! The launcher's pure plan derives it from the manifest; the worker reads it as JSON. No field is
//! optional if its default would have to be known on both sides.

mod data;
mod model;
mod optimizer;
mod pipeline;
mod sync;

pub use data::{
    Column, Csv, Data, Features, Files, Header, ImageShape, Images, Reader, SampleType, Source, Synthetic, TokenType,
    Tokens,
};
pub use model::{Activation, Bert, Custom, Gpt, Mlp, Model, ResNet, ResNetDepth, Stem};
pub use optimizer::{
    Adam, Amp, DecayExclusions, HalfType, Lars, LossScaling, Momentum, Optimizer, Precision, Rule, Schedule,
    ScheduleKind,
};
pub use pipeline::{Pipeline, PipelinePlace, RankOrder, idle_share};
pub use sync::{
    Algorithm, Compression, LocalSteps, Nesterov, OuterOptimizer, ParameterServers, ServerPlacement, Sharding,
    SyncPolicy, TopK, Updates,
};

use serde::{Deserialize, Serialize};

/// Everything a rank needs to train. All ranks of a job receive the same bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineConfig {
    /// Device type that the ranks use.
    #[serde(default, skip_serializing_if = "Device::is_default")]
    pub device: Device,
    /// The network to train.
    pub model: Model,
    /// Fraction of the target's probability spread evenly over all classes, at least 0 and below 1
    /// (Szegedy et al. 2016).
    pub label_smoothing: f64,
    /// Where the samples come from.
    pub data: Data,
    /// How the samples are read.
    pub reader: Reader,
    /// Samples per process and micro-batch.
    pub batch_size_per_process: u32,
    /// Micro-batches accumulated before one reduction and one optimizer step.
    pub batch_merge: u32,
    /// How long to train.
    pub length: Length,
    /// Seed of weights and sample order.
    pub seed: u64,
    /// Update rule and its settings.
    pub optimizer: Optimizer,
    /// Learning rate over the steps.
    pub schedule: Schedule,
    /// Numeric formats of activations, weights and gradients.
    pub precision: Precision,
    /// Overlap of communication with the backward pass.
    pub overlap: Overlap,
    /// What the ranks exchange, and in which steps.
    #[serde(default, skip_serializing_if = "SyncPolicy::is_default")]
    pub sync: SyncPolicy,
    /// What each rank holds a part of.
    #[serde(default, skip_serializing_if = "Sharding::is_default")]
    pub sharding: Sharding,
    /// Servers that hold and update the weights. `None`: every rank does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter_server: Option<ParameterServers>,
    /// Stages of the network on different ranks. `None`: every rank has the whole network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<Pipeline>,
    /// How gradients are summed between hosts. `None`: chosen for each all-reduce.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<Algorithm>,
    /// Which gradients are sent. `None`: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Memory that a rank may use.
    pub memory: Memory,
    /// What backward computes again instead of keeping it.
    #[serde(default, skip_serializing_if = "Recomputation::is_default")]
    pub recomputation: Recomputation,
    /// Validation during training.
    pub evaluation: Evaluation,
    /// Steps between two progress events.
    pub fetch_every_steps: u32,
    /// Compute threads per process; 0 uses as many as the process has cores, which may differ
    /// between nodes. The results do not depend on it.
    pub cpu_threads: u32,
    /// Ranks per process, which share its cores; 1 if every rank has its own process.
    pub devices_per_process: u32,
    /// Steps to profile, one operation at a time.
    pub profile: Option<Profile>,
    /// Where and when the training state is saved. `None` saves only the trained model.
    pub checkpoint: Option<Checkpoint>,
    /// Bandwidth check before the first step. `None` disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_check: Option<BandwidthCheck>,
    /// When a rank counts as hung, and the response.
    #[serde(default, skip_serializing_if = "Watchdog::is_default")]
    pub watchdog: Watchdog,
    /// GPU-specific settings.
    #[serde(default, skip_serializing_if = "Gpu::is_default")]
    pub gpu: Gpu,
}

/// GPU-specific settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// Run each micro-batch as one CUDA graph after an eager first pass; otherwise always launch
    /// its operations one by one.
    pub graphs: bool,
    /// Matrix multiplication mode.
    pub matmul: Matmul,
    /// Runs are bit-identical.
    #[serde(default = "default_true")]
    pub deterministic: bool,
}

/// Default for configurations from a controller that does not know the field.
fn default_true() -> bool {
    true
}

impl Default for Gpu {
    fn default() -> Gpu {
        Gpu { graphs: true, matmul: Matmul::Ieee, deterministic: true }
    }
}

/// Matrix multiplication mode. Accumulation is always in FP32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Matmul {
    /// Factors are multiplied in their own format.
    #[default]
    Ieee,
    /// f32 factors are rounded to TF32 (10-bit fraction) for the tensor cores.
    Tf32,
    /// With bf16 mixed precision: both factors of linear layers are rounded to FP8, in the forward
    /// pass and for the gradients of their inputs.
    Fp8,
}

impl Gpu {
    fn is_default(&self) -> bool {
        *self == Gpu::default()
    }
}

/// Device type that the ranks use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// CPU cores.
    #[default]
    Cpu,
    /// One NVIDIA GPU per rank.
    Cuda,
}

impl Device {
    fn is_default(&self) -> bool {
        *self == Device::default()
    }
}

/// When a rank counts as hung, and the response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Watchdog {
    /// Seconds without progress after which a rank counts as hung. `None`: 600 s; within a step,
    /// once twenty steps are done, ten times their median, at least 30 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    /// Response to a hang.
    #[serde(default)]
    pub on_hang: OnHang,
}

impl Watchdog {
    fn is_default(&self) -> bool {
        *self == Watchdog::default()
    }
}

/// Response to a hung rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnHang {
    /// End the attempt; the next one starts within the job's retry budget.
    #[default]
    Restart,
    /// Log it and keep waiting.
    Report,
}

/// A measurement of the links between ranks before the first step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BandwidthCheck {
    /// Required bus bandwidth in bytes per second.
    pub least_bytes_per_second: f64,
    /// Refuse to start below the required bandwidth; otherwise only report it.
    pub enforce: bool,
}

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Length {
    /// Number of optimizer steps.
    Steps(u64),
    /// Number of passes over the training data.
    Epochs(u64),
}

/// Overlap of communication with the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Overlap {
    /// Start the all-reduce of a bucket as soon as its last gradient is final; otherwise all start
    /// after backward.
    pub enabled: bool,
    /// Largest all-reduce in MiB, unless a single tensor is larger. `None`: sized to saturate the
    /// measured link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_size_mib: Option<u32>,
    /// Concurrent all-reduces, each with its own connections.
    pub communicators: u32,
    /// Format of gradients sent between hosts.
    pub wire_type: WireType,
    /// Wait for each all-reduce right after it is started.
    pub sync_all_reduce: bool,
}

/// Format of gradients sent between hosts. Accumulation is always in FP32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WireType {
    /// 4 bytes.
    Fp32,
    /// 2 bytes, 10-bit fraction.
    Fp16,
    /// 2 bytes, 7-bit fraction.
    Bf16,
}

/// Memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Memory {
    /// Fraction of the memory that this rank may use, above 0 to 1; checked before the first step.
    pub fraction: f64,
    /// Steps between releases of unused memory to the system; 0: never.
    pub release_every_steps: u32,
}

/// What backward computes again instead of keeping it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Recomputation {
    /// Nothing.
    #[default]
    None,
    /// The activations within each block (Chen et al. 2016, arXiv:1604.06174).
    Blocks,
}

impl Recomputation {
    fn is_default(&self) -> bool {
        *self == Recomputation::default()
    }
}

/// Steps to profile, one operation at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    /// The first recorded step, counted from 1.
    pub from_step: u64,
    /// Number of recorded steps.
    pub steps: u32,
}

/// Where and when the training state is saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Checkpoint {
    /// Directory that all ranks can access.
    pub path: String,
    /// Steps between checkpoints; 0 disables the step trigger.
    pub every_steps: u64,
    /// Seconds between checkpoints; 0 disables the time trigger.
    pub period_seconds: u64,
    /// Complete checkpoints to keep, at least 1.
    pub keep: u32,
    /// Save when the job is stopped or suspended (SIGTERM).
    pub on_suspend: bool,
}

/// Validation during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Evaluation {
    /// Steps between two evaluations; 0: only at the end.
    pub every_steps: u64,
    /// Batches of `batch_size_per_process` samples that each process evaluates; `None`: as many as
    /// it takes to evaluate every sample once.
    pub batches: Option<u32>,
}

/// Transport of gradients between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A single rank: no transport.
    None,
    /// Memory shared by the ranks of a host.
    Shm,
    /// A ring of TCP connections.
    Tcp,
    /// Shared memory within each host, TCP between the hosts.
    Hierarchical,
    /// NCCL, GPU to GPU.
    Nccl,
}

impl Transport {
    /// Short display name.
    pub fn word(self) -> &'static str {
        match self {
            Transport::None => "-",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
            Transport::Hierarchical => "shm+tcp",
            Transport::Nccl => "nccl",
        }
    }
}
