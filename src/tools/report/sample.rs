//! Parses a step of a rank from its record or a progress event, and makes it safe to add up.

use super::windows::Merge;
use serde::{Deserialize, Serialize};
use std::ops::{Index, IndexMut};
use switchyard_worker_contract::event::Progress;

/// A part of a step. The parts are disjoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    /// Waiting for the reader.
    Input,
    /// Forward passes.
    Forward,
    /// Backward passes.
    Backward,
    /// Waiting for reductions after backward, which is exposed communication.
    Communication,
    /// Waiting for the weights that other ranks updated, with sharding: exposed too.
    Gather,
    /// Waiting for other stages of a pipeline.
    Pipeline,
    /// Norm, clipping, unscaling, optimizer.
    Optimizer,
    /// Copying state for a checkpoint, or waiting for the previous one.
    Checkpoint,
    /// Evaluation, progress reports, and everything else between two steps.
    Other,
}

impl Part {
    /// All parts, from the bottom of a stack to its top.
    pub const ALL: [Part; 9] = [
        Part::Forward,
        Part::Backward,
        Part::Optimizer,
        Part::Communication,
        Part::Gather,
        Part::Pipeline,
        Part::Input,
        Part::Checkpoint,
        Part::Other,
    ];

    /// The displayed name.
    pub fn word(self) -> &'static str {
        match self {
            Part::Input => "input wait",
            Part::Forward => "forward",
            Part::Backward => "backward",
            Part::Communication => "all-reduce wait",
            Part::Gather => "all-gather wait",
            Part::Pipeline => "stage wait",
            Part::Optimizer => "optimizer",
            Part::Checkpoint => "checkpoint",
            Part::Other => "other",
        }
    }
}

/// Time per part of a step, ms.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Parts([f64; Part::ALL.len()]);

impl Parts {
    /// The sum.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    /// Forward, backward and optimizer.
    pub fn compute(&self) -> f64 {
        self[Part::Forward] + self[Part::Backward] + self[Part::Optimizer]
    }

    /// Exposed communication.
    pub fn exposed(&self) -> f64 {
        self[Part::Communication] + self[Part::Gather]
    }

    /// Multiplies every part.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Parts {
        Parts(self.0.map(|part| part * factor))
    }

    /// Adds another one.
    pub fn add(&mut self, other: &Parts) {
        self.0.iter_mut().zip(other.0).for_each(|(own, other)| *own += other);
    }
}

impl Index<Part> for Parts {
    type Output = f64;

    fn index(&self, part: Part) -> &f64 {
        &self.0[part as usize]
    }
}

impl IndexMut<Part> for Parts {
    fn index_mut(&mut self, part: Part) -> &mut f64 {
        &mut self.0[part as usize]
    }
}

/// The longest accepted step, ms: 11 days.
const LONGEST: f64 = 1e9;
/// The largest accepted step number, which exceeds any run.
pub(super) const LAST_STEP: u64 = 1_000_000_000_000;
/// The largest accepted loss and loss scale; beyond it, sums and chart scales would overflow.
const LARGEST: f64 = 1e30;

/// Accepts a figure that can be added up and drawn.
pub(super) fn plausible(value: f64) -> Option<f64> {
    // Also rejects NaN.
    (value.abs() < LARGEST).then_some(value)
}

/// A line of a rank's record: `contract::record::StepRecord` with optional numbers, because JSON
/// writes NaN and infinity as null.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Line {
    attempt: u32,
    step: u64,
    end_us: Option<i64>,
    total_ms: Option<f64>,
    input_ms: Option<f64>,
    forward_ms: Option<f64>,
    backward_ms: Option<f64>,
    communication_ms: Option<f64>,
    gather_ms: Option<f64>,
    pipeline_ms: Option<f64>,
    optimizer_ms: Option<f64>,
    checkpoint_ms: Option<f64>,
    other_ms: Option<f64>,
    reduce_ms: Option<f64>,
    reduce_bytes: Option<u64>,
    left_bytes: Option<u64>,
    read_ms: Option<f64>,
    loss: Option<f64>,
    gradient_norm: Option<f64>,
    loss_scale: Option<f64>,
}

/// One step, or the mean of several.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub attempt: u32,
    /// The last step of the sample, from 1.
    pub step: u64,
    /// Number of steps in the sample.
    pub steps: u64,
    /// When the last step ended, microseconds since 1970.
    pub end_us: Option<i64>,
    pub parts: Parts,
    /// Time during which an all-reduce was running, ms; `None` if not measured.
    pub reduce_ms: Option<f64>,
    pub reduce_bytes: Option<u64>,
    /// Bytes not reduced yet when backward ended.
    pub left_bytes: Option<u64>,
    /// Total time of the reader's threads, ms.
    pub read_ms: Option<f64>,
    /// Nats; `None` if it was NaN.
    pub loss: Option<f64>,
    /// Whether the step was skipped because gradients overflowed.
    pub skipped: bool,
    pub loss_scale: Option<f64>,
}

fn time(value: Option<f64>) -> Option<f64> {
    value.filter(|value| (0.0..=LONGEST).contains(value))
}

