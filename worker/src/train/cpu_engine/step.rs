//! The step: micro-batches through the network, gradients through the buckets, weights through the
//! optimizer.
//!
//! ```text
//! micro-batches   read -> forward -> backward (scaled loss); in the first one, updated weights
//!                 arrive with sharding; in the last one, each all-reduce starts as soon as its
//!                 buckets are complete
//! buckets         wait -> sum of squares; without clipping and AMP: optimizer step at once
//! all             overflow? skip : unscale, clip, optimizer step; running statistics
//! ```
//!
//! Local steps and top-k have other ways from gradients to the optimizer: see `exchanges`; so have
//! parameter servers: see `servers`.

use super::CpuEngine;
use super::sink::{BucketSink, Metrics, ReduceMode};
use crate::data::{Batch, Prefetcher};
use crate::optimizer::{gradient_scale, is_layer_wise};
use crate::train::TrainError;
use crate::train::engine::{StepInput, StepOutcome};
use crate::train::exchange::{Push, Servers};
use crate::train::report::StepReport;
use crate::train::statistics::add_share;
use std::time::{Duration, Instant};
use switchyard_worker_contract::recorder::Operation;

/// The gradients in the buckets.
pub(super) struct Gradients {
    /// Norm without the loss scale.
    pub norm: f64,
    /// Loss scale that the buckets include.
    pub scale: f32,
    /// Norm including the loss scale, the same on all ranks.
    pub agreed: f64,
}

impl CpuEngine {
    /// Runs one optimizer step.
    pub(super) fn run(&mut self, reader: &mut Prefetcher, input: &StepInput) -> Result<StepOutcome, TrainError> {
        let scale = self.state.scales.loss_scale();
        self.exchange.gathered = false;
        let mut report = StepReport {
            step: input.step,
            learning_rate: input.learning_rate,
            loss_scale: f64::from(scale),
            ..StepReport::default()
        };
        if let Some(wire) = &self.state.scales.wire {
            self.exchange.reducer.set_wire_scale(wire.scale());
        }
        let meets = self.begin_on_servers(input);
        if self.pipeline.is_some() {
            self.compute_stage(reader, input, scale, &mut report)?;
        } else {
            self.compute(reader, input, scale, &mut report)?;
        }
        report.left_bytes = self.exchange.pending_bytes();
        if self.is_asynchronous() {
            return self.finish_asynchronous(input, meets, report);
        }
        let mut of_all = None;
        let gradients = if self.pipeline.is_some() {
            let (gradients, loss, flags) = self.collect_from_stages(input, scale, &mut report)?;
            of_all = Some((loss, flags));
            gradients
        } else if self.exchange.servers.is_some() {
            self.collect_updated(scale, &mut report)?
        } else if self.state.outer.is_some() {
            self.collect_own(input, &mut report)?
        } else if self.exchange.top_k.is_some() {
            self.collect_largest(&mut report)?
        } else {
            self.collect(scale, &mut report)?
        };
        let (at, waited) = (Instant::now(), report.communication_wait);
        self.recorder.begin(Operation::Update, 0);
        let (loss, flags, sums) = self.exchange.buckets.read_metrics(&self.exchange.reducer);
        let (loss, flags) = of_all.unwrap_or((loss, flags));
        report.loss = f64::from(loss);
        // With local steps, statistics are the rank's own.
        if self.state.outer.is_none() {
            self.statistics.copy_from_slice(sums);
        }
        self.update(&gradients, &mut report)?;
        report.optimizer += at.elapsed().saturating_sub(report.communication_wait - waited);
        if self.state.outer.is_some() {
            self.average(input.synchronise, &mut report)?;
        }
        report.reduce = self.exchange.reduction_time();
        let skipped_steps = self.state.scales.skipped_steps();
        Ok(StepOutcome { report, flags, skipped_steps, synchronised: input.synchronise })
    }

