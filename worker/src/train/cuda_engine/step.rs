//! The step: the host queues micro-batches one ahead of the device, then the update. It reads the
//! outcome after it has begun the next step.
//!
//! ```text
//! host    queue n      queue n + 1, outcome of n      queue n + 2, outcome of n + 1
//! device     step n ────────────── step n + 1 ────────────── step n + 2
//! ```
//!
//! With NCCL, several ranks do the same: the device waits for the sums of gradients and loss, the
//! host only for the outcome. Without NCCL, the host reduces the gradients before the update.
//!
//! The optimizer's step number depends on how many steps were skipped because of overflows, and so
//! on an outcome that is not known yet. The host therefore sends both candidates, and the device
//! chooses. With a dynamic loss scale, which is a factor of the uploaded batch, the host waits
//! instead.

use super::commands::Dispatcher;
use super::memories::Memories;
use super::segment::Segment;
use super::timer::OpTimer;
use super::{CudaEngine, DeviceSpan, Messages, SLOTS};
use crate::amp::WireScale;
use crate::data::Prefetcher;
use crate::lowering::{Memory, Share};
use crate::train::TrainError;
use crate::train::engine::{Flags, StepInput, StepOutcome};
use crate::train::report::StepReport;
use std::time::{Duration, Instant};
use switchyard_cuda::driver::{Counts, Stream};
use switchyard_cuda::{Error, nvtx};
use switchyard_worker_contract::recorder::Operation;

/// A step whose outcome is not known yet.
pub(super) struct PendingStep {
    report: StepReport,
    /// Of all ranks; with NCCL, of this rank.
    flags: Flags,
    /// Slot of its last micro-batch.
    slot: usize,
}

impl CudaEngine {
    /// Begins an optimizer step. Returns the outcome of the previous step or, if it must be known
    /// before the next step begins, of this one.
    pub(super) fn run_step(
        &mut self,
        reader: &mut Prefetcher,
        input: &StepInput,
    ) -> Result<Option<StepOutcome>, TrainError> {
        let _range = nvtx::range(format_args!("step {}", input.step));
        let before = self.stream.context().counts();
        let loss_scale = self.scales.loss_scale();
        let mut report = StepReport {
            step: input.step,
            learning_rate: input.learning_rate,
            loss_scale: f64::from(loss_scale),
            ..StepReport::default()
        };
        self.upload_candidates(&report)?;
        let mut outcome = self.compute(reader, loss_scale, &mut report)?;
        let flags = self.exchange_gradients(input.flags, &mut report)?;
        self.queue_update(input.step)?;
        let slot = self.slot(self.config.batch_merge - 1);
        self.micro_batches_done += self.config.batch_merge as usize;
        self.pending = Some(PendingStep { report, flags, slot });
        if !self.scales.can_overlap_steps() {
            outcome = self.settle()?;
        }
        let after = self.stream.context().counts();
        self.calls = Counts { launches: after.launches - before.launches, waits: after.waits - before.waits };
        Ok(outcome)
    }

    /// Queues the upload of both candidates for the optimizer's parameters: for the case that the
    /// pending step is skipped, and that it is not.
    fn upload_candidates(&mut self, report: &StepReport) -> Result<(), TrainError> {
        let counted = if self.pending.is_some() { self.steps.next() } else { self.steps };
        let update = self.computation.update();
        let candidates = [counted, self.steps].map(|steps| update.numbers(report.learning_rate, &steps.next()));
        let pinned = &mut self.messages[slot_of(report.step)].candidates;
        pinned.values_mut()?.copy_from_slice(&candidates);
        Ok(self.stream.upload(pinned, 0..candidates.len(), self.memories.span(Memory::Candidates))?)
    }

