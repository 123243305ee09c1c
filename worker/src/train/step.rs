//! The step: micro-batches through the network, gradients through the buckets, weights through the optimizer.
//!
//! ```text
//! micro-batches   read -> forward -> backward (scaled loss); in the last one each all-reduce starts as soon as its
//! buckets are complete
//! buckets         wait -> sum of squares           without clipping and mixed precision: its optimizer step right away
//! all             overflow? skip : unscale, clip, optimizer step        running statistics        checkpoint, if due
//! ```

use super::TrainError;
use super::buckets::Flags;
use super::sink::{BucketSink, Metrics, Start};
use super::trainer::{StepReport, Trainer};
use crate::optimizer::{Schedule, gradient_scale, sum_of_squares};
use std::time::{Duration, Instant};
use switchyard_worker_contract::recorder::Operation;

/// With a static loss scale, steps that may be skipped in a row before the run gives up.
const MOST_SKIPPED: u64 = 100;

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
    /// One optimizer step.
    ///
    /// # Errors
    /// The group failed, the reader ended, or the loss is not finite.
    pub fn step(&mut self, wishes: Wishes) -> Result<(StepReport, Agreed), TrainError> {
        let start = Instant::now();
        let scale = self.state.loss_scale();
        let number = self.state.step + 1;
        self.recorder.step(number);
        let mut report = StepReport { step: number, loss_scale: f64::from(scale), ..StepReport::default() };
        let flags = Flags {
            stop: f32::from(u8::from(wishes.stop)),
            due: f32::from(u8::from(self.due_by_time())),
            ..self.checkpoint_flags()
        };
        if let Some(wire) = &self.state.wire {
            self.communicator.set_wire_scale(wire.scale());
        }
        self.compute(scale, flags, &mut report)?;
        report.left_bytes = self.bytes_left();
        let squares = self.collect(scale, &mut report)?;
        let at = Instant::now();
        self.recorder.begin(Operation::Update, 0);
        let (flags, statistics) = self.buckets.read_metrics(&self.communicator);
        report.loss = f64::from(flags.loss);
        self.statistics.copy_from_slice(statistics);
        self.update(squares, scale, &mut report)?;
        report.optimizer += at.elapsed();
        self.state.step = number;
        let at = Instant::now();
        if self.care_for_checkpoints(flags)? {
            report.checkpoint = at.elapsed();
        }
        self.recorder.begin(Operation::Between, 0);
        report.reduce = self.time_of_reductions();
        report.total = start.elapsed();
        Ok((report, Agreed { stop: flags.stop > 0.0 }))
    }

    /// Runs all micro-batches and starts all reductions.
    fn compute(&mut self, scale: f32, mut flags: Flags, report: &mut StepReport) -> Result<(), TrainError> {
        let config = &self.blueprint.config;
        let merge = config.batch_merge;
        // Gradients are those of the mean over the global batch: every micro-batch of every rank has the same weight.
        let share = 1.0 / (merge as f32 * self.blueprint.world as f32);
        let when = match (config.overlap.enabled, config.overlap.sync_all_reduce) {
            (false, _) => Start::Later,
            (true, false) => Start::AtOnce,
            (true, true) => Start::AndWait,
        };
        let sync = config.overlap.sync_all_reduce;
        let mut loss = 0.0;
        self.statistics.fill(0.0);
        self.makings.clear();
        for micro_batch in 0..merge {
            let at = Instant::now();
            self.recorder.begin(Operation::Input, micro_batch);
            let batch = self.reader.next()?;
            let read = Instant::now();
            self.recorder.begin(Operation::Forward, micro_batch);
            let network = &mut self.blueprint.network;
            loss += network.forward(self.state.weights(), batch).loss;
            for (sum, own) in self.statistics.iter_mut().zip(network.batch_statistics()) {
                *sum += share * own;
            }
            let forwarded = Instant::now();
            self.recorder.begin(Operation::Backward, micro_batch);
            let last = micro_batch + 1 == merge;
            flags.loss = loss as f32 * share;
            let mut sink = BucketSink {
                communicator: &mut self.communicator,
                places: &self.places,
                accumulate: micro_batch > 0,
                start: if last { when } else { Start::Later },
                metrics: Metrics { buckets: &self.buckets, flags, statistics: &self.statistics },
                failed: None,
            };
            network.backward(self.state.weights(), batch, scale * share, &mut sink);
            if last {
                if when == Start::Later {
                    for (number, run) in self.buckets.runs.iter().enumerate() {
                        sink.begin(number, run.clone());
                        if sync {
                            sink.wait(run.clone());
                        }
                    }
                }
                let metrics = self.buckets.of_metrics();
                if metrics == self.buckets.gradients {
                    sink.begin(metrics, metrics..metrics + 1);
                }
            }
            if let Some(error) = sink.failed {
                return Err(error.into());
            }
            if let Some(making) = batch.making {
                report.read += making.took();
                self.makings.push(making);
            }
            report.input_wait += read - at;
            report.forward += forwarded - read;
            report.backward += forwarded.elapsed();
        }
        Ok(())
    }

    /// Whether the optimizer may update a bucket before the others have arrived, because nothing depends on all of
    /// them.
    fn steps_at_once(&self) -> bool {
        let optimizer = &self.blueprint.config.optimizer;
        optimizer.gradient_clip_norm.is_none() && self.state.scaler.is_none() && self.state.wire.is_none()
    }

    fn learning_rate(&self) -> f64 {
        let config = &self.blueprint.config;
        let peak = config.optimizer.learning_rate;
        Schedule::learning_rate(&config.schedule, peak, self.state.step, self.blueprint.total_steps)
    }

    /// Waits for all buckets. Returns the sum of squares of the reduced gradients, which still contain the loss scale.
    fn collect(&mut self, scale: f32, report: &mut StepReport) -> Result<f64, TrainError> {
        let at_once = self.steps_at_once();
        if at_once {
            self.state.optimizer.begin_step(self.learning_rate(), gradient_scale(0.0, None, f64::from(scale)));
        }
        let mut squares = 0.0;
        let metrics = self.buckets.of_metrics();
        let beside = (metrics >= self.buckets.gradients).then_some(metrics);
        for index in 0..self.buckets.gradients {
            let at = Instant::now();
            self.communicator.wait(index)?;
            let arrived = Instant::now();
            self.recorder.begin(Operation::Update, index as u32);
            report.communication_wait += arrived - at;
            let range = self.blueprint.buckets[index].range.clone();
            let gradients = &self.communicator.bucket(index)[..range.len()];
            let sum = sum_of_squares(gradients);
            squares += sum;
            if at_once && sum.is_finite() {
                self.state.apply(range, gradients, &self.blueprint);
            }
            report.optimizer += arrived.elapsed();
        }
        if let Some(bucket) = beside {
            let at = Instant::now();
            self.communicator.wait(bucket)?;
            report.communication_wait += at.elapsed();
        }
        Ok(squares)
    }

    /// Clips, unscales and applies the reduced gradients, or skips the step.
    fn update(&mut self, squares: f64, scale: f32, report: &mut StepReport) -> Result<(), TrainError> {
        report.learning_rate = self.learning_rate();
        let norm = squares.sqrt() / f64::from(scale);
        let finite = norm.is_finite() && report.loss.is_finite();
        let shortened = self.state.wire.as_ref().is_some_and(|wire| wire.scale().is_some());
        if let Some(wire) = &mut self.state.wire {
            wire.update(squares.sqrt());
        }
        if let Some(scaler) = &mut self.state.scaler {
            let outcome = scaler.update(!finite);
            outcome.map_err(|error| TrainError::Overflow(error.to_string()))?;
            let skipped = scaler.state().skipped_in_a_row;
            if skipped >= MOST_SKIPPED {
                let text = format!("gradients overflowed in {skipped} steps in a row with a loss scale of {scale}");
                return Err(TrainError::Overflow(text));
            }
            if !finite {
                return Ok(());
            }
        } else if !finite && shortened && report.loss.is_finite() {
            // Gradients that were much larger than those before them may not fit into f16. The next step travels in 4 bytes.
            return Ok(());
        } else if !finite {
            let error = TrainError::NotFinite { step: report.step, loss: report.loss, norm };
            self.tell(&error);
            return Err(error);
        }
        report.gradient_norm = Some(norm);
        if !self.steps_at_once() {
            let clip = self.blueprint.config.optimizer.gradient_clip_norm;
            self.state.optimizer.begin_step(report.learning_rate, gradient_scale(norm, clip, f64::from(scale)));
            for (index, bucket) in self.blueprint.buckets.iter().enumerate() {
                let gradients = &self.communicator.bucket(index)[..bucket.range.len()];
                self.state.apply(bucket.range.clone(), gradients, &self.blueprint);
            }
        }
        self.state.observe(&self.statistics);
        Ok(())
    }

    /// Whether rank 0's clock says that a checkpoint is due.
    fn due_by_time(&self) -> bool {
        let (Some(config), Some(checkpoints)) = (&self.blueprint.config.checkpoint, &self.checkpoints) else {
            return false;
        };
        let period = Duration::from_secs(config.period_seconds);
        self.communicator.rank() == 0 && !period.is_zero() && checkpoints.last.elapsed() >= period
    }

    /// Advances the current checkpoint, or starts one that is due; returns whether it did.
    fn care_for_checkpoints(&mut self, flags: Flags) -> Result<bool, TrainError> {
        let Some(every) = self.blueprint.config.checkpoint.as_ref().map(|config| config.every_steps) else {
            return Ok(false);
        };
        self.advance_checkpoint(flags.written, flags.failed)?;
        let due = flags.due > 0.0 || every > 0 && self.state.step.is_multiple_of(every);
        // The end of the run saves anyway.
        let begins = due && self.state.step < self.blueprint.total_steps;
        if begins {
            self.save_checkpoint()?;
        } else if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.saved.extend(checkpoints.saver.poll(false));
        }
        Ok(begins)
    }

    /// Bytes of gradients that are not reduced yet.
    fn bytes_left(&self) -> u64 {
        let left = (0..self.buckets.gradients).filter(|&bucket| self.communicator.is_under_way(bucket));
        left.map(|bucket| 4 * self.blueprint.buckets[bucket].range.len() as u64).sum()
    }

    /// Time in which at least one of the step's reductions was running.
    fn time_of_reductions(&self) -> Duration {
        let mut total = Duration::ZERO;
        let mut reached: Option<Instant> = None;
        // All-reduces start almost in order; one that started before its predecessor ended adds only what lies beyond.
        for timing in (0..self.buckets.gradients).filter_map(|bucket| self.communicator.timing(bucket)) {
            let from = reached.map_or(timing.began, |reached| reached.max(timing.began));
            total += timing.ended.saturating_duration_since(from);
            reached = Some(reached.map_or(timing.ended, |reached| reached.max(timing.ended)));
        }
        total
    }
}
