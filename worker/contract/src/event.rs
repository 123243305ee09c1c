//! Events that a rank reports to its launcher: one JSON object per line on standard output.
//!
//! Standard error is free text. A line on standard output that is not an event is passed through as
//! text.

mod inspection;
mod links;

use crate::config::Transport;
pub use crate::gpu::{CudnnCoverage, GpuPaths, GpuReport, GpuTrouble};
pub use crate::straggler::{Slowest, Stuck};
pub use inspection::{Inspection, MemoryUse, Skipped};
pub use links::{Link, Measured, MeasuredLink};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One line on a rank's standard output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Event {
    /// Measured speed of the links, if the job requires it; printed by rank 0 before it is ready.
    Measured(Measured),
    /// The group is complete and connected; training starts next.
    Ready(Ready),
    /// Figures of the steps since the last progress event.
    Progress(Progress),
    /// Loss on the validation split, equal on every rank; printed by rank 0.
    Evaluation {
        /// Optimizer steps done.
        step: u64,
        /// Mean cross entropy, nats.
        loss: f64,
        /// Fraction of the samples classified correctly, 0 to 1; absent if the model does not
        /// classify.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        accuracy: Option<f64>,
    },
    /// Ranks have hung for longer than the job allows, and it keeps waiting (`onHang: Report`).
    /// Printed by rank 0 when this begins, changes and ends.
    Standstill {
        /// One of the hung ranks; absent once all ranks make progress.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stuck: Option<Stuck>,
    },
    /// Health of a rank's GPU so far; printed when something changes, and at the end. Absent on
    /// CPUs and where nothing monitors the GPU.
    Gpu(GpuReport),
    /// The job's most urgent GPU problem changed. Printed by rank 0.
    GpuTrouble {
        /// The most urgent problem of all ranks; absent if there is none any more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<GpuTrouble>,
    },
    /// A checkpoint was completed or abandoned. Printed by the rank that observes it.
    Checkpoint(CheckpointReport),
    /// State of the job; printed by the supervisor of a pod, never by a rank.
    Summary(Summary),
    /// All steps are done.
    Finished(Finished),
    /// The rank failed and is exiting.
    Failed(Failure),
}

impl Event {
    /// The rank that the event is about, since a process may host several. `None`: the whole job.
    pub fn rank(&self) -> Option<u32> {
        match self {
            Event::Ready(ready) => Some(ready.rank),
            Event::Progress(progress) => Some(progress.rank),
            Event::Finished(finished) => Some(finished.rank),
            Event::Failed(failure) => Some(failure.rank),
            Event::Gpu(report) => Some(report.rank),
            Event::Measured(_)
            | Event::Evaluation { .. }
            | Event::Standstill { .. }
            | Event::GpuTrouble { .. }
            | Event::Checkpoint(_)
            | Event::Summary(_) => None,
        }
    }
}

/// A checkpoint that was completed or abandoned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointReport {
    /// Optimizer steps in the checkpoint.
    pub step: u64,
    /// Size on disk, if complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Seconds from the copy of the state to the end; training continued meanwhile.
    pub seconds: f64,
    /// Why it was abandoned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// A rank after rendezvous.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Process id.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// CPUs that the rank may run on, as a kernel CPU list.
    pub cpus: String,
    /// Compute threads.
    pub threads: u32,
    /// CPU kernels in use (`avx512`, `avx2`, `portable`).
    pub kernel: String,
    /// Local address of the control connection; on rank 0 the rendezvous address.
    pub address: String,
    /// How gradients travel.
    pub transport: Transport,
    /// Links that carry data from this rank to others. They connect every pair of ranks, directly
    /// or through other ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// Bytes of each gradient all-reduce, in the order in which the backward pass starts them. From
    /// rank 0 only; empty with a single rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bucket_bytes: Vec<u64>,
    /// Algorithm of each of these all-reduces between hosts, such as `ring`. Empty if all ranks
    /// share memory, and with NCCL, which chooses its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub algorithms: Vec<String>,
    /// Measured total time of these all-reduces, milliseconds; 0 with a single rank.
    pub all_reduce_ms: f64,
    /// Steps in the checkpoint that training resumes from; absent if it starts from scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<u64>,
    /// Implementations in use on a GPU; absent on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuPaths>,
}

