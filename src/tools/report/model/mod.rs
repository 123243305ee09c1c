//! The report as data: what `report.json` holds, and all that the page shows.
//!
//! Fields are only added. The unit is in the name; unknown is absent.

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
mod setting;

pub use charts::{AllReduce, Loss, LossWindow, Point, RankSkew, Restart, SkewRow, StepTime, StepWindow, Throughput};
pub use kernels::{KernelRow, Kernels};
pub use setting::{Amount, GpuSeen, Happened, Memory, Placed, RankPlace, Setting, Variable};

use super::advice::{Basis, Change, Chart};
use super::sample::{Part, Parts};
use serde::{Deserialize, Serialize};
use switchyard_worker_contract::event::Slowest;

/// Version of the form.
pub const API_VERSION: &str = "cli.switchyard.dev/v1";
pub const KIND: &str = "Report";

data! {
    /// A run in figures.
    pub struct Report {
        /// Always `cli.switchyard.dev/v1`.
        pub api_version: String,
        /// Always `Report`.
        pub kind: String,
        /// Version of the program that made it.
        pub version: String,
        pub job: String,
        /// How it went, in short.
        pub verdict: Verdict,
        /// What would make it faster, best first.
        pub advice: Vec<Item>,
        /// Advice that gains less than 1 % of the step.
        pub folded: Vec<Item>,
        /// Other notes.
        pub notes: Vec<Remark>,
        /// Rules without a finding.
        pub fine: Vec<Remark>,
        /// Rules that could not be checked, and what is missing.
        pub unknown: Vec<Remark>,
        /// What is missing or could not be read.
        pub gaps: Vec<String>,
        /// Loss over the steps.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub loss: Option<Loss>,
        /// Items per second over the steps.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub throughput: Option<Throughput>,
        /// Where the time of a step goes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub step_time: Option<StepTime>,
        /// Ranks against each other.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub skew: Option<RankSkew>,
        /// Reduction of gradients.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub all_reduce: Option<AllReduce>,
        /// Kernels of a GPU.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub kernels: Option<Kernels>,
        /// Memory of a rank.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub memory: Option<Memory>,
        /// Where the ranks ran.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub placement: Option<Placed>,
        /// Events, in order.
        pub events: Vec<Happened>,
        /// What ran.
        pub setting: Setting,
    }

    /// How a run went.
    pub struct Verdict {
        /// `complete`, `failed`, `stopped`, `running` or `unfinished`.
        pub result: String,
        /// Why, in the words of the status.
        pub message: String,
        /// One sentence: where the time goes.
        pub sentence: String,
        /// Model in a few words.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub model: Option<String>,
        /// Trainable numbers.
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
        /// Attempts that made a step.
        pub attempts: u32,
        /// Steps that were done again after a restart.
        pub repeated_steps: u64,
        /// From the first to the last step, seconds.
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
        /// What throughput counts.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub item: Option<String>,
        /// Of the whole job.
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
        /// The last straggler; without one, the slowest rank of the last steps.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub slowest: Option<Slowest>,
        /// The rank whose time is the time of the step.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub slowest_rank: Option<u32>,
        /// Parts of the step of that rank.
        pub parts: Vec<PartTime>,
        /// With synthetic data, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub synthetic_step_ms: Option<f64>,
    }

    /// A remark of a rule.
    pub struct Remark {
        pub rule: String,
        /// What it says.
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

/// Parts that are not 0, from the bottom of a stack to its top.
pub(super) fn part_times(parts: &Parts) -> Vec<PartTime> {
    let time = |part: Part| PartTime { part, milliseconds: tidy(parts[part]) };
    Part::ALL.into_iter().map(time).filter(|time| time.milliseconds > 0.0).collect()
}

/// Advice with evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Item {
    pub rule: String,
    /// What was seen.
    pub evidence: String,
    /// What to do: alternatives, the best first.
    pub changes: Vec<Change>,
    /// Advice of other rules about the same time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Change>,
    /// What it saves per step at least, after the advice before it, ms; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_ms: Option<f64>,
    /// How reliable the gain is.
    pub basis: Basis,
    /// The result is in doubt: this comes before speed.
    pub urgent: bool,
    /// Section with the evidence.
    pub chart: Chart,
}

/// Four significant digits: more would be noise, and would differ between machines.
pub(super) fn tidy(value: f64) -> f64 {
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
    use super::tidy;

    #[test]
    fn four_digits_are_kept() {
        assert_eq!(
            [97.8765, 0.000123456, 123_456.0, -2.0, 0.0, f64::NAN].map(tidy),
            [97.88, 0.0001235, 123_500.0, -2.0, 0.0, 0.0]
        );
    }
}