    /// Queues all micro-batches, and waits for all but the last. Returns the outcome of the
    /// previous step.
    fn compute(
        &mut self,
        reader: &mut Prefetcher,
        loss_scale: f32,
        report: &mut StepReport,
    ) -> Result<Option<StepOutcome>, TrainError> {
        let merge = self.config.batch_merge;
        let share = Share { part: self.share(), loss_scale };
        let mut outcome = None;
        self.makings.clear();
        self.spans.clear();
        for micro_batch in 0..merge {
            let at = Instant::now();
            self.recorder.begin(Operation::Input, micro_batch);
            let batch = reader.next()?;
            let read = Instant::now();
            report.input_wait += read - at;
            if let Some(making) = batch.making {
                report.read += making.took();
                self.makings.push(making);
            }
            let slot = self.slot(micro_batch);
            let computed = (&self.segments.marks(slot).backward, &self.stream);
            self.feed.send(slot, (batch, share), &self.memories, computed, self.timer.if_enabled())?;
            self.queue(micro_batch)?;
            report.forward += read.elapsed();
            if micro_batch == 0 {
                outcome = self.settle()?;
                self.recorder.set_step(report.step);
            } else {
                self.await_micro_batch((micro_batch - 1, self.slot(micro_batch - 1)), report)?;
            }
        }
        Ok(outcome)
    }

    /// The loss is the mean over the global batch, so every micro-batch of every rank has the same
    /// weight.
    fn share(&self) -> f32 {
        1.0 / (self.config.batch_merge as f32 * self.world as f32)
    }

    /// The input slot of a micro-batch of this step.
    fn slot(&self, micro_batch: u32) -> usize {
        (self.micro_batches_done + micro_batch as usize) % SLOTS
    }

    /// Queues forward and backward of a micro-batch.
    fn queue(&mut self, micro_batch: u32) -> Result<(), TrainError> {
        let _range = nvtx::range(format_args!("micro-batch {micro_batch}"));
        let slot = self.slot(micro_batch);
        let CudaEngine { dispatcher, memories, stream, segments, norms, timer, .. } = self;
        queue(segments.micro_batch(micro_batch, slot), (dispatcher, memories, stream), timer)?;
        Ok(norms.download(slot, memories, (&segments.marks(slot).forward, stream))?)
    }

    /// Waits until the device has computed a micro-batch, given its number and slot.
    fn await_micro_batch(&mut self, micro_batch: (u32, usize), report: &mut StepReport) -> Result<(), TrainError> {
        report.forward += self.await_pass(Operation::Forward, micro_batch)?;
        report.backward += self.await_pass(Operation::Backward, micro_batch)?;
        Ok(())
    }

    /// Waits for forward or backward of a micro-batch; returns the time waited.
    fn await_pass(&mut self, operation: Operation, (micro_batch, slot): (u32, usize)) -> Result<Duration, TrainError> {
        let marks = self.segments.marks(slot);
        let (name, mark) = match operation {
            Operation::Forward => ("forward", &marks.forward),
            _ => ("backward", &marks.backward),
        };
        let start = Instant::now();
        self.recorder.begin(operation, micro_batch);
        mark.synchronize()?;
        if operation == Operation::Forward {
            self.norms.add(slot, self.share())?;
        }
        let end = Instant::now();
        self.spans.push(DeviceSpan { name, start, end });
        Ok(end - start)
    }

    /// All-reduces the gradients while the device computes the last micro-batch, or after it. With
    /// NCCL this only queues the sums; otherwise it includes loss and flags.
    fn exchange_gradients(&mut self, flags: Flags, report: &mut StepReport) -> Result<Flags, TrainError> {
        let last = self.config.batch_merge - 1;
        if self.exchange.is_none() {
            return Ok(flags);
        }
        let slot = self.slot(last);
        if self.collectives.is_some() {
            self.queue_sums(slot, report)?;
            return Ok(flags);
        }
        report.forward += self.await_pass(Operation::Forward, (last, slot))?;
        if !self.config.overlap.enabled {
            report.backward += self.await_pass(Operation::Backward, (last, slot))?;
        }
        let start = Instant::now();
        self.recorder.begin(Operation::Backward, last);
        self.send_gradients(flags, report)?;
        let sent = Instant::now();
        if self.config.overlap.enabled {
            self.spans.push(DeviceSpan { name: "backward", start, end: sent });
        }
        report.backward += sent - start;
        let flags = self.receive_gradients(report)?;
        Ok(flags)
    }

