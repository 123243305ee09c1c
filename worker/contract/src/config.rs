//! The engine configuration: everything of a TrainJob that the engine needs, with every default filled in.
//!
//! The launcher's pure plan makes it from the manifest; the worker reads it as JSON. It holds no optional field whose
//! default would have to be known on both sides.

use serde::{Deserialize, Serialize};

/// What one rank needs to train. The same bytes go to every rank of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineConfig {
    /// The network.
    pub model: Model,
    /// Where the samples come from.
    pub data: Data,
    /// Sequences per process and micro-batch.
    pub batch_size_per_process: u32,
    /// Micro-batches accumulated before one reduction and one optimizer step.
    pub batch_merge: u32,
    /// How long to train.
    pub length: Length,
    /// Seed of weights and sample order.
    pub seed: u64,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Learning rate over the steps.
    pub schedule: Schedule,
    /// Overlap of communication with the backward pass.
    pub overlap: Overlap,
    /// Validation during training.
    pub evaluation: Evaluation,
    /// A progress event is printed every so many steps.
    pub fetch_every_steps: u32,
    /// Compute threads per process; 0: as many as the cores the process is given, which may differ between nodes.
    /// The results do not depend on it.
    pub cpu_threads: u32,
}

/// The network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Model {
    /// Decoder-only transformer: pre-LN blocks, causal attention, GELU, learned positions.
    Gpt(Gpt),
}

/// Shape of a GPT.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpt {
    /// Transformer blocks.
    pub layers: u32,
    /// Width of the residual stream; a multiple of `heads`.
    pub hidden_size: u32,
    /// Attention heads.
    pub heads: u32,
    /// Tokens per sequence.
    pub context_length: u32,
    /// Size of the vocabulary; 256 for bytes.
    pub vocabulary_size: u32,
    /// The output layer shares its weights with the token embedding.
    pub tied_head: bool,
}

/// Where the samples come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Data {
    /// Bytes of text files.
    Text(TextData),
}

/// Text files, read as bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TextData {
    /// A file, or a directory that is walked.
    pub path: String,
    /// Glob patterns relative to `path`; a file must match one of them. Only for a directory.
    pub include: Vec<String>,
    /// Glob patterns relative to `path`; a file that matches one of them is left out. Only for a directory.
    pub exclude: Vec<String>,
    /// Share of the text kept for validation, 0 to 0.5.
    pub validation_fraction: f64,
}

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Length {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the training data.
    Epochs(u64),
}

/// The optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Optimizer {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
    AdamW(AdamW),
}

/// AdamW's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AdamW {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay; not applied to biases and layer norms.
    pub weight_decay: f64,
    /// Largest global gradient norm; gradients above it are scaled down. `None`: no clipping.
    pub gradient_clip_norm: Option<f64>,
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ScheduleKind {
    /// Stays at the peak.
    Constant,
    /// Half a cosine from the peak to the final learning rate at the last step.
    Cosine,
}

/// Learning rate over the steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Steps of linear growth from 0 to the peak.
    pub warmup_steps: u64,
    /// Learning rate at the end of `Cosine`.
    pub final_learning_rate: f64,
}

/// Overlap of communication with the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Overlap {
    /// Start the all-reduce of a bucket as soon as its last gradient is final; otherwise all start after backward.
    pub enabled: bool,
    /// Largest size of a gradient bucket, MiB.
    pub bucket_size_mib: u32,
}

/// Validation during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Evaluation {
    /// Steps between two evaluations; 0: only at the end.
    pub every_steps: u64,
    /// Batches of `batch_size_per_process` sequences per process in one evaluation.
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
    /// Shared memory inside each host, a TCP ring between the hosts.
    Hierarchical,
}

impl Transport {
    /// The word printed for people.
    pub fn word(self) -> &'static str {
        match self {
            Transport::None => "-",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
            Transport::Hierarchical => "shm+tcp",
        }
    }
}
