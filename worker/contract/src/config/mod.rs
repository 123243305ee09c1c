//! The engine configuration: everything of a TrainJob that the engine needs, with every default filled in.
//!
//! The launcher's pure plan derives it from the manifest; the worker reads it as JSON. It has no optional field whose
//! default would have to be known on both sides.

mod data;
mod model;
mod optimizer;

pub use data::{Csv, Data, Files, ImageShape, Images, Reader, SampleType, Source, Synthetic, TokenType, Tokens};
pub use model::{Activation, Bert, Custom, Gpt, Mlp, Model, ResNet, ResNetDepth, Stem};
pub use optimizer::{
    Adam, Amp, DecayExclusions, HalfType, Lars, LossScaling, Momentum, Optimizer, Precision, Rule, Schedule,
    ScheduleKind,
};

use serde::{Deserialize, Serialize};

/// Everything that one rank needs to train. All ranks of a job get the same bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineConfig {
    /// What the ranks compute with.
    #[serde(default, skip_serializing_if = "Device::is_default")]
    pub device: Device,
    /// The network to train.
    pub model: Model,
    /// Share of the target's probability that is spread over all classes, at least 0 and below 1 (Szegedy and others
    /// 2016).
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
    /// Number formats of activations, weights and gradients.
    pub precision: Precision,
    /// Overlap of communication with the backward pass.
    pub overlap: Overlap,
    /// Memory that a rank may use.
    pub memory: Memory,
    /// Validation during training.
    pub evaluation: Evaluation,
    /// Steps between two progress events.
    pub fetch_every_steps: u32,
    /// Compute threads per process; 0: as many as the process has cores, which may differ between nodes. The results do
    /// not depend on it.
    pub cpu_threads: u32,
    /// Ranks per process, each with a share of its cores; 1 if every rank has its own process.
    pub devices_per_process: u32,
    /// Steps whose operations are recorded one by one.
    pub profile: Option<Profile>,
    /// Where and when the state of the training is saved. `None`: only the trained model is saved.
    pub checkpoint: Option<Checkpoint>,
    /// The check before the first step. `None`: nothing is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_check: Option<BandwidthCheck>,
    /// When a rank counts as hung, and what follows.
    #[serde(default, skip_serializing_if = "Watchdog::is_default")]
    pub watchdog: Watchdog,
    /// How a GPU computes.
    #[serde(default, skip_serializing_if = "Gpu::is_default")]
    pub gpu: Gpu,
}

/// How a GPU computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// The works of a micro-batch are queued as one CUDA graph once they have run one by one; otherwise always one by one.
    pub graphs: bool,
    /// How it multiplies matrices.
    pub matmul: Matmul,
    /// Every run has the same bits.
    #[serde(default = "always")]
    pub deterministic: bool,
}

/// Of a configuration that a controller has written that does not know the field.
fn always() -> bool {
    true
}

impl Default for Gpu {
    fn default() -> Gpu {
        Gpu { graphs: true, matmul: Matmul::Ieee, deterministic: true }
    }
}

/// How matrices are multiplied; sums are in 32 bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Matmul {
    /// As they are.
    #[default]
    Ieee,
    /// Numbers of 32 bits are rounded to 10 bits of fraction, which tensor cores multiply.
    Tf32,
    /// In mixed precision with bf16: both factors of linear layers are rounded to 8 bits, forward and for the gradients of their inputs.
    Fp8,
}

impl Gpu {
    fn is_default(&self) -> bool {
        *self == Gpu::default()
    }
}

/// What the ranks compute with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// Cores.
    #[default]
    Cpu,
    /// A GPU of NVIDIA for each rank.
    Cuda,
}

impl Device {
    fn is_default(&self) -> bool {
        *self == Device::default()
    }
}

/// When a rank counts as hung, and what follows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Watchdog {
    /// Seconds without progress after which a rank counts as hung. `None`: 600; in a step, once twenty of them are done, ten
    /// times their median, at least 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    /// What follows.
    #[serde(default)]
    pub on_hang: OnHang,
}

impl Watchdog {
    fn is_default(&self) -> bool {
        *self == Watchdog::default()
    }
}

/// What follows if a rank hangs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnHang {
    /// The attempt ends, and the next one starts within the job's budget.
    #[default]
    Restart,
    /// The log says so, and the job goes on waiting.
    Report,
}

/// A measurement of the links between ranks before the first step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BandwidthCheck {
    /// The smallest sufficient bus bandwidth in bytes per second.
    pub least_bytes_per_second: f64,
    /// Whether the job must not start with less; otherwise it is reported, and the job continues.
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
    /// Start the all-reduce of a bucket as soon as its last gradient is final; otherwise all start after backward.
    pub enabled: bool,
    /// Most MiB of an all-reduce, unless a single tensor has more. `None`: what the measured link needs to be used well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_size_mib: Option<u32>,
    /// All-reduces that may run at a time, each with its own connections.
    pub communicators: u32,
    /// Format in which gradients travel between hosts.
    pub wire_type: WireType,
    /// Wait for each all-reduce right after it is started.
    pub sync_all_reduce: bool,
}

/// Format in which gradients travel between hosts. They are always summed in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WireType {
    /// 4 bytes.
    Fp32,
    /// 2 bytes, 10 bits of fraction.
    Fp16,
    /// 2 bytes, 7 bits of fraction.
    Bf16,
}

/// Memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Memory {
    /// Share of the memory that this rank may use, above 0 to 1; checked before the first step.
    pub fraction: f64,
    /// Steps between two releases of unused memory to the system; 0: never.
    pub release_every_steps: u32,
}

/// Steps whose operations are recorded one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    /// The first recorded step, counted from 1.
    pub from_step: u64,
    /// Number of recorded steps.
    pub steps: u32,
}

/// Where and when the state of the training is saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Checkpoint {
    /// Directory that all ranks can access.
    pub path: String,
    /// Steps between two checkpoints; 0: the number of steps does not matter.
    pub every_steps: u64,
    /// Seconds between two checkpoints; 0: time does not matter.
    pub period_seconds: u64,
    /// Complete checkpoints that are kept, at least 1.
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
    /// Batches of `batch_size_per_process` samples per process in one evaluation.
    pub batches: u32,
}

/// How gradients travel between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A single rank: nothing travels.
    None,
    /// Memory shared by the ranks of one host.
    Shm,
    /// A ring of TCP connections.
    Tcp,
    /// Shared memory within each host, a TCP ring between the hosts.
    Hierarchical,
    /// NCCL, from GPU to GPU.
    Nccl,
}

impl Transport {
    /// The name for people.
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
