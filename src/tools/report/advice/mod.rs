//! Advice rules: each checks figures of the run and returns advice with evidence, no finding, or
//! the reason why it cannot tell.
//!
//! ```text
//! Facts ─> RULES (diagnosis order) ─> Finding ─> rank (no time promised twice) ─> Ranked
//! ```

mod between;
mod change;
mod communication;
mod compute;
mod gpu;
mod input;
mod kernels;
mod memory;
#[cfg(test)]
mod patches;
mod pipeline;
mod precision;
mod rank;
mod skew;
#[cfg(test)]
mod tests;

pub use change::{Basis, Change};
pub(super) use communication::bus_bandwidth;
pub(super) use rank::{Item, Ranked, rank};

use super::facts::Facts;
use super::sample::Part;
use change::{Field, LOSS_MAY_CHANGE};
use serde::{Deserialize, Serialize};

#[derive(Debug)]
pub struct Rule {
    /// Short name.
    pub id: &'static str,
    /// Number of its question in diagnosis order: 1 one device, 2 input, 3 gaps between steps, 6
    /// tensor cores and precision, 7 memory, 8 all-reduce, 9 skew.
    pub question: u8,
    /// What it checks, and when it applies.
    pub threshold: &'static str,
    /// How the gain is estimated.
    pub gain: &'static str,
    /// The origin of the threshold.
    pub source: &'static str,
    /// The check.
    pub check: fn(&Facts) -> Finding,
}

/// All rules, in diagnosis order.
pub const RULES: [Rule; 28] = [
    precision::LOST_LOSS,
    gpu::ERRORS,
    gpu::CLOCKS,
    gpu::LINK,
    compute::TOO_MANY_THREADS,
    compute::TOO_FEW_THREADS,
    compute::WARM_UP,
    compute::NOISE,
    kernels::SLOW_KERNEL,
    input::INPUT_BOUND,
    between::CHECKPOINTS,
    between::FETCHES,
    between::EVALUATION,
    between::GAPS,
    kernels::IDLE_GPU,
    precision::SHAPES,
    precision::AMP_OFF,
    kernels::EXACT_PRODUCTS,
    precision::OVERFLOWS,
    precision::LOSS_SCALE,
    memory::NEAR_LIMIT,
    memory::LARGER_BATCH,
    communication::ONE_BIG,
    communication::MANY_SMALL,
    communication::BOUND,
    communication::PLACEMENT,
    pipeline::IDLE,
    skew::STRAGGLER,
];

/// The section of the report that shows the evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Chart {
    /// Loss over the steps.
    Loss,
    /// Parts of the step.
    StepTime,
    /// Comparison of ranks.
    Skew,
    AllReduce,
    Memory,
    /// GPU kernels.
    Kernels,
    /// Ranks, CPUs, nodes.
    Placement,
    /// The configuration.
    Manifest,
}

impl Chart {
    /// HTML anchor of the section.
    pub fn anchor(self) -> &'static str {
        match self {
            Chart::Loss => "loss",
            Chart::StepTime => "step-time",
            Chart::Skew => "skew",
            Chart::AllReduce => "all-reduce",
            Chart::Memory => "memory",
            Chart::Kernels => "kernels",
            Chart::Placement => "placement",
            Chart::Manifest => "manifest",
        }
    }
}

/// Advice with evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The observation, with figures.
    pub evidence: String,
    /// Alternatives that save the same time, best first.
    pub changes: Vec<Change>,
    /// Whether the result of the run is in doubt, which takes precedence over speed.
    pub urgent: bool,
    /// Parts of the step that the gain is taken from.
    pub parts: &'static [Part],
    /// Section with the evidence.
    pub chart: Chart,
}

impl Advice {
    /// Advice about speed. If no change is left, the observation becomes a note.
    fn about(
        parts: &'static [Part],
        chart: Chart,
        evidence: String,
        changes: impl IntoIterator<Item = Option<Change>>,
    ) -> Finding {
        let changes: Vec<Change> = changes.into_iter().flatten().collect();
        if changes.is_empty() {
            return Finding::Note(evidence, chart);
        }
        Finding::Advice(Advice { evidence, changes, urgent: false, parts, chart })
    }
}

/// The result of a rule.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// There is something to gain.
    Advice(Advice),
    /// There is something worth knowing.
    Note(String, Chart),
    /// Checked, with nothing to gain.
    Fine(String),
    /// Not checkable; says what is missing.
    Unknown(&'static str),
    /// The rule does not apply to this job.
    NotApplicable,
}

/// Formats milliseconds.
fn ms(milliseconds: f64) -> String {
    switchyard_core::units::three_digits(milliseconds)
}

/// `12 of 98 ms (12 %)`.
fn of_step(facts: &Facts, milliseconds: f64) -> String {
    format!("{} of {} ms ({:.0} %)", ms(milliseconds), ms(facts.step_ms()), facts.percent(milliseconds))
}