impl Ready {
    /// The algorithms between hosts and how many all-reduces use each, such as
    /// `3 x ring, 1 x tree`. `None` if the rank chose none.
    pub fn algorithm_counts(&self) -> Option<String> {
        let mut counts = BTreeMap::<&str, u32>::new();
        self.algorithms.iter().for_each(|name| *counts.entry(name).or_default() += 1);
        let parts: Vec<String> = counts.into_iter().map(|(name, count)| format!("{count} x {name}")).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

/// Measurements over an interval of steps. Times are means per optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Number of steps that the figures cover.
    pub interval_steps: u64,
    /// Mean training loss over the interval and all ranks, nats.
    pub loss: f64,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Global gradient norm of the last step, before clipping.
    pub gradient_norm: f64,
    /// [`Item`]s per second over the whole job.
    pub items_per_second: f64,
    /// The unit of `items_per_second`.
    #[serde(default)]
    pub item: Item,
    /// Wall-clock time per step, ms.
    pub step_ms: f64,
    /// Longest step of the interval, ms.
    pub max_step_ms: f64,
    /// Forward passes, ms.
    pub forward_ms: f64,
    /// Backward passes, ms.
    pub backward_ms: f64,
    /// Waiting for reductions after the backward pass, ms: exposed communication.
    pub communication_wait_ms: f64,
    /// Waiting for other stages and exchanging activations with them, ms; only with pipelines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipeline_wait_ms: Option<f64>,
    /// Time that the compute thread waited for the reader, ms.
    pub input_wait_ms: f64,
    /// Threads of the reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reader_threads: Option<u32>,
    /// Clipping and optimizer, ms.
    pub optimizer_ms: f64,
    /// Loss scale after the last step; only with mixed precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Steps of the run skipped because their gradients overflowed; only with mixed precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// From rank 0 only, once it has figures from all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowest: Option<Slowest>,
}

/// The unit of throughput.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Item {
    /// Tokens of language models.
    #[default]
    Tokens,
    /// Images.
    Images,
    /// Any other samples.
    Samples,
}

impl Item {
    /// Display name.
    pub fn word(self) -> &'static str {
        match self {
            Item::Tokens => "tokens",
            Item::Images => "images",
            Item::Samples => "samples",
        }
    }
}

/// State of a job, complete in one line, so that the end of a log can be read on its own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Optimizer steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Mean training loss of the last interval over all ranks, nats.
    pub loss: f64,
    /// Last loss on the validation split, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Fraction of the validation split classified correctly, 0 to 1; absent if the model does not
    /// classify.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// See [`Progress::loss_scale`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// See [`Progress::skipped_steps`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// The slowest rank of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowest: Option<Slowest>,
    /// See [`Event::Standstill`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stuck: Option<Stuck>,
    /// See [`Event::GpuTrouble`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuTrouble>,
    /// [`Item`]s per second over the whole job.
    pub items_per_second: f64,
    /// The unit of `items_per_second`.
    #[serde(default)]
    pub item: Item,
    /// Estimated seconds until the last step; `None` until there is enough data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<f64>,
    /// Percentage of the step time that the slowest rank waits for reductions. In a pod: among the
    /// ranks of the first node.
    pub communication_percent: f64,
    /// Percentage of the step time that the slowest rank waits for input. In a pod: among the ranks
    /// of the first node.
    pub input_percent: f64,
}

impl Summary {
    /// Once a summary has been printed, one is always among this many last lines of the first pod's
    /// log.
    pub const TAIL_LINES: usize = 64;