    /// Runs all micro-batches and starts all reductions.
    fn compute(
        &mut self,
        reader: &mut Prefetcher,
        input: &StepInput,
        scale: f32,
        report: &mut StepReport,
    ) -> Result<(), TrainError> {
        let merge = self.config.batch_merge;
        let (loss_share, share) = self.shares();
        let mut loss = 0.0;
        self.statistics.fill(0.0);
        self.makings.clear();
        for micro_batch in 0..merge {
            let at = Instant::now();
            self.recorder.begin(Operation::Input, micro_batch);
            let batch = reader.next()?;
            let read = Instant::now();
            self.recorder.begin(Operation::Forward, micro_batch);
            let (network, mut weights) = self.network_and_weights();
            loss += network.forward_from(&mut weights, batch).loss;
            let waited = weights.receive_all()?;
            report.gather_wait += waited;
            report.communication_wait += waited;
            add_share(&mut self.statistics, self.network.batch_statistics(), share);
            let forwarded = Instant::now();
            self.recorder.begin(Operation::Backward, micro_batch);
            report.backward_wait += self.backward((micro_batch, batch), input, (scale, loss as f32 * loss_share))?;
            if let Some(making) = batch.making {
                report.read += making.took();
                self.makings.push(making);
            }
            report.input_wait += read - at;
            report.forward += (forwarded - read).saturating_sub(waited);
            report.backward += forwarded.elapsed();
        }
        self.loss = loss as f32 * loss_share;
        Ok(())
    }

    /// Shares of a micro-batch of this rank: of the mean loss, and of gradients and statistics.
    pub(super) fn shares(&self) -> (f32, f32) {
        // The loss is the mean over the global batch, so every micro-batch of every rank has the
        // same weight. With local steps, a rank averages over its own batch only.
        let merge = self.config.batch_merge as f32;
        let of_all = 1.0 / (merge * self.world as f32);
        (of_all, if self.keeps_own_gradients() { 1.0 / merge } else { of_all })
    }

    /// Whether the rank uses its own gradients, and its metrics do not travel with them.
    fn keeps_own_gradients(&self) -> bool {
        self.state.outer.is_some() || self.is_asynchronous()
    }

    /// Runs the backward pass of a micro-batch; the last one of a step starts the reductions.
    /// `scale`: loss scale; `loss`: this rank's share of the mean loss so far. Returns the time
    /// spent waiting for reductions.
    pub(super) fn backward(
        &mut self,
        (micro_batch, batch): (u32, &Batch),
        input: &StepInput,
        (scale, loss): (f32, f32),
    ) -> Result<Duration, TrainError> {
        let is_last = micro_batch + 1 == self.config.batch_merge;
        let is_own = self.keeps_own_gradients();
        let push = Push {
            learning_rate: input.learning_rate,
            scale: gradient_scale(0.0, None, f64::from(scale)),
            direct: self.can_update_per_bucket(),
            staleness: self.exchange.servers.as_ref().map_or(0, Servers::staleness),
            meet: input.flags.needs_all_ranks(),
        };
        let pushes = self.pushes_in_backward();
        let is_whole = match self.exchange.servers {
            Some(_) => pushes,
            None => !is_own && self.exchange.top_k.is_none(),
        };
        let overlap = self.config.overlap;
        // An asynchronous server replies to all of its buckets at once.
        let blocks = overlap.sync_all_reduce && !self.is_asynchronous();
        let mode = ReduceMode { overlaps: overlap.enabled, blocks };
        let (_, share) = self.shares();
        let mut sink = BucketSink {
            reducer: &mut self.exchange.reducer,
            slots: &self.slots,
            servers: self.exchange.servers.as_ref().filter(|_| pushes).map(|servers| (servers, push)),
            accumulate: micro_batch > 0,
            mode: (is_last && is_whole).then_some(mode),
            metrics: Metrics {
                buckets: &self.exchange.buckets,
                loss,
                flags: input.flags,
                statistics: &self.statistics,
            },
            parts: self.exchange.parts.as_mut(),
            discarded: &mut self.discarded,
            failed: None,
            waited: Duration::ZERO,
        };
        self.network.backward(self.state.weights(), batch, scale * share, &mut sink);
        Ok(if is_last { sink.end(!is_own) } else { sink.outcome() }?)
    }

    /// Whether the optimizer can update a bucket before the others have arrived, because nothing
    /// depends on all of them.
    pub(super) fn can_update_per_bucket(&self) -> bool {
        let optimizer = &self.config.optimizer;
        let scales = &self.state.scales;
        let is_whole = self.state.outer.is_none() && self.exchange.top_k.is_none() && self.pipeline.is_none();
        let has_norms = self.exchange.shards.is_none() || !is_layer_wise(&optimizer.rule);
        is_whole
            && has_norms
            && optimizer.gradient_clip_norm.is_none()
            && scales.loss.is_none()
            && scales.wire.is_none()
    }

