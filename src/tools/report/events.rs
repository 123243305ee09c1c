//! Folds the events of all ranks while they are read.

use super::fold::Spread;
use super::sample::{LAST_STEP, plausible};
use super::windows::Windows;
use jiff::Timestamp;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_worker_contract::event::{Event, Failure, Finished, GpuReport, Item, Ready, Slowest};

/// Most events kept verbatim; a job that fails more often fails the same way.
const MAX_KEPT: usize = 100;

/// Most GPUs tracked.
const MAX_GPUS: usize = 4096;

/// A line of `events.jsonl`.
#[derive(Debug, Deserialize)]
pub(super) struct EventLine {
    pub time: Option<Timestamp>,
    #[serde(default = "first")]
    pub attempt: u32,
    pub rank: u32,
    pub event: Event,
}

fn first() -> u32 {
    1
}

/// A failure with the time of its report.
#[derive(Debug)]
pub(super) struct ReportedFailure {
    pub time: Option<Timestamp>,
    pub attempt: u32,
    pub failure: Failure,
}

/// Times at which the ranks of an attempt were ready and done, and its checkpoints.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub ready: BTreeSet<u32>,
    pub ready_time: Option<Timestamp>,
    pub finished: BTreeSet<u32>,
    pub finished_time: Option<Timestamp>,
    /// Number of complete checkpoints, followed by the step of the last one.
    pub saved: u64,
    pub last_saved: u64,
    /// Number of abandoned checkpoints, followed by the reason for the last one.
    pub unsaved: u64,
    pub unsaved_cause: String,
    pub checkpoint_time: Option<Timestamp>,
}

/// All events, folded.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// The last one per rank.
    pub ready: BTreeMap<u32, Ready>,
    /// From the lowest rank that has one.
    pub finished: Option<Finished>,
    pub groups: BTreeMap<u32, Group>,
    pub failures: Vec<ReportedFailure>,
    pub more_failures: u64,
    pub evaluations: Windows<Spread>,
    pub last_evaluation: Option<f64>,
    pub total_steps: Option<u64>,
    pub items_per_second: Option<f64>,
    pub item: Option<Item>,
    /// Most threads of a rank's reader.
    pub reader_threads: Option<u32>,
    /// The last straggler, otherwise the last known slowest rank.
    pub slowest: Option<Slowest>,
    pub unreadable: u64,
    /// GPU report of each rank's last attempt.
    pub gpus: BTreeMap<u32, GpuReport>,
}

impl Events {
    /// Adds an event, except for the figures of a progress event.
    pub(super) fn add(&mut self, line: &EventLine) {
        let known = self.groups.len() < MAX_KEPT || self.groups.contains_key(&line.attempt);
        let group = known.then(|| self.groups.entry(line.attempt).or_default());
        match &line.event {
            Event::Ready(ready) => {
                self.ready.insert(line.rank, ready.clone());
                if let Some(group) = group {
                    group.ready.insert(line.rank);
                    group.ready_time = line.time.or(group.ready_time);
                }
            }
            Event::Progress(progress) => {
                self.total_steps = Some(progress.total_steps);
                self.item = Some(progress.item);
                self.reader_threads = self.reader_threads.max(progress.reader_threads);
                let rate = Some(progress.items_per_second).filter(|rate| rate.is_finite() && *rate > 0.0);
                self.items_per_second = rate.or(self.items_per_second);
                let was_straggler = self.slowest.is_some_and(|slowest| slowest.is_straggler());
                let slowest_after = progress.slowest.filter(|slowest| slowest.is_straggler() || !was_straggler);
                self.slowest = slowest_after.filter(|slowest| slowest.over_percent.is_finite()).or(self.slowest);
            }
            Event::Evaluation { step, loss, .. } => {
                if plausible(*loss).is_some() && (1..=LAST_STEP).contains(step) {
                    self.evaluations.at(*step).add(*loss, 1);
                    self.last_evaluation = Some(*loss);
                }
            }
            Event::Checkpoint(report) => {
                if let Some(group) = group {
                    group.checkpoint_time = line.time.or(group.checkpoint_time);
                    match &report.failure {
                        None => (group.saved, group.last_saved) = (group.saved + 1, report.step),
                        Some(cause) => (group.unsaved, group.unsaved_cause) = (group.unsaved + 1, cause.clone()),
                    }
                }
            }
            Event::Gpu(report) => {
                if self.gpus.len() < MAX_GPUS || self.gpus.contains_key(&report.rank) {
                    self.gpus.insert(report.rank, report.clone());
                }
            }
            Event::Standstill { .. } | Event::GpuTrouble { .. } | Event::Summary(_) | Event::Measured(_) => {}
            Event::Finished(finished) => {
                if self.finished.as_ref().is_none_or(|own| finished.rank <= own.rank) {
                    self.finished = Some(finished.clone());
                }
                if let Some(group) = group {
                    group.finished.insert(line.rank);
                    group.finished_time = line.time.or(group.finished_time);
                }
            }
            Event::Failed(failure) => {
                if self.failures.len() < MAX_KEPT {
                    self.failures.push(ReportedFailure {
                        time: line.time,
                        attempt: line.attempt,
                        failure: failure.clone(),
                    });
                } else {
                    self.more_failures += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_straggler_is_kept_after_the_ranks_catch_up() {
        let mut events = Events::default();
        let mut slowest_after = |over_percent: f64, steps: u64| {
            let line = format!(
                r#"{{"rank":0,"event":{{"event":"progress","rank":0,"step":{steps},"totalSteps":900,"intervalSteps":1,"loss":2.0,
                "learningRate":0.1,"gradientNorm":1.0,"itemsPerSecond":10.0,"stepMs":10.0,"maxStepMs":10.0,"forwardMs":3.0,
                "backwardMs":3.0,"communicationWaitMs":1.0,"inputWaitMs":0.5,"optimizerMs":1.0,
                "slowest":{{"rank":3,"nodeRank":1,"overPercent":{over_percent:?},"steps":{steps}}}}}}}"#
            );
            events.add(&serde_json::from_str(&line).unwrap());
            events.slowest.map(|slowest| slowest.over_percent)
        };
        assert_eq!(
            [slowest_after(90.0, 10), slowest_after(3.0, 100)],
            [Some(90.0), Some(3.0)],
            "10 steps make no straggler"
        );
        assert_eq!(
            [slowest_after(40.0, 100), slowest_after(2.0, 100), slowest_after(20.0, 100)],
            [Some(40.0), Some(40.0), Some(20.0)]
        );
    }

    #[test]
    fn many_failures_take_little_room() {
        let mut events = Events::default();
        for attempt in 1..500 {
            let line = format!(
                r#"{{"attempt":{attempt},"rank":1,"event":{{"event":"failed","rank":1,"originRank":1,"cause":"x","during":"y","exitCode":5}}}}"#
            );
            events.add(&serde_json::from_str(&line).unwrap());
        }
        assert_eq!((events.failures.len(), events.more_failures, events.groups.len()), (100, 399, 100));
    }
}