    /// Queues the sums of gradients and loss with NCCL. `slot`: of the last micro-batch.
    fn queue_sums(&mut self, slot: usize, report: &mut StepReport) -> Result<(), TrainError> {
        let CudaEngine { collectives, exchange, memories, stream, segments, scales, config, .. } = self;
        let (Some(collectives), Some((_, staging))) = (collectives, exchange) else { return Ok(()) };
        let end = &segments.marks(slot).backward;
        let ready = |bucket: usize| if config.overlap.enabled { &staging.ready[bucket] } else { end };
        let scale = scales.wire.as_ref().map(WireScale::scale);
        let waits = config.overlap.sync_all_reduce;
        report.backward_wait += collectives.start((ready, end), scale, (memories, stream), waits)?;
        Ok(())
    }

    /// With NCCL: waits for the sums, and reduces flags and statistics through host memory
    /// meanwhile. Returns the flags of all ranks.
    fn await_sums(&mut self, flags: Flags, report: &mut StepReport) -> Result<Flags, TrainError> {
        let CudaEngine { collectives, exchange, norms, .. } = self;
        let (Some(collectives), Some((exchange, _))) = (collectives, exchange) else { return Ok(flags) };
        let at = Instant::now();
        report.left_bytes = collectives.pending_bytes()?;
        let metrics = exchange.buckets.metrics_bucket();
        // The device has summed the loss.
        exchange.buckets.write_metrics(&mut exchange.reducer, 0.0, flags, &norms.step);
        exchange.reducer.start(metrics);
        report.reduce = collectives.wait()?;
        collectives.wait_for_loss()?;
        exchange.reducer.wait(metrics)?;
        report.communication_wait += at.elapsed();
        let (_, flags, statistics) = exchange.buckets.read_metrics(&exchange.reducer);
        norms.step.copy_from_slice(statistics);
        Ok(flags)
    }

    /// Starts all reductions, each as soon as the device has its gradients.
    fn send_gradients(&mut self, flags: Flags, report: &mut StepReport) -> Result<(), TrainError> {
        let slot = self.slot(self.config.batch_merge - 1);
        let CudaEngine { exchange, memories, segments, norms, scales, config, .. } = self;
        let Some((exchange, staging)) = exchange else { return Ok(()) };
        if let Some(wire) = &scales.wire {
            exchange.reducer.set_wire_scale(wire.scale());
        }
        let end = &segments.marks(slot).backward;
        let metrics = exchange.buckets.metrics_bucket();
        for number in 0..exchange.buckets.runs.len() {
            let run = exchange.buckets.runs[number].clone();
            for bucket in run.clone() {
                let range = exchange.ranges[bucket].range.clone();
                let gradients = staging.gradients((bucket, &range), memories)?;
                exchange.reducer.bucket_mut(bucket)[..range.len()].copy_from_slice(gradients);
            }
            if run.contains(&metrics) {
                let loss = staging.loss(end, memories)?;
                exchange.buckets.write_metrics(&mut exchange.reducer, loss, flags, &norms.step);
            }
            exchange.reducer.start_all(run.clone(), number);
            if config.overlap.sync_all_reduce {
                let at = Instant::now();
                run.clone().try_for_each(|bucket| exchange.reducer.wait(bucket))?;
                report.backward_wait += at.elapsed();
            }
        }
        if metrics >= exchange.buckets.gradients {
            let loss = staging.loss(end, memories)?;
            exchange.buckets.write_metrics(&mut exchange.reducer, loss, flags, &norms.step);
            exchange.reducer.start(metrics);
        }
        report.left_bytes = exchange.pending_bytes();
        Ok(())
    }

