//! Combines the reports of several ranks into one. The slowest rank determines the speed of the
//! group.

use crate::event::{GpuTrouble, Progress, Stuck, Summary};
use std::collections::VecDeque;
use std::ops::Range;

/// No estimate before this step, because the first steps warm up caches.
const FIRST_ESTIMATE_STEP: u64 = 10;

/// Number of recent steps whose median time the estimate uses.
const ESTIMATE_STEPS: u64 = 50;

/// Time breakdown of a step, over an interval of steps. Times are means per optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Breakdown {
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Global gradient norm of the last step, before clipping.
    pub gradient_norm: f64,
    /// Wall-clock time per step, ms.
    pub step_ms: f64,
    /// Forward, backward and optimizer time of the slowest rank, ms.
    pub compute_ms: f64,
    /// Time that the slowest rank waited for reductions, ms.
    pub communication_wait_ms: f64,
    /// Time that the slowest rank waited for other stages, ms; only with pipelines.
    pub pipeline_wait_ms: Option<f64>,
    /// Time that the slowest rank waited for input, ms.
    pub input_wait_ms: f64,
    /// The rest of the slowest rank's step, ms.
    pub other_ms: f64,
}

/// Accumulates the reports of one attempt.
#[derive(Debug)]
pub struct Fold {
    first_rank: u32,
    latest: Vec<Option<Progress>>,
    recent: VecDeque<(u64, f64)>,
    validation_loss: Option<f64>,
    accuracy: Option<f64>,
    stuck: Option<Stuck>,
    gpu: Option<GpuTrouble>,
}

impl Fold {
    /// Starts empty, for these ranks.
    pub fn new(ranks: Range<u32>) -> Self {
        Fold {
            first_rank: ranks.start,
            latest: vec![None; ranks.len()],
            recent: VecDeque::new(),
            validation_loss: None,
            accuracy: None,
            stuck: None,
            gpu: None,
        }
    }

    /// Records validation loss and accuracy.
    pub fn evaluation(&mut self, loss: f64, accuracy: Option<f64>) {
        self.validation_loss = Some(loss);
        self.accuracy = accuracy;
    }

    /// Records a hung rank; `None`: all ranks make progress.
    pub fn standstill(&mut self, stuck: Option<Stuck>) {
        self.stuck = stuck;
    }

    /// Records the most urgent GPU problem; `None`: none any more.
    pub fn gpu_trouble(&mut self, gpu: Option<GpuTrouble>) {
        self.gpu = gpu;
    }

    /// Adds the report of one rank; returns the combined report once all ranks have reported the
    /// same step.
    pub fn progress(&mut self, progress: Progress) -> Option<(Summary, Breakdown)> {
        let step = progress.step;
        let position = progress.rank.checked_sub(self.first_rank)?;
        *self.latest.get_mut(position as usize)? = Some(progress);
        let reports: Option<Vec<&Progress>> =
            self.latest.iter().map(|report| report.as_ref().filter(|r| r.step == step)).collect();
        let reports = reports?;
        let compute = |report: &Progress| report.forward_ms + report.backward_ms + report.optimizer_ms;
        let own = |report: &Progress| compute(report) + report.input_wait_ms;
        let slowest = *reports.iter().max_by(|a, b| own(a).total_cmp(&own(b)))?;
        let first = reports[0];
        let step_ms = slowest.step_ms;
        self.recent.push_back((first.interval_steps, step_ms));
        while self.recent.len() > 1 && self.recent.iter().map(|(steps, _)| steps).sum::<u64>() > ESTIMATE_STEPS {
            self.recent.pop_front();
        }
        let left = first.total_steps.saturating_sub(step) as f64;
        let percent = |part: f64| if step_ms > 0.0 { 100.0 * part / step_ms } else { 0.0 };
        let summary = Summary {
            step,
            total_steps: first.total_steps,
            loss: first.loss,
            validation_loss: self.validation_loss,
            accuracy: self.accuracy,
            loss_scale: first.loss_scale,
            skipped_steps: first.skipped_steps,
            slowest: first.slowest,
            stuck: self.stuck,
            gpu: self.gpu,
            items_per_second: first.items_per_second,
            item: first.item,
            remaining_seconds: (step >= FIRST_ESTIMATE_STEP).then(|| left * median(&self.recent) / 1000.0),
            communication_percent: percent(slowest.communication_wait_ms),
            input_percent: percent(slowest.input_wait_ms),
        };
        let waits =
            slowest.communication_wait_ms + slowest.pipeline_wait_ms.unwrap_or_default() + slowest.input_wait_ms;
        let breakdown = Breakdown {
            learning_rate: first.learning_rate,
            gradient_norm: first.gradient_norm,
            step_ms,
            compute_ms: compute(slowest),
            communication_wait_ms: slowest.communication_wait_ms,
            pipeline_wait_ms: slowest.pipeline_wait_ms,
            input_wait_ms: slowest.input_wait_ms,
            other_ms: (step_ms - compute(slowest) - waits).max(0.0),
        };
        Some((summary, breakdown))
    }
}

