//! The report as data: the contents of `report.json`, and everything that the page shows.
//!
//! Fields are only ever added. Names include the unit; unknown values are absent.

/// The derives of every part of the report.
macro_rules! data {
    ($($item:item)*) => {$(
        #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        $item
    )*};
}

mod charts;
mod kernels;
mod layers;
mod setting;

pub use charts::{
    AllReduce, Loss, LossWindow, Pipeline, Point, RankSkew, Restart, SkewRow, StageWait, StepTime, StepWindow,
    Throughput,
};
pub use kernels::{KernelRow, Kernels};
pub use layers::{LayerRow, Layers};
pub use setting::{Amount, EventEntry, GpuSummary, Memory, PlacementSection, RankPlace, Setting, Variable};

use super::advice::{Basis, Change, Chart};
use super::sample::{Part, Parts};
use serde::{Deserialize, Serialize};
use switchyard_worker_contract::event::Slowest;

/// Version of the format.
pub const API_VERSION: &str = "cli.switchyard.dev/v1";
pub const KIND: &str = "Report";

data! {
    /// The report of a run.
    pub struct Report {
        /// Always `cli.switchyard.dev/v1`.
        pub api_version: String,
        /// Always `Report`.
        pub kind: String,
        /// Version of the program that wrote it.
        pub version: String,
        pub job: String,
        /// Summary of the outcome.
        pub verdict: Verdict,
        /// Advice to make it faster, best first.
        pub advice: Vec<Item>,
        /// Advice that gains less than 1 % of the step.
        pub folded: Vec<Item>,
        /// Other notes.
        pub notes: Vec<Remark>,
        /// Rules without a finding.
        pub fine: Vec<Remark>,
        /// Rules that could not be checked, with what is missing.
        pub unknown: Vec<Remark>,
        /// What is missing or could not be read.
        pub gaps: Vec<String>,
        /// Loss over the steps.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub loss: Option<Loss>,
        /// Items per second over the steps.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub throughput: Option<Throughput>,
        /// The distribution of a step's time.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub step_time: Option<StepTime>,
        /// Comparison of ranks.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub skew: Option<RankSkew>,
        /// Reduction of gradients.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub all_reduce: Option<AllReduce>,
        /// Waiting of the stages of a pipeline.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub pipeline: Option<Pipeline>,
        /// Computation and communication by layer.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub layers: Option<Layers>,
        /// GPU kernels.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub kernels: Option<Kernels>,
        /// Memory of a rank.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub memory: Option<Memory>,
        /// Where the ranks ran.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub placement: Option<PlacementSection>,
        /// Events, in order.
        pub events: Vec<EventEntry>,
        /// What ran.
        pub setting: Setting,
    }

    /// The outcome of a run.
    pub struct Verdict {
        /// `complete`, `failed`, `stopped`, `running` or `unfinished`.
        pub result: String,
        /// The reason, as in the status.
        pub message: String,
        /// The main use of time, in one sentence.
        pub sentence: String,
        /// Model in a few words.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub model: Option<String>,
        /// Number of trainable parameters.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub parameters: Option<u64>,
        /// Ranks of the job.
        pub ranks: u32,
        /// Last step done.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub steps: Option<u64>,
        /// Steps of the job.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub total_steps: Option<u64>,
        /// Attempts that completed a step.
        pub attempts: u32,
        /// Steps repeated after restarts.
        pub repeated_steps: u64,
        /// Restarts after preemptions.
        #[serde(default)]
        pub preemptions: u32,
        /// Time from the first to the last step, seconds.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub seconds: Option<f64>,
        /// Training loss of the first step, nats.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub first_loss: Option<f64>,
        /// Smoothed training loss at the end, nats.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub last_loss: Option<f64>,
        /// Last loss on the validation split, nats.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub validation_loss: Option<f64>,
        /// The unit of throughput.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub item: Option<String>,
        /// Throughput of the whole job.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub items_per_second: Option<f64>,
        /// Mean wall time of a step after the warm-up, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub step_ms: Option<f64>,
        /// Its median, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub step_ms_p50: Option<f64>,
        /// Its 99th percentile, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub step_ms_p99: Option<f64>,
        /// The last straggler, otherwise the slowest rank of the last steps.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub slowest: Option<Slowest>,
        /// The critical rank, which determines the step time.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub slowest_rank: Option<u32>,
        /// Parts of the critical rank's step.
        pub parts: Vec<PartTime>,
        /// Step time with synthetic data, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub synthetic_step_ms: Option<f64>,
    }

    /// A remark of a rule.
    pub struct Remark {
        pub rule: String,
        /// The remark.
        pub text: String,
        /// Section with the evidence.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub chart: Option<Chart>,
    }
}

/// Time of a part of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartTime {
    pub part: Part,
    /// Mean time, ms.
    pub milliseconds: f64,
}

/// Non-zero parts, from the bottom of a stack to its top.
pub(super) fn part_times(parts: &Parts) -> Vec<PartTime> {
    let time = |part: Part| PartTime { part, milliseconds: round4(parts[part]) };
    Part::ALL.into_iter().map(time).filter(|time| time.milliseconds > 0.0).collect()
}

/// Advice with evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Item {
    pub rule: String,
    /// The observation.
    pub evidence: String,
    /// Alternatives, best first.
    pub changes: Vec<Change>,
    /// Other rules' advice about the same time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Change>,
    /// Minimum saving per step after all earlier advice, ms; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_ms: Option<f64>,
    /// How reliable the gain is.
    pub basis: Basis,
    /// Whether the result is in doubt, which takes precedence over speed.
    pub urgent: bool,
    /// Section with the evidence.
    pub chart: Chart,
}

/// Rounds to four significant digits: more would be noise, and differ between machines.
pub(super) fn round4(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    // Dividing by a power of ten gives the shortest decimal; multiplying by its inverse does not.
    if digits >= 0 {
        let factor = 10_f64.powi(digits.min(300));
        (value * factor).round() / factor
    } else {
        let factor = 10_f64.powi(-digits);
        (value / factor).round() * factor
    }
}

#[cfg(test)]
mod tests {
    use super::round4;

    #[test]
    fn four_digits_are_kept() {
        assert_eq!(
            [97.8765, 0.000123456, 123_456.0, -2.0, 0.0, f64::NAN].map(round4),
            [97.88, 0.0001235, 123_500.0, -2.0, 0.0, 0.0]
        );
    }
}