impl Sample {
    /// Converts a line of a record; `None` if unusable.
    pub(super) fn of_line(line: &Line) -> Option<Sample> {
        let total = time(line.total_ms).filter(|_| (1..=LAST_STEP).contains(&line.step))?;
        let times = [
            (Part::Input, line.input_ms),
            (Part::Forward, line.forward_ms),
            (Part::Backward, line.backward_ms),
            (Part::Communication, line.communication_ms),
            (Part::Gather, line.gather_ms),
            (Part::Pipeline, line.pipeline_ms),
            (Part::Optimizer, line.optimizer_ms),
            (Part::Checkpoint, line.checkpoint_ms),
            (Part::Other, line.other_ms),
        ];
        Some(Sample {
            attempt: line.attempt,
            step: line.step,
            steps: 1,
            end_us: line.end_us,
            parts: parts(total, &times),
            reduce_ms: time(line.reduce_ms),
            reduce_bytes: line.reduce_bytes.filter(|bytes| *bytes < 1 << 50),
            left_bytes: line.left_bytes.filter(|bytes| *bytes < 1 << 50),
            read_ms: time(line.read_ms),
            loss: line.loss.and_then(plausible),
            skipped: line.gradient_norm.is_none(),
            loss_scale: line.loss_scale.and_then(plausible),
        })
    }

    /// Converts a progress event: means over an interval, without the fields that only records
    /// have.
    pub(super) fn of_progress(progress: &Progress, attempt: u32, end_us: Option<i64>) -> Option<Sample> {
        let total = time(Some(progress.step_ms)).filter(|_| (1..=LAST_STEP).contains(&progress.step))?;
        let times = [
            (Part::Input, Some(progress.input_wait_ms)),
            (Part::Forward, Some(progress.forward_ms)),
            (Part::Backward, Some(progress.backward_ms)),
            (Part::Communication, Some(progress.communication_wait_ms)),
            (Part::Pipeline, progress.pipeline_wait_ms),
            (Part::Optimizer, Some(progress.optimizer_ms)),
        ];
        Some(Sample {
            attempt,
            step: progress.step,
            steps: progress.interval_steps.clamp(1, progress.step),
            end_us,
            parts: parts(total, &times),
            reduce_ms: None,
            reduce_bytes: None,
            left_bytes: None,
            read_ms: None,
            loss: plausible(progress.loss),
            skipped: false,
            loss_scale: None,
        })
    }
}

/// The parts of a step. The rest of the total is `Other`, so that they always add up to it.
fn parts(total: f64, times: &[(Part, Option<f64>)]) -> Parts {
    let mut parts = Parts::default();
    for (part, value) in times {
        parts[*part] = time(*value).unwrap_or_default();
    }
    let rest = total - parts.total();
    parts[Part::Other] += rest.max(0.0);
    parts
}

/// Sums over steps.
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    pub steps: u64,
    pub parts: Parts,
    /// Steps with a measured all-reduce, followed by the measurements.
    pub reduced_steps: u64,
    pub reduce_ms: f64,
    pub reduce_bytes: f64,
    pub left_steps: u64,
    pub left_bytes: f64,
    pub read_steps: u64,
    pub read_ms: f64,
}

impl Sums {
    pub(super) fn add(&mut self, sample: &Sample) {
        let weight = sample.steps as f64;
        self.steps += sample.steps;
        self.parts.add(&sample.parts.scaled(weight));
        if let Some(reduce_ms) = sample.reduce_ms {
            self.reduced_steps += sample.steps;
            self.reduce_ms += weight * reduce_ms;
            self.reduce_bytes += weight * sample.reduce_bytes.unwrap_or_default() as f64;
        }
        if let Some(left_bytes) = sample.left_bytes {
            self.left_steps += sample.steps;
            self.left_bytes += weight * left_bytes as f64;
        }
        if let Some(read_ms) = sample.read_ms {
            self.read_steps += sample.steps;
            self.read_ms += weight * read_ms;
        }
    }

    /// Means per step, ms; `None` without a step.
    pub(super) fn mean(&self) -> Option<Parts> {
        (self.steps > 0).then(|| self.parts.scaled(1.0 / self.steps as f64))
    }
}

impl Merge for Sums {
    fn merge(&mut self, later: &Self) {
        self.steps += later.steps;
        self.parts.add(&later.parts);
        self.reduced_steps += later.reduced_steps;
        self.reduce_ms += later.reduce_ms;
        self.reduce_bytes += later.reduce_bytes;
        self.left_steps += later.left_steps;
        self.left_bytes += later.left_bytes;
        self.read_steps += later.read_steps;
        self.read_ms += later.read_ms;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::record::StepRecord;

    #[test]
    fn a_worker_record_is_read_and_its_parts_add_up_to_the_total() {
        let record = StepRecord {
            attempt: 1,
            step: 3,
            total_ms: 100.0,
            forward_ms: 30.0,
            backward_ms: 50.0,
            communication_ms: 4.0,
            gather_ms: 2.0,
            reduce_ms: 9.0,
            ..StepRecord::default()
        };
        let line: Line = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        let sample = Sample::of_line(&line).unwrap();
        assert_eq!((sample.parts.total(), sample.parts[Part::Other], sample.skipped), (100.0, 14.0, true));
        assert_eq!((sample.parts[Part::Gather], sample.parts.exposed()), (2.0, 6.0));
    }

    #[test]
    fn nan_is_absent_and_a_step_without_a_time_is_skipped() {
        let record = StepRecord { attempt: 1, step: 3, total_ms: 5.0, loss: f32::NAN, ..StepRecord::default() };
        let sample = |record: StepRecord| {
            Sample::of_line(&serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap())
        };
        assert_eq!(sample(record).unwrap().loss, None);
        for total_ms in [f32::NAN, f32::INFINITY, -1.0, 1e20] {
            assert!(sample(StepRecord { total_ms, ..record }).is_none(), "{total_ms}");
        }
        assert!(sample(StepRecord { step: 0, ..record }).is_none());
    }
}
