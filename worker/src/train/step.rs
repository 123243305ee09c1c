//! The trainer's side of a step: requests of the ranks, and handling of the outcome.
//!
//! An engine may be a step behind. If the trainer knows beforehand that something is due after this
//! many steps (a checkpoint, an evaluation, the last step), it waits for the outcome before it
//! begins the next step. Events known only from the outcome (a stop request, rank 0's clock, a
//! non-finite loss) take effect after the step that has begun meanwhile. All ranks have begun the
//! same steps when they learn of these events, so all do the same.
//!
//! With asynchronous parameter servers, ranks hold the same weights only where they meet: where
//! something is due, or at a step that a server announces because a rank requested it.
//!
//! With local steps, ranks hold different weights between two averages. Checkpoints, evaluations
//! and stops that become due there wait for the next average.

use super::TrainError;
use super::engine::{Flags, StepInput, StepOutcome};
use super::report::StepReport;
use super::trainer::Trainer;
use crate::optimizer::Schedule;
use std::time::{Duration, Instant};
use switchyard_worker_contract::recorder::Operation;

/// A rank's requests in a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepRequest {
    /// Stop the run.
    pub stop: bool,
}

/// What the ranks have agreed on in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepConsensus {
    /// A rank requested to stop: this step is the last one.
    pub stop: bool,
}

impl Trainer {
    /// Returns the outcome of the next optimizer step.
    ///
    /// # Errors
    /// The group failed, the reader ended, or the loss is not finite.
    pub fn step(&mut self, request: StepRequest) -> Result<(StepReport, StepConsensus), TrainError> {
        let start = Instant::now();
        let outcome = self.next_outcome(request);
        let StepOutcome { mut report, flags, skipped_steps, synchronised } =
            outcome.inspect_err(|error| self.report_failure(error))?;
        self.done = report.step;
        self.synchronised = synchronised;
        // Stages do different work.
        if !self.training.config.is_asynchronous() && self.training.config.pipeline.is_none() {
            self.pace.add(report.step, &flags.times, report.busy());
        }
        self.skipped_steps = skipped_steps;
        self.stopping |= flags.stop > 0.0;
        let at = Instant::now();
        if self.handle_checkpoints(flags)? {
            report.checkpoint = at.elapsed();
        }
        self.recorder.begin(Operation::Between, 0);
        report.total = start.elapsed();
        let can_stop = self.is_settled() && self.synchronised;
        Ok((report, StepConsensus { stop: self.stopping && can_stop }))
    }

    /// Begins steps until the outcome of one is known.
    fn next_outcome(&mut self, request: StepRequest) -> Result<StepOutcome, TrainError> {
        loop {
            if !self.is_settled() && self.must_settle() {
                let lost = || TrainError::Usage(format!("internal error: step {} has no outcome", self.begun));
                return self.engine.drain()?.ok_or_else(lost);
            }
            let config = &self.training.config;
            let peak = config.optimizer.learning_rate;
            let input = StepInput {
                step: self.begun + 1,
                learning_rate: Schedule::learning_rate(&config.schedule, peak, self.begun, self.training.total_steps),
                flags: Flags {
                    stop: f32::from(u8::from(request.stop)),
                    due: f32::from(u8::from(self.is_due_by_time())),
                    times: self.pace.report(self.begun + 1),
                    ..self.checkpoint_flags()
                },
                synchronise: config.synchronises(self.begun + 1, self.training.total_steps),
                exchange: config.exchanges(self.begun + 1, self.training.total_steps),
            };
            self.recorder.set_step(input.step);
            self.begun += 1;
            if let Some(outcome) = self.engine.step(&mut self.reader, &input)? {
                return Ok(outcome);
            }
        }
    }

    /// Whether the outcome of every begun step is known.
    pub(super) fn is_settled(&self) -> bool {
        self.begun == self.done
    }

    /// Whether something due every `every` steps (0: never) is due after the steps done.
    pub(super) fn is_due(&self, every: u64) -> bool {
        self.training.config.exchange_policy().is_due(every, self.done, self.training.total_steps)
    }

    /// Whether all begun steps must complete before the next one begins.
    fn must_settle(&self) -> bool {
        let (config, begun) = (&self.training.config, self.begun);
        let every = |steps: u64| config.exchange_policy().is_due(steps, begun, self.training.total_steps);
        let saves = config.checkpoint.as_ref().is_some_and(|checkpoint| every(checkpoint.every_steps));
        // The engine's spans are those of its last step.
        let profiled = config.profile.is_some_and(|profile| {
            (profile.from_step.saturating_sub(1)..profile.from_step + u64::from(profile.steps)).contains(&begun)
        });
        let last = begun >= self.training.total_steps;
        self.stopping || self.due || last || saves || every(config.evaluation.every_steps) || profiled
    }

    /// Whether a checkpoint is due by rank 0's clock.
    fn is_due_by_time(&self) -> bool {
        let (Some(config), Some(checkpoints)) = (&self.training.config.checkpoint, &self.checkpoints) else {
            return false;
        };
        let period = Duration::from_secs(config.period_seconds);
        self.group.rank() == 0 && !period.is_zero() && checkpoints.last.elapsed() >= period
    }

    /// Advances the current checkpoint, or starts one that is due; returns whether it started one.
    fn handle_checkpoints(&mut self, flags: Flags) -> Result<bool, TrainError> {
        let Some(every) = self.training.config.checkpoint.as_ref().map(|config| config.every_steps) else {
            return Ok(false);
        };
        // Flags from a step that began before the last checkpoint settled refer to that checkpoint.
        if self.done > self.settled && self.advance_checkpoint(flags.written.into(), flags.failed.into())? {
            self.settled = self.begun;
        }
        self.due |= flags.due > 0.0;
        let due = self.due && self.synchronised || self.is_due(every);
        // The end of the run saves a checkpoint anyway.
        let starts = due && self.is_settled() && self.done < self.training.total_steps;
        if starts {
            self.save_checkpoint()?;
        } else if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.saved.extend(checkpoints.saver.poll(false));
        }
        Ok(starts)
    }
}
