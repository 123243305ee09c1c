//! What is known of a job before any rank starts.

use super::Item;
use serde::{Deserialize, Serialize};

/// Output of `switchyard-worker inspect`: the static plan and the data, examined before any rank starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// The network in a few words, such as `GPT 4x128` or `ResNet-18 for 32x32x3 in 10 classes`.
    pub model: String,
    /// What a sample is, such as `128 tokens` or `32x32x3 pixels`.
    pub sample: String,
    /// The unit of throughput.
    pub item: Item,
    /// Trainable numbers.
    pub parameters: u64,
    /// Number of tensors with a gradient.
    pub gradient_tensors: u32,
    /// Memory that one rank allocates.
    pub memory: MemoryUse,
    /// [`MemoryUse::total`] in FP32; `None` if FP32 is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp32_memory_bytes: Option<u64>,
    /// Memory of one rank on its GPU; absent on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory: Option<MemoryUse>,
    /// Its sum in bytes if all numbers had 32 bits; `None` if they have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_fp32_memory_bytes: Option<u64>,
    /// CPU kernels that will be used.
    pub kernel: String,
    /// Files read.
    pub files: u64,
    /// Files skipped because they are empty, after the patterns were applied.
    pub empty_files: u64,
    /// Bytes of all files read.
    pub bytes: u64,
    /// Items for training: tokens, images or samples.
    pub train_items: u64,
    /// Items for validation.
    pub validation_items: u64,
    /// Digest of both splits; every rank must find the same.
    pub data_digest: String,
    /// Entropy of single tokens in the validation split, nats: no model without context can do better. Of the training
    /// split if there is no validation split. Only for language models that predict the next token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unigram_nats: Option<f64>,
    /// Entropy of a token given the previous one, same split: no bigram model can do better.
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

/// Memory of one rank by purpose, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryUse {
    /// 32-bit weights, and 16-bit working copies.
    pub weights: u64,
    /// Gradient buckets, and the buffer for what ranks tell each other.
    pub gradients: u64,
    /// Moments and other state of the optimizer.
    pub optimizer: u64,
    /// Activations and their gradients, with scratch memory of the kernels.
    pub activations: u64,
    /// Data kept in memory, and batches being filled or used.
    pub input: u64,
}

impl MemoryUse {
    /// All memory of the rank.
    pub fn total(&self) -> u64 {
        let parts = [self.weights, self.gradients, self.optimizer, self.activations, self.input];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}
