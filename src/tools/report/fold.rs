//! Folds the steps of a rank while they are read: sums, windows, histograms, and for one rank the
//! curves.

use super::sample::{Part, Sample, Sums};
use super::windows::{Histogram, Merge, Windows};

/// Warm-up steps at the start of an attempt, which are counted separately.
const WARM_UP_STEPS: u64 = 10;
/// Most attempts tracked separately.
const MAX_ATTEMPTS: usize = 200;

/// A value within a window of steps.
#[derive(Debug, Clone, Default)]
pub(super) struct Spread {
    pub least: f64,
    pub most: f64,
    pub sum: f64,
    pub count: u64,
}

impl Spread {
    pub(super) fn add(&mut self, value: f64, times: u64) {
        self.least = if self.count == 0 { value } else { self.least.min(value) };
        self.most = if self.count == 0 { value } else { self.most.max(value) };
        self.sum += value * times as f64;
        self.count += times;
    }

    /// `None` when nothing was added.
    pub(super) fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

impl Merge for Spread {
    fn merge(&mut self, later: &Self) {
        if self.count == 0 {
            *self = later.clone();
        } else if later.count > 0 {
            self.least = self.least.min(later.least);
            self.most = self.most.max(later.most);
            self.sum += later.sum;
            self.count += later.count;
        }
    }
}

/// A count within a window of steps.
#[derive(Debug, Clone, Default)]
pub(super) struct Count(pub u64);

impl Merge for Count {
    fn merge(&mut self, later: &Self) {
        self.0 += later.0;
    }
}

/// An attempt from the perspective of one rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Attempt {
    pub number: u32,
    pub first_step: u64,
    /// Steps of the previous attempt that this one repeated.
    pub repeated: u64,
}

/// Data that is equal on all ranks and therefore kept for one.
#[derive(Debug, Clone, Default)]
pub(super) struct Curves {
    pub loss: Windows<Spread>,
    pub first_loss: Option<f64>,
    pub last_loss: Option<f64>,
    /// The first step with a NaN loss.
    pub lost_at: Option<u64>,
    pub step_times: Windows<Histogram>,
    pub checkpoints: Windows<Count>,
    pub attempts: Vec<Attempt>,
    /// Steps after the warm-up, followed by the number skipped because of an overflow.
    pub judged_steps: u64,
    pub skipped_steps: u64,
    pub largest_loss_scale: Option<f64>,
    pub last_loss_scale: Option<f64>,
}

/// The steps of a rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Fold {
    /// Sums over all attempts: of warm-up steps, followed by the others.
    pub warm: Sums,
    pub steady: Sums,
    pub windows: Windows<Sums>,
    /// Wall times of steps after the warm-up.
    pub times: Histogram,
    /// The same without checkpoints and without time between steps.
    pub work: Histogram,
    /// The time between steps.
    pub between: Histogram,
    pub last_step: u64,
    pub first_us: Option<i64>,
    pub last_us: Option<i64>,
    pub unreadable: u64,
    /// Kept for one rank of the job.
    pub curves: Option<Box<Curves>>,
    attempt: u32,
    steps_of_attempt: u64,
}

impl Fold {
    /// Steps and sums that represent the job's speed: without warm-up steps, unless there are no
    /// others.
    pub(super) fn typical(&self) -> &Sums {
        if self.steady.steps > 0 { &self.steady } else { &self.warm }
    }

    /// Adds the next step of the rank.
    pub(super) fn add(&mut self, sample: &Sample) {
        if sample.attempt != self.attempt || self.steps_of_attempt == 0 {
            self.begin_attempt(sample);
        }
        let warm = self.steps_of_attempt < WARM_UP_STEPS;
        self.steps_of_attempt += sample.steps;
        self.last_step = sample.step;
        self.first_us = self.first_us.or(sample.end_us);
        self.last_us = sample.end_us.or(self.last_us);
        if warm { &mut self.warm } else { &mut self.steady }.add(sample);
        self.windows.at(sample.step).add(sample);
        let total = sample.parts.total();
        if !warm {
            self.times.add(total, sample.steps);
            self.work.add(total - sample.parts[Part::Checkpoint] - sample.parts[Part::Other], sample.steps);
            self.between.add(sample.parts[Part::Other], sample.steps);
        }
        if let Some(curves) = &mut self.curves {
            curves.add(sample, warm);
        }
    }