    /// Waits for all reductions, and queues the upload of their results.
    fn receive_gradients(&mut self, report: &mut StepReport) -> Result<Flags, TrainError> {
        let CudaEngine { exchange, memories, stream, norms, .. } = self;
        let Some((exchange, staging)) = exchange else { return Ok(Flags::default()) };
        for bucket in 0..exchange.buckets.gradients {
            let at = Instant::now();
            exchange.reducer.wait(bucket)?;
            let arrived = Instant::now();
            report.communication_wait += arrived - at;
            let range = &exchange.ranges[bucket].range;
            staging.put_back(range, &exchange.reducer.bucket(bucket)[..range.len()], memories)?;
            report.optimizer += arrived.elapsed();
        }
        let at = Instant::now();
        exchange.reducer.wait(exchange.buckets.metrics_bucket())?;
        report.communication_wait += at.elapsed();
        report.reduce = exchange.reduction_time();
        let (loss, flags, statistics) = exchange.buckets.read_metrics(&exchange.reducer);
        norms.step.copy_from_slice(statistics);
        staging.finish(loss, memories, stream)?;
        Ok(flags)
    }

    /// Queues the update, which may be skipped on the device, and the download of the outcome.
    fn queue_update(&mut self, step: u64) -> Result<(), TrainError> {
        let CudaEngine { dispatcher, segments, memories, stream, messages, timer, .. } = self;
        if let Some(update) = &mut segments.update {
            queue(update, (dispatcher, memories, stream), timer)?;
        }
        let Messages { scaler, loss, .. } = &mut messages[slot_of(step)];
        stream.download(memories.span(Memory::Scaler), scaler, 0..1)?;
        Ok(stream.download(memories.span(Memory::Loss), loss, 0..1)?)
    }

    /// Waits for the pending step, if any; returns its outcome.
    pub(super) fn settle(&mut self) -> Result<Option<StepOutcome>, TrainError> {
        let Some(PendingStep { mut report, flags, slot }) = self.pending.take() else { return Ok(None) };
        self.recorder.set_step(report.step);
        if self.exchange.is_none() || self.collectives.is_some() {
            self.await_micro_batch((self.config.batch_merge - 1, slot), &mut report)?;
        }
        let flags = self.await_sums(flags, &mut report)?;
        let start = Instant::now();
        self.recorder.begin(Operation::Update, 0);
        self.read_outcome(&mut report)?;
        self.timer.collect()?;
        let end = Instant::now();
        report.optimizer += end - start;
        self.spans.push(DeviceSpan { name: "update", start, end });
        Ok(Some(StepOutcome { report, flags, skipped_steps: self.scales.skipped_steps(), synchronised: true }))
    }

    /// Reads the outcome of a step, and updates scales, step count and statistics.
    fn read_outcome(&mut self, report: &mut StepReport) -> Result<(), TrainError> {
        let Messages { scaler, loss, .. } = &self.messages[slot_of(report.step)];
        let device = scaler.values()?[0];
        report.loss = f64::from(loss.values()?[0]);
        report.gradient_norm = self.scales.check_overflow(device.norm * report.loss_scale, report)?;
        if report.gradient_norm.is_some() {
            self.steps = self.steps.next();
            self.norms.update_running();
        }
        self.norms.step.fill(0.0);
        // The device updates its own copy of the scale, so that it does not wait for the host.
        let expected = self.scales.loss_scale();
        if device.scale != expected {
            let text = format!("internal error: the loss scale of the device is {}, expected {expected}", device.scale);
            return Err(TrainError::Usage(text));
        }
        Ok(())
    }
}

fn queue(
    segment: &mut Segment,
    (dispatcher, memories, stream): (&Dispatcher, &Memories, &Stream),
    timer: &mut OpTimer,
) -> Result<(), Error> {
    match timer.if_enabled() {
        Some(timer) => segment.queue_timed((dispatcher, memories, stream), timer),
        None => segment.queue(dispatcher, memories, stream),
    }
}

/// Slot of a step's messages.
fn slot_of(step: u64) -> usize {
    (step % SLOTS as u64) as usize
}
