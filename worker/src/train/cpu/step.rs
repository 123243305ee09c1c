//! The step: micro-batches through the network, gradients through the buckets, weights through the optimizer.
//!
//! ```text
//! micro-batches   read -> forward -> backward (scaled loss); in the last one each all-reduce starts as soon as its
//! buckets are complete
//! buckets         wait -> sum of squares           without clipping and mixed precision: its optimizer step right away
//! all             overflow? skip : unscale, clip, optimizer step        running statistics
//! ```

use super::CpuEngine;
use super::sink::{BucketSink, Metrics, Start};
use crate::data::Prefetcher;
use crate::optimizer::{gradient_scale, sum_of_squares};
use crate::train::TrainError;
use crate::train::engine::{Given, Told};
use crate::train::report::StepReport;
use crate::train::statistics::add_share;
use std::time::{Duration, Instant};
use switchyard_worker_contract::recorder::Operation;

impl CpuEngine {
    /// One optimizer step.
    pub(super) fn run(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Told, TrainError> {
        let scale = self.state.scales.loss_scale();
        let mut report = StepReport {
            step: given.step,
            learning_rate: given.learning_rate,
            loss_scale: f64::from(scale),
            ..StepReport::default()
        };
        if let Some(wire) = &self.state.scales.wire {
            self.exchange.reducer.set_wire_scale(wire.scale());
        }
        self.compute(reader, given, scale, &mut report)?;
        report.left_bytes = self.exchange.bytes_left();
        let squares = self.collect(scale, &mut report)?;
        let at = Instant::now();
        self.recorder.begin(Operation::Update, 0);
        let (loss, flags, statistics) = self.exchange.buckets.read_metrics(&self.exchange.reducer);
        report.loss = f64::from(loss);
        self.statistics.copy_from_slice(statistics);
        self.update(squares, scale, &mut report)?;
        report.optimizer += at.elapsed();
        report.reduce = self.exchange.time_of_reductions();
        let skipped_steps = self.state.scales.skipped_steps();
        Ok(Told { report, flags, skipped_steps })
    }

    /// Runs all micro-batches and starts all reductions.
    fn compute(
        &mut self,
        reader: &mut Prefetcher,
        given: &Given,
        scale: f32,
        report: &mut StepReport,
    ) -> Result<(), TrainError> {
        let config = &self.config;
        let merge = config.batch_merge;
        // Gradients are those of the mean over the global batch: every micro-batch of every rank has the same weight.
        let share = 1.0 / (merge as f32 * self.world as f32);
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
            let batch = reader.next()?;
            let read = Instant::now();
            self.recorder.begin(Operation::Forward, micro_batch);
            loss += self.network.forward(self.state.weights(), batch).loss;
            add_share(&mut self.statistics, self.network.batch_statistics(), share);
            let forwarded = Instant::now();
            self.recorder.begin(Operation::Backward, micro_batch);
            let last = micro_batch + 1 == merge;
            let mut sink = BucketSink {
                reducer: &mut self.exchange.reducer,
                places: &self.places,
                accumulate: micro_batch > 0,
                start: if last { when } else { Start::Later },
                metrics: Metrics {
                    buckets: &self.exchange.buckets,
                    loss: loss as f32 * share,
                    flags: given.flags,
                    statistics: &self.statistics,
                },
                failed: None,
                waited: Duration::ZERO,
            };
            self.network.backward(self.state.weights(), batch, scale * share, &mut sink);
            if last {
                if when == Start::Later {
                    for (number, run) in self.exchange.buckets.runs.iter().enumerate() {
                        sink.begin(number, run.clone());
                        if sync {
                            sink.wait(run.clone());
                        }
                    }
                }
                let metrics = self.exchange.buckets.of_metrics();
                if metrics == self.exchange.buckets.gradients {
                    sink.begin(metrics, metrics..metrics + 1);
                }
            }
            report.backward_wait += sink.waited;
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
        let optimizer = &self.config.optimizer;
        let scales = &self.state.scales;
        optimizer.gradient_clip_norm.is_none() && scales.loss.is_none() && scales.wire.is_none()
    }

    /// Waits for all buckets. Returns the sum of squares of the reduced gradients, which still contain the loss scale.
    fn collect(&mut self, scale: f32, report: &mut StepReport) -> Result<f64, TrainError> {
        let at_once = self.steps_at_once();
        if at_once {
            self.state.optimizer.begin_step(report.learning_rate, gradient_scale(0.0, None, f64::from(scale)));
        }
        let mut squares = 0.0;
        let metrics = self.exchange.buckets.of_metrics();
        let beside = (metrics >= self.exchange.buckets.gradients).then_some(metrics);
        for index in 0..self.exchange.buckets.gradients {
            let at = Instant::now();
            self.exchange.reducer.wait(index)?;
            let arrived = Instant::now();
            self.recorder.begin(Operation::Update, index as u32);
            report.communication_wait += arrived - at;
            let range = self.exchange.ranges[index].range.clone();
            let gradients = &self.exchange.reducer.bucket(index)[..range.len()];
            let sum = sum_of_squares(gradients);
            squares += sum;
            if at_once && sum.is_finite() {
                self.state.apply(range, gradients, &self.cpu);
            }
            report.optimizer += arrived.elapsed();
        }
        if let Some(bucket) = beside {
            let at = Instant::now();
            self.exchange.reducer.wait(bucket)?;
            report.communication_wait += at.elapsed();
        }
        Ok(squares)
    }

    /// Clips, unscales and applies the reduced gradients, or skips the step.
    fn update(&mut self, squares: f64, scale: f32, report: &mut StepReport) -> Result<(), TrainError> {
        let Some(norm) = self.state.scales.judge(squares.sqrt(), report)? else { return Ok(()) };
        report.gradient_norm = Some(norm);
        if !self.steps_at_once() {
            let clip = self.config.optimizer.gradient_clip_norm;
            self.state.optimizer.begin_step(report.learning_rate, gradient_scale(norm, clip, f64::from(scale)));
            for (index, bucket) in self.exchange.ranges.iter().enumerate() {
                let gradients = &self.exchange.reducer.bucket(index)[..bucket.range.len()];
                self.state.apply(bucket.range.clone(), gradients, &self.cpu);
            }
        }
        self.state.observe(&self.statistics);
        Ok(())
    }
}
