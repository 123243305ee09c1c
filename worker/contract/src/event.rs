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
    /// Everything a reader of the log needs, in one line; printed by the supervisor of the pod of node 0.
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

/// Where the training stands. Each one can be read alone: whoever reads the last lines of a log needs no more.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// Mean training loss of the last interval, nats per token.
    pub loss: f64,
    /// Last loss on the validation split, nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Tokens per second of the whole job.
    pub tokens_per_second: f64,
    /// Seconds until the last step; absent while too little is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<f64>,
    /// Share of the step time that rank 0 waits for reductions, percent.
    pub communication_percent: f64,
    /// Share of the step time that rank 0 waits for input, percent.
    pub input_percent: f64,
}

impl Summary {
    /// The last summary in the end of a log; the first line may be cut.
    pub fn last_in(log: &str) -> Option<Summary> {
        log.lines().rev().find_map(|line| match serde_json::from_str(line) {
            Ok(Event::Summary(summary)) => Some(summary),
            _ => None,
        })
    }
}

/// Most bytes of a termination message that a kubelet reads.
pub const TERMINATION_BYTES: usize = 4096;

/// What a pod leaves behind: its container's termination message.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Termination {
    /// Where the training stood; of node 0 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// Why it ended, when it failed. The cause is cut where the message would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

impl Termination {
    /// As JSON of at most [`TERMINATION_BYTES`].
    pub fn to_json(&self) -> String {
        let mut short = self.clone();
        loop {
            let text = serde_json::to_string(&short).unwrap_or_default();
            match &mut short.failure {
                Some(failure) if text.len() > TERMINATION_BYTES && !failure.cause.is_empty() => {
                    let keep = failure.cause.chars().count() / 2;
                    failure.cause = failure.cause.chars().take(keep).collect();
                    failure.during = failure.during.chars().take(200).collect();
                }
                _ => return text,
            }
        }
    }
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

    fn summary(step: u64) -> Summary {
        Summary {
            step,
            total_steps: 100,
            loss: 2.5,
            validation_loss: None,
            tokens_per_second: 1e4,
            remaining_seconds: Some(3.0),
            communication_percent: 1.0,
            input_percent: 0.0,
        }
    }

    #[test]
    fn the_last_summary_of_a_log_is_found() {
        let line = |step| serde_json::to_string(&Event::Summary(summary(step))).expect("serialises");
        let log = format!("ut line}}\n{}\nsomething else\n{}\n{{\"event\":\"unknown\"}}\n", line(10), line(20));
        assert_eq!(Summary::last_in(&log), Some(summary(20)));
        assert_eq!(Summary::last_in("nothing here"), None);
    }

    #[test]
    fn a_termination_message_fits_and_stays_json() {
        let failure =
            Failure { rank: 1, origin_rank: 0, cause: "ä\"\n".repeat(3000), during: "step".into(), exit_code: 4 };
        let message = Termination { summary: Some(summary(5)), failure: Some(failure) };
        let text = message.to_json();
        assert!(text.len() <= TERMINATION_BYTES, "{}", text.len());
        let read: Termination = serde_json::from_str(&text).expect("JSON");
        assert_eq!(read.summary, message.summary);
        assert!(read.failure.is_some_and(|failure| !failure.cause.is_empty() && failure.exit_code == 4));
    }
}