    /// Steps that an earlier attempt had done are repeated; the windows keep the repetition.
    fn begin_attempt(&mut self, sample: &Sample) {
        let before = sample.step.saturating_sub(sample.steps);
        let repeated = self.last_step.saturating_sub(before);
        self.attempt = sample.attempt;
        self.steps_of_attempt = 0;
        self.windows.forget_after(before);
        if let Some(curves) = &mut self.curves {
            curves.loss.forget_after(before);
            curves.step_times.forget_after(before);
            curves.checkpoints.forget_after(before);
            if curves.attempts.len() < MAX_ATTEMPTS {
                curves.attempts.push(Attempt { number: sample.attempt, first_step: before + 1, repeated });
            }
        }
    }
}

impl Curves {
    fn add(&mut self, sample: &Sample, warm: bool) {
        match sample.loss {
            Some(loss) => {
                self.loss.at(sample.step).add(loss, sample.steps);
                self.first_loss = self.first_loss.or(Some(loss));
                self.last_loss = Some(loss);
            }
            None => self.lost_at = self.lost_at.or(Some(sample.step)),
        }
        self.step_times.at(sample.step).add(sample.parts.total(), sample.steps);
        if sample.parts[Part::Checkpoint] > 0.0 {
            self.checkpoints.at(sample.step).0 += 1;
        }
        if !warm {
            self.judged_steps += sample.steps;
            self.skipped_steps += u64::from(sample.skipped);
        }
        if let Some(scale) = sample.loss_scale {
            self.largest_loss_scale = Some(self.largest_loss_scale.map_or(scale, |most| most.max(scale)));
            self.last_loss_scale = Some(scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::Parts;
    use super::*;

    fn sample(attempt: u32, step: u64) -> Sample {
        let mut parts = Parts::default();
        parts[Part::Forward] = if attempt == 1 { 10.0 } else { 20.0 };
        Sample {
            attempt,
            step,
            steps: 1,
            end_us: Some(step as i64),
            parts,
            reduce_ms: None,
            reduce_bytes: None,
            left_bytes: None,
            read_ms: None,
            loss: Some(1.0),
            skipped: false,
            loss_scale: None,
        }
    }

    #[test]
    fn an_attempt_replaces_the_steps_that_it_repeats() {
        let mut fold = Fold { curves: Some(Box::default()), ..Fold::default() };
        (1..=50).for_each(|step| fold.add(&sample(1, step)));
        (41..=60).for_each(|step| fold.add(&sample(2, step)));
        let of_windows: Vec<f64> = fold.windows.iter().map(|(_, sums)| sums.parts.total()).collect();
        assert_eq!((of_windows.len(), of_windows[39], of_windows[40]), (60, 10.0, 20.0));
        let attempts = &fold.curves.as_ref().unwrap().attempts;
        assert_eq!(attempts[1], Attempt { number: 2, first_step: 41, repeated: 10 });
        assert_eq!((fold.warm.steps, fold.steady.steps), (20, 50), "each attempt warms up");
    }

    #[test]
    fn a_million_steps_take_no_more_memory_than_a_thousand() {
        let mut fold = Fold { curves: Some(Box::default()), ..Fold::default() };
        (1..=1_000_000).for_each(|step| fold.add(&sample(1, step)));
        let all: u64 = fold.windows.iter().map(|(_, sums)| sums.steps).sum();
        assert_eq!((all, fold.windows.width()), (1_000_000, 8192));
    }
}
