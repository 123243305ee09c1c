//! What a rank tells its launcher: one JSON object per line on standard output.
//!
//! Standard error is free text for people. A line on standard output that is not an event is passed through as text.

use crate::config::Transport;
use serde::{Deserialize, Serialize};

/// One line on a rank's standard output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Event {
    /// The group is complete and connected; training starts next.
    Ready(Ready),
    /// Figures of the steps since the last progress event.
    Progress(Progress),
    /// Loss on the validation split, the same on every rank; printed by rank 0.
    Evaluation {
        /// Optimizer steps done.
        step: u64,
        /// Mean cross entropy, nats per token.
        loss: f64,
    },
    /// Where the job is; printed by the supervisor of a pod, never by a rank.
    Summary(Summary),
    /// All steps are done.
    Finished(Finished),
    /// The rank gives up.
    Failed(Failure),
}

/// A rank after rendezvous.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    /// Global rank.
    pub rank: u32,
    /// Process id.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// CPUs the rank may run on, as a kernel CPU list.
    pub cpus: String,
    /// Compute threads.
    pub threads: u32,
    /// CPU kernels in use (`avx512`, `avx2`, `portable`).
    pub kernel: String,
    /// Local address of the control connection; rank 0: the rendezvous address.
    pub address: String,
    /// How gradients travel.
    pub transport: Transport,
    /// Measured time of one all-reduce of all gradient buckets, milliseconds; 0 with a single rank.
    pub all_reduce_ms: f64,
}

/// Figures over an interval of steps. Times are means per optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Global rank.
    pub rank: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Steps in all.
    pub total_steps: u64,
    /// Steps that the figures cover.
    pub interval_steps: u64,
    /// Mean training loss over the interval and all ranks, nats per token.
    pub loss: f64,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Global gradient norm of the last step, before clipping.
    pub gradient_norm: f64,
    /// Tokens per second of the whole job.
    pub tokens_per_second: f64,
    /// Wall time per step, ms.
    pub step_ms: f64,
    /// Longest step of the interval, ms.
    pub max_step_ms: f64,
    /// Forward, ms.
    pub forward_ms: f64,
    /// Backward, ms.
    pub backward_ms: f64,
    /// Time the compute thread waited for reductions after backward, ms: the exposed communication.
    pub communication_wait_ms: f64,
    /// Time the compute thread waited for the reader, ms.
    pub input_wait_ms: f64,
    /// Clipping and optimizer, ms.
    pub optimizer_ms: f64,
}

/// Where a job is, complete in one line: whoever reads the end of a log needs nothing before it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Optimizer steps done.
    pub step: u64,
    /// Steps in all.
    pub total_steps: u64,
    /// Mean training loss of the last interval over all ranks, nats per token.
    pub loss: f64,
    /// Last loss on the validation split, nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Tokens per second of the whole job.
    pub tokens_per_second: f64,
    /// Seconds until the last step; `None` while too little is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<f64>,
    /// Share of the step time that the slowest rank waits for reductions, percent. In a pod: of the ranks of the first node.
    pub communication_percent: f64,
    /// Share of the step time that the slowest rank waits for input, percent. In a pod: of the ranks of the first node.
    pub input_percent: f64,
}

impl Summary {
    /// The last so many lines of the log of the first pod hold a summary, once there is one.
    pub const TAIL_LINES: usize = 64;

    /// The last summary in the lines of a log. Lines that are anything else are passed over.
    pub fn last_in(log: &str) -> Option<Summary> {
        log.lines().rev().find_map(|line| match serde_json::from_str(line) {
            Ok(Event::Summary(summary)) => Some(summary),
            _ => None,
        })
    }
}

/// The end of training on one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finished {
    /// Global rank.
    pub rank: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Loss of the first step, nats per token.
    pub first_loss: f64,
    /// Mean loss of the last interval, nats per token.
    pub last_loss: f64,
    /// Loss on the validation split at the end; absent when there is no validation split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Digest of all weights; equal on all ranks.
    pub weights_digest: String,
    /// Median wall time of a step, ms.
    pub step_ms_p50: f64,
    /// 99th percentile of the wall time of a step, ms.
    pub step_ms_p99: f64,
    /// File of the trained weights, written by rank 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_file: Option<String>,
}

/// Why a rank gives up. Every rank of a group reports the same `origin_rank` and `cause`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// The rank that prints this.
    pub rank: u32,
    /// The rank that failed first, as far as the group knows.
    pub origin_rank: u32,
    /// What happened there.
    pub cause: String,
    /// What this rank was doing.
    pub during: String,
    /// Exit code that follows.
    pub exit_code: u8,
}

/// The answer of `switchyard-worker inspect`: the static plan and the data, examined before any rank starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// Trainable numbers.
    pub parameters: u64,
    /// Tensors that have a gradient.
    pub gradient_tensors: u32,
    /// Size of each fused bucket in the order in which they are reduced, bytes.
    pub bucket_bytes: Vec<u64>,
    /// Memory one rank allocates: weights, gradients, optimizer state, activations and data, bytes.
    pub memory_bytes: u64,
    /// CPU kernels that will be used.
    pub kernel: String,
    /// Files read.
    pub files: u64,
    /// Files left out because they are not readable text input (empty), with the patterns already applied.
    pub empty_files: u64,
    /// Bytes of all files read.
    pub bytes: u64,
    /// Tokens for training.
    pub train_tokens: u64,
    /// Tokens for validation.
    pub validation_tokens: u64,
    /// Digest of both splits; every rank must find the same.
    pub data_digest: String,
    /// Entropy of single tokens in the validation split, nats per token: no context-free model scores lower.
    /// Of the training split when there is no validation split.
    pub unigram_nats: f64,
    /// Entropy of a token given the one before it, same split: no bigram model scores lower.
    pub bigram_nats: f64,
    /// Tokens of one optimizer step over all ranks.
    pub tokens_per_step: u64,
    /// Optimizer steps in one pass over the training data.
    pub steps_per_epoch: u64,
    /// Optimizer steps of this job.
    pub total_steps: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_summary_is_found_among_other_lines() {
        let line = |step: u64| {
            format!(
                r#"{{"event":"summary","step":{step},"totalSteps":9,"loss":2.5,"tokensPerSecond":10.0,"communicationPercent":1.0,"inputPercent":0.0}}"#
            )
        };
        let log = format!("text\n{}\n{}\n[rank 0] {}\n{{\"event\":\"summary\",\"st", line(1), line(2), line(3));
        let found = Summary::last_in(&log).unwrap();
        assert_eq!((found.step, found.validation_loss, found.remaining_seconds), (2, None, None));
        assert_eq!(Summary::last_in("{}\nno event here\n"), None);
        assert_eq!(serde_json::to_string(&Event::Summary(found)).unwrap(), line(2));
    }
}