fn median(recent: &VecDeque<(u64, f64)>) -> f64 {
    let mut times: Vec<f64> = recent.iter().map(|(_, ms)| *ms).collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Item, Slowest};

    fn report(rank: u32, step: u64, step_ms: f64, compute: f64, wait: f64) -> Progress {
        Progress {
            rank,
            step,
            total_steps: 100,
            interval_steps: 10,
            loss: 2.0,
            learning_rate: 0.001,
            gradient_norm: 1.0,
            items_per_second: 1000.0,
            item: Item::Tokens,
            step_ms,
            max_step_ms: step_ms,
            forward_ms: compute / 3.0,
            backward_ms: compute / 3.0,
            communication_wait_ms: wait,
            pipeline_wait_ms: None,
            input_wait_ms: 1.0,
            reader_threads: None,
            optimizer_ms: compute / 3.0,
            loss_scale: None,
            skipped_steps: None,
            slowest: None,
        }
    }

    #[test]
    fn waits_for_every_rank_and_shows_the_slowest() {
        let mut fold = Fold::new(0..2);
        let slowest = Some(Slowest { rank: 5, node_rank: 1, over_percent: 20.0, steps: 100 });
        assert_eq!(fold.progress(Progress { slowest, ..report(0, 10, 100.0, 80.0, 18.0) }), None);
        let (summary, breakdown) = fold.progress(report(1, 10, 100.0, 95.0, 3.0)).unwrap();
        assert_eq!((breakdown.compute_ms.round(), summary.communication_percent), (95.0, 3.0));
        assert!((breakdown.other_ms - 1.0).abs() < 1e-9);
        assert_eq!(summary.remaining_seconds, Some(9.0));
        assert_eq!(
            summary.slowest, slowest,
            "rank 0 compares all ranks, including those that do not report to this fold"
        );
    }

    #[test]
    fn a_rank_that_waits_for_its_reader_is_the_slowest() {
        let mut fold = Fold::new(0..2);
        fold.progress(Progress { input_wait_ms: 40.0, ..report(0, 10, 100.0, 50.0, 5.0) });
        let (summary, breakdown) = fold.progress(report(1, 10, 100.0, 60.0, 39.0)).unwrap();
        assert_eq!((breakdown.input_wait_ms, summary.input_percent, summary.communication_percent), (40.0, 40.0, 5.0));
    }

    #[test]
    fn waiting_for_other_stages_is_neither_communication_nor_the_rest() {
        let report = Progress { pipeline_wait_ms: Some(20.0), ..report(0, 10, 100.0, 70.0, 5.0) };
        let (summary, breakdown) = Fold::new(0..1).progress(report).unwrap();
        assert_eq!((breakdown.pipeline_wait_ms, summary.communication_percent), (Some(20.0), 5.0));
        assert!((breakdown.other_ms - 4.0).abs() < 1e-9);
    }

    #[test]
    fn estimates_from_the_tenth_step_on_with_the_median() {
        let mut fold = Fold::new(0..1);
        let (first, _) = fold.progress(report(0, 5, 1000.0, 1.0, 0.0)).unwrap();
        assert_eq!(first.remaining_seconds, None);
        for step in [20, 30, 40] {
            fold.progress(report(0, step, 100.0, 1.0, 0.0));
        }
        let (last, _) = fold.progress(report(0, 50, 5000.0, 1.0, 0.0)).unwrap();
        assert_eq!(last.remaining_seconds, Some(5.0), "one slow interval does not move the median");
    }

    #[test]
    fn an_unknown_rank_is_ignored() {
        assert_eq!(Fold::new(0..1).progress(report(7, 10, 1.0, 1.0, 0.0)), None);
    }
}