    /// The last summary in a log. Other lines are skipped.
    pub fn last_in(log: &str) -> Option<Summary> {
        log.lines().rev().find_map(|line| match serde_json::from_str(line) {
            Ok(Event::Summary(summary)) => Some(summary),
            _ => None,
        })
    }
}

/// The step of the last progress report in a log. Every node's pod has one among its last
/// [`Summary::TAIL_LINES`] lines.
pub fn step_in(log: &str) -> Option<u64> {
    log.lines().rev().find_map(|line| match serde_json::from_str(line) {
        Ok(Event::Summary(summary)) => Some(summary.step),
        Ok(Event::Progress(progress)) => Some(progress.step),
        _ => None,
    })
}

/// The end of training on one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finished {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Loss of the first step of this attempt, nats; absent if the checkpoint already had all
    /// steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_loss: Option<f64>,
    /// Mean loss of the last interval, nats; absent in the same case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_loss: Option<f64>,
    /// Loss on the validation split at the end; absent without a validation split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Fraction of the validation split classified correctly at the end, 0 to 1; absent if the
    /// model does not classify.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Digest of all weights; equal on all ranks.
    pub weights_digest: String,
    /// Median wall-clock time of a step, ms.
    pub step_ms_p50: f64,
    /// 99th percentile of the wall-clock time of a step, ms.
    pub step_ms_p99: f64,
    /// GPU driver calls in the last step; absent on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_calls: Option<GpuCalls>,
    /// Trained weights, written by rank 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_file: Option<String>,
}

/// GPU driver calls of a rank in its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuCalls {
    /// Kernels, matrix products and copies that repeat in each step. Without graphs each takes one
    /// call.
    pub works: u64,
    /// Calls that enqueued work: one per graph, and one per copy from or to the host.
    pub launches: u64,
    /// Calls that waited for the device.
    pub waits: u64,
}

/// `rank 3`, or `parameter server 0`: servers in processes of their own are counted after the
/// `world` ranks.
pub fn member_name(member: u32, world: u32) -> String {
    match member.checked_sub(world) {
        Some(server) => format!("parameter server {server}"),
        None => format!("rank {member}"),
    }
}

/// Why a rank exits. Every rank of a group reports the same `origin_rank` and `cause`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// The rank that prints this.
    pub rank: u32,
    /// The rank that failed first, as far as the group could determine.
    pub origin_rank: u32,
    /// What happened on the rank that failed first.
    pub cause: String,
    /// What this rank was doing.
    pub during: String,
    /// Exit code of the rank that prints this.
    pub exit_code: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_fields_are_neither_written_nor_required() {
        let line = r#"{"event":"evaluation","step":3,"loss":2.5}"#;
        let event: Event = serde_json::from_str(line).unwrap();
        assert_eq!(event, Event::Evaluation { step: 3, loss: 2.5, accuracy: None });
        assert_eq!((serde_json::to_string(&event).unwrap().as_str(), event.rank()), (line, None));
        let failure = Failure { rank: 7, origin_rank: 2, cause: String::new(), during: String::new(), exit_code: 4 };
        assert_eq!(Event::Failed(failure).rank(), Some(7), "the rank that reports, not the one that failed first");
    }

    #[test]
    fn the_last_summary_is_found_among_other_lines() {
        let line = |step: u64| {
            format!(
                r#"{{"event":"summary","step":{step},"totalSteps":9,"loss":2.5,"itemsPerSecond":10.0,"item":"tokens","communicationPercent":1.0,"inputPercent":0.0}}"#
            )
        };
        let log = format!("text\n{}\n{}\n[rank 0] {}\n{{\"event\":\"summary\",\"st", line(1), line(2), line(3));
        let found = Summary::last_in(&log).unwrap();
        assert_eq!((found.step, found.validation_loss, found.remaining_seconds), (2, None, None));
        assert_eq!(Summary::last_in("{}\nnot an event\n"), None);
        assert_eq!(serde_json::to_string(&Event::Summary(found)).unwrap(), line(2));
    }
}
