//! The trainer's side of a step: what the ranks ask for, and what becomes of its outcome.
//!
//! An engine may be a step behind. What the trainer knows beforehand (a checkpoint or an evaluation that is due after this
//! many steps, the last step) it awaits before it begins the next step. What only the outcome says (a rank was asked to
//! stop, the clock of rank 0, a loss that is not finite) takes effect after the step that has begun meanwhile: all ranks
//! have begun the same steps when they learn of it, so all do the same.

use super::TrainError;
use super::engine::{Flags, Given, Told};
use super::report::StepReport;
use super::trainer::Trainer;
use crate::optimizer::Schedule;
use std::time::{Duration, Instant};
use switchyard_worker_contract::recorder::Operation;

/// What a rank asks for in a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wishes {
    /// The rank was asked to stop.
    pub stop: bool,
}

/// What the ranks have agreed on in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreed {
    /// A rank was asked to stop: this step is the last one.
    pub stop: bool,
}

impl Trainer {
    /// The outcome of the next optimizer step.
    ///
    /// # Errors
    /// The group failed, the reader ended, or the loss is not finite.
    pub fn step(&mut self, wishes: Wishes) -> Result<(StepReport, Agreed), TrainError> {
        let start = Instant::now();
        let outcome = self.outcome(wishes);
        let Told { mut report, flags, skipped_steps } = outcome.inspect_err(|error| self.tell(error))?;
        self.done = report.step;
        self.pace.take(report.step, &flags.times, report.own());
        self.skipped_steps = skipped_steps;
        self.stopping |= flags.stop > 0.0;
        let at = Instant::now();
        if self.care_for_checkpoints(flags)? {
            report.checkpoint = at.elapsed();
        }
        self.recorder.begin(Operation::Between, 0);
        report.total = start.elapsed();
        Ok((report, Agreed { stop: self.stopping && self.is_at_rest() }))
    }

    /// Begins steps until the outcome of one is known.
    fn outcome(&mut self, wishes: Wishes) -> Result<Told, TrainError> {
        loop {
            if !self.is_at_rest() && self.awaits() {
                let lost = || TrainError::Usage(format!("internal error: step {} has no outcome", self.begun));
                return self.engine.drain()?.ok_or_else(lost);
            }
            let config = &self.training.config;
            let peak = config.optimizer.learning_rate;
            let given = Given {
                step: self.begun + 1,
                learning_rate: Schedule::learning_rate(&config.schedule, peak, self.begun, self.training.total_steps),
                flags: Flags {
                    stop: f32::from(u8::from(wishes.stop)),
                    due: f32::from(u8::from(self.due_by_time())),
                    times: self.pace.tell(self.begun + 1),
                    ..self.checkpoint_flags()
                },
            };
            self.recorder.step(given.step);
            self.begun += 1;
            if let Some(told) = self.engine.step(&mut self.reader, &given)? {
                return Ok(told);
            }
        }
    }

    /// Whether the outcome of every step that has begun is known.
    pub(super) fn is_at_rest(&self) -> bool {
        self.begun == self.done
    }

    /// Whether the steps that have begun must be over before the next one begins.
    fn awaits(&self) -> bool {
        let (config, begun) = (&self.training.config, self.begun);
        let every = |steps: u64| steps > 0 && begun.is_multiple_of(steps);
        let saves = config.checkpoint.as_ref().is_some_and(|checkpoint| every(checkpoint.every_steps));
        // What is recorded is what ran in the last step.
        let profiled = config.profile.is_some_and(|profile| {
            (profile.from_step.saturating_sub(1)..profile.from_step + u64::from(profile.steps)).contains(&begun)
        });
        let last = begun >= self.training.total_steps;
        self.stopping || self.due || last || saves || every(config.evaluation.every_steps) || profiled
    }

    /// Whether rank 0's clock says that a checkpoint is due.
    fn due_by_time(&self) -> bool {
        let (Some(config), Some(checkpoints)) = (&self.training.config.checkpoint, &self.checkpoints) else {
            return false;
        };
        let period = Duration::from_secs(config.period_seconds);
        self.group.rank() == 0 && !period.is_zero() && checkpoints.last.elapsed() >= period
    }

    /// Advances the current checkpoint, or starts one that is due; returns whether it did.
    fn care_for_checkpoints(&mut self, flags: Flags) -> Result<bool, TrainError> {
        let Some(every) = self.training.config.checkpoint.as_ref().map(|config| config.every_steps) else {
            return Ok(false);
        };
        // What a step says that had begun before the last checkpoint was settled, it says about that one.
        if self.done > self.settled && self.advance_checkpoint(flags.written.into(), flags.failed.into())? {
            self.settled = self.begun;
        }
        self.due |= flags.due > 0.0;
        let due = self.due || every > 0 && self.done.is_multiple_of(every);
        // The end of the run saves anyway.
        let begins = due && self.is_at_rest() && self.done < self.training.total_steps;
        if begins {
            self.save_checkpoint()?;
        } else if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.saved.extend(checkpoints.saver.poll(false));
        }
        Ok(begins)
    }
}