    /// Waits for all buckets.
    fn collect(&mut self, scale: f32, report: &mut StepReport) -> Result<Gradients, TrainError> {
        let per_bucket = self.can_update_per_bucket();
        if per_bucket {
            self.state.optimizer.begin_step(report.learning_rate, gradient_scale(0.0, None, f64::from(scale)));
        }
        self.squares.fill(0.0);
        if let Some(parts) = &mut self.exchange.parts {
            let at = Instant::now();
            parts.keep_all(&mut self.exchange.reducer)?;
            report.communication_wait += at.elapsed();
        }
        let metrics = self.exchange.buckets.metrics_bucket();
        let separate = (metrics >= self.exchange.buckets.gradients).then_some(metrics);
        for index in 0..self.exchange.buckets.gradients {
            let at = Instant::now();
            self.exchange.reducer.wait(index)?;
            let arrived = Instant::now();
            self.recorder.begin(Operation::Update, index as u32);
            report.communication_wait += arrived - at;
            let range = self.exchange.ranges[index].range.clone();
            let gradients = self.exchange.gradients(index);
            let mut is_finite = true;
            for rank in self.exchange.owners() {
                let sum = self.exchange.squares(index, rank);
                self.squares[rank as usize] += sum;
                is_finite &= sum.is_finite();
            }
            if per_bucket && is_finite {
                self.state.apply(range, gradients, &self.cpu);
            }
            report.optimizer += arrived.elapsed();
        }
        if let Some(bucket) = separate {
            let at = Instant::now();
            self.exchange.reducer.wait(bucket)?;
            report.communication_wait += at.elapsed();
        }
        let at = Instant::now();
        self.exchange.complete_norms(&mut self.squares)?;
        report.communication_wait += at.elapsed();
        let agreed = self.squares.iter().sum::<f64>().sqrt();
        Ok(Gradients { norm: agreed / f64::from(scale), scale, agreed })
    }

    /// Clips, unscales and applies the gradients in the buckets, or skips the step.
    fn update(&mut self, gradients: &Gradients, report: &mut StepReport) -> Result<(), TrainError> {
        let Gradients { norm, scale, agreed } = *gradients;
        report.gradient_norm = self.state.scales.check_overflow(agreed, report)?;
        if self.exchange.servers.is_some() {
            return self.finish_on_servers(gradients, report);
        }
        if report.gradient_norm.is_none() {
            return Ok(());
        }
        let per_bucket = self.can_update_per_bucket();
        // The norms of a layer-wise rule depend on all ranks.
        let measures = self.exchange.shards.is_some() && is_layer_wise(&self.config.optimizer.rule);
        if !per_bucket {
            let clip = self.config.optimizer.gradient_clip_norm;
            self.state.optimizer.begin_step(report.learning_rate, gradient_scale(norm, clip, f64::from(scale)));
        }
        if measures {
            for (index, bucket) in self.exchange.ranges.iter().enumerate() {
                self.state.measure(bucket.range.clone(), self.exchange.gradients(index), &self.cpu);
            }
            let at = Instant::now();
            self.exchange.complete_sums(&mut self.state.optimizer)?;
            report.communication_wait += at.elapsed();
        }
        // In forward order, in which the next step needs the weights.
        for run in (0..self.exchange.buckets.runs.len()).rev() {
            if !per_bucket {
                self.update_run(run, measures);
            }
            self.send_weights(run);
        }
        if !self.config.overlap.enabled || self.config.overlap.sync_all_reduce {
            report.gather_wait = self.receive_weights()?;
            report.communication_wait += report.gather_wait;
        }
        self.state.update_statistics(&self.statistics);
        Ok(())
    }

    /// Runs the optimizer on the gradients of a run. `measured`: their norms are complete.
    fn update_run(&mut self, run: usize, measured: bool) {
        for index in self.exchange.buckets.runs[run].clone() {
            let range = self.exchange.ranges[index].range.clone();
            let gradients = self.exchange.gradients(index);
            if measured {
                self.state.update(range, gradients, &self.cpu);
            } else {
                self.state.apply(range, gradients, &self.cpu);
            }
        }
    }
}
