//! Facts about a job before any rank starts.

use super::Item;
use serde::{Deserialize, Serialize};

/// Output of `switchyard-worker inspect`: the static plan and the data, examined before any rank
/// starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// Short model description, for example `GPT 4x128` or `ResNet-18 for 32x32x3 in 10 classes`.
    pub model: String,
    /// Sample description, for example `128 tokens` or `32x32x3 pixels`.
    pub sample: String,
    /// The unit of throughput.
    pub item: Item,
    /// Trainable parameters.
    pub parameters: u64,
    /// Number of tensors with a gradient.
    pub gradient_tensors: u32,
    /// Host memory that one rank allocates.
    pub memory: MemoryUse,
    /// Memory of the largest parameter server in a process of its own; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_memory_bytes: Option<u64>,
    /// [`MemoryUse::total`] in FP32; `None` if FP32 is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp32_memory_bytes: Option<u64>,
    /// [`MemoryUse::activations`] without recomputation; `None` if nothing is recomputed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_activation_bytes: Option<u64>,
    /// GPU memory that one rank allocates; absent on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory: Option<MemoryUse>,
    /// [`MemoryUse::total`] on the GPU in FP32; `None` if FP32 is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_fp32_memory_bytes: Option<u64>,
    /// CPU kernels that will be used.
    pub kernel: String,
    /// Files read.
    pub files: u64,
    /// Files that are not read, although the patterns select them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<Skipped>,
    /// Bytes of all files read.
    pub bytes: u64,
    /// Items for training: tokens, images or samples.
    pub train_items: u64,
    /// Items for validation.
    pub validation_items: u64,
    /// Digest of both splits; must be equal on every rank.
    pub data_digest: String,
    /// Unigram entropy of the validation split, nats: a lower bound for any model without context.
    /// Of the training split if there is no validation split. Only for models that predict the next
    /// token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unigram_nats: Option<f64>,
    /// Bigram entropy of the same split: a lower bound for any bigram model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bigram_nats: Option<f64>,
    /// Samples of one optimizer step on all ranks.
    pub samples_per_step: u64,
    /// Items of one optimizer step on all ranks.
    pub items_per_step: u64,
    /// Optimizer steps in one pass over the training data.
    pub steps_per_epoch: u64,
    /// Optimizer steps of this job.
    pub total_steps: u64,
}

/// Files that are not read for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Skipped {
    /// Why they are not read, as a phrase.
    pub reason: String,
    /// Number of files.
    pub files: u64,
    /// Path of the first file.
    pub example: String,
}

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Skipped { reason, files, example } = self;
        match files {
            1 => write!(f, "1 file was skipped: {reason}: {example}"),
            _ => write!(f, "{files} files were skipped: {reason}; the first is {example}"),
        }
    }
}

/// Memory of one rank by purpose, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryUse {
    /// 32-bit weights, and 16-bit working copies.
    pub weights: u64,
    /// Gradient buckets, and the buffer for values exchanged between ranks.
    pub gradients: u64,
    /// Moments and other state of the optimizer.
    pub optimizer: u64,
    /// Activations and their gradients, including scratch memory of the kernels.
    pub activations: u64,
    /// Data kept in memory, and batches being filled or in use.
    pub input: u64,
    /// Buffers of NCCL in GPU memory.
    #[serde(default)]
    pub communication: u64,
    /// The program itself, and copies of single tensors while a checkpoint is read or the model is
    /// written.
    #[serde(default)]
    pub process: u64,
}

impl MemoryUse {
    /// All memory of the rank.
    pub fn total(&self) -> u64 {
        let state = [self.weights, self.gradients, self.optimizer];
        let rest = [self.activations, self.input, self.communication, self.process];
        state.into_iter().chain(rest).fold(0, u64::saturating_add)
    }
}
