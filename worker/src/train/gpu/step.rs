//! The step: the host queues micro-batches one ahead of the device, then the update; it reads the outcome when it has begun the next step.
//!
//! ```text
//! host    queue n      queue n + 1, outcome of n      queue n + 2, outcome of n + 1
//! device     step n ────────────── step n + 1 ────────────── step n + 2
//! ```
//!
//! What the optimizer is told depends on how many steps were left out because of overflows, and so on an outcome that is not known yet: the
//! host says both, the device chooses. A dynamic loss scale is a factor of what the host sends with each batch; there it waits.

use super::commands::Workshop;
use super::memories::Memories;
use super::segment::Segment;
use super::times::Times;
use super::{GpuEngine, Messages, SLOTS, Seen};
use crate::amp::WireScale;
use crate::data::Prefetcher;
use crate::gpu::{Memory, Share};
use crate::train::TrainError;
use crate::train::engine::{Flags, Given, Told};
use crate::train::report::StepReport;
use std::time::{Duration, Instant};
use switchyard_cuda::driver::{Counts, Stream};
use switchyard_cuda::{Error, nvtx};
use switchyard_worker_contract::recorder::Operation;

/// A step that has begun, and whose outcome is not known.
pub(super) struct Begun {
    report: StepReport,
    flags: Flags,
    /// Of its last micro-batch.
    slot: usize,
}

impl GpuEngine {
    /// Begins an optimizer step. Returns the outcome of the one before or, if it must be known before the next one begins, of this one.
    pub(super) fn run_step(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Option<Told>, TrainError> {
        let _range = nvtx::range(format_args!("step {}", given.step));
        let before = self.stream.context().counts();
        let loss_scale = self.scales.loss_scale();
        let mut report = StepReport {
            step: given.step,
            learning_rate: given.learning_rate,
            loss_scale: f64::from(loss_scale),
            ..StepReport::default()
        };
        self.send_numbers(&report)?;
        let mut told = self.compute(reader, loss_scale, &mut report)?;
        let flags = self.exchange_gradients(given.flags, &mut report)?;
        self.queue_update(given.step)?;
        let slot = self.slot(self.config.batch_merge - 1);
        self.turn += self.config.batch_merge as usize;
        self.begun = Some(Begun { report, flags, slot });
        if !self.scales.is_late() {
            told = self.settle()?;
        }
        let after = self.stream.context().counts();
        self.calls = Counts { launches: after.launches - before.launches, waits: after.waits - before.waits };
        Ok(told)
    }

    /// Queues the copy of what the optimizer is told: if the step that has begun before is left out, and if it is not.
    fn send_numbers(&mut self, report: &StepReport) -> Result<(), TrainError> {
        let counted = if self.begun.is_some() { self.steps.next() } else { self.steps };
        let update = self.computation.update();
        let candidates = [counted, self.steps].map(|steps| update.numbers(report.learning_rate, &steps.next()));
        let pinned = &mut self.messages[slot_of(report.step)].candidates;
        pinned.values_mut()?.copy_from_slice(&candidates);
        Ok(self.stream.upload(pinned, 0..candidates.len(), self.memories.span(Memory::Candidates))?)
    }

    /// Queues all micro-batches, and follows the device up to the last. Returns the outcome of the step before.
    fn compute(
        &mut self,
        reader: &mut Prefetcher,
        loss_scale: f32,
        report: &mut StepReport,
    ) -> Result<Option<Told>, TrainError> {
        let merge = self.config.batch_merge;
        let share = Share { part: self.share(), loss_scale };
        let mut told = None;
        self.makings.clear();
        self.seen.clear();
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
            let before = (&self.run.marks(slot).backward, &self.stream);
            self.feed.send(slot, (batch, share), &self.memories, before, self.times.of_step())?;
            self.queue(micro_batch)?;
            report.forward += read.elapsed();
            if micro_batch == 0 {
                told = self.settle()?;
                self.recorder.step(report.step);
            } else {
                self.follow((micro_batch - 1, self.slot(micro_batch - 1)), report)?;
            }
        }
        Ok(told)
    }

    /// Gradients are those of the mean over the global batch: every micro-batch of every rank has the same weight.
    fn share(&self) -> f32 {
        1.0 / (self.config.batch_merge as f32 * self.world as f32)
    }

    /// Where the input of a micro-batch of this step is.
    fn slot(&self, micro_batch: u32) -> usize {
        (self.turn + micro_batch as usize) % SLOTS
    }

    /// Queues forward and backward of a micro-batch.
    fn queue(&mut self, micro_batch: u32) -> Result<(), TrainError> {
        let _range = nvtx::range(format_args!("micro-batch {micro_batch}"));
        let slot = self.slot(micro_batch);
        let GpuEngine { workshop, memories, stream, run, norms, times, .. } = self;
        queue(run.micro_batch(micro_batch, slot), (workshop, memories, stream), times)?;
        Ok(norms.download(slot, memories, (&run.marks(slot).forward, stream))?)
    }

    /// Waits until the device has computed a micro-batch, whose number and slot are given.
    fn follow(&mut self, micro_batch: (u32, usize), report: &mut StepReport) -> Result<(), TrainError> {
        report.forward += self.await_pass(Operation::Forward, micro_batch)?;
        report.backward += self.await_pass(Operation::Backward, micro_batch)?;
        Ok(())
    }

    /// Waits for forward or backward of a micro-batch; returns how long.
    fn await_pass(&mut self, operation: Operation, (micro_batch, slot): (u32, usize)) -> Result<Duration, TrainError> {
        let marks = self.run.marks(slot);
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
        self.seen.push(Seen { name, start, end });
        Ok(end - start)
    }

    /// Sums gradients, loss and flags over all ranks while the device computes the last micro-batch, or after it.
    fn exchange_gradients(&mut self, flags: Flags, report: &mut StepReport) -> Result<Flags, TrainError> {
        let last = self.config.batch_merge - 1;
        if self.exchange.is_none() {
            return Ok(flags);
        }
        let slot = self.slot(last);
        report.forward += self.await_pass(Operation::Forward, (last, slot))?;
        if !self.config.overlap.enabled {
            report.backward += self.await_pass(Operation::Backward, (last, slot))?;
        }
        let start = Instant::now();
        self.recorder.begin(Operation::Backward, last);
        self.send_gradients(flags, report)?;
        let sent = Instant::now();
        if self.config.overlap.enabled {
            self.seen.push(Seen { name: "backward", start, end: sent });
        }
        report.backward += sent - start;
        let flags = self.receive_gradients(report)?;
        Ok(flags)
    }

    /// Starts all reductions, each as soon as the device has its gradients.
    fn send_gradients(&mut self, flags: Flags, report: &mut StepReport) -> Result<(), TrainError> {
        let slot = self.slot(self.config.batch_merge - 1);
        let GpuEngine { collectives, exchange, memories, run, norms, scales, config, .. } = self;
        let Some((exchange, staging)) = exchange else { return Ok(()) };
        if let Some(collectives) = collectives {
            let scale = scales.wire.as_ref().map(WireScale::scale);
            report.backward_wait +=
                collectives.start(&staging.ready, scale, memories, config.overlap.sync_all_reduce)?;
        }
        if let Some(wire) = &scales.wire {
            exchange.reducer.set_wire_scale(wire.scale());
        }
        let end = &run.marks(slot).backward;
        let metrics = exchange.buckets.of_metrics();
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
        report.left_bytes = exchange.bytes_left();
        Ok(())
    }

    /// Waits for all reductions, and queues the copies of their results to the device.
    fn receive_gradients(&mut self, report: &mut StepReport) -> Result<Flags, TrainError> {
        let GpuEngine { collectives, exchange, memories, stream, norms, .. } = self;
        let Some((exchange, staging)) = exchange else { return Ok(Flags::default()) };
        if let Some(collectives) = collectives {
            report.left_bytes = collectives.bytes_left()?;
        }
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
        exchange.reducer.wait(exchange.buckets.of_metrics())?;
        report.communication_wait += at.elapsed();
        report.reduce = exchange.time_of_reductions();
        if let Some(collectives) = collectives {
            let at = Instant::now();
            report.reduce = collectives.wait()?;
            report.communication_wait += at.elapsed();
        }
        let (loss, flags, statistics) = exchange.buckets.read_metrics(&exchange.reducer);
        norms.step.copy_from_slice(statistics);
        staging.finish(loss, memories, stream)?;
        Ok(flags)
    }

    /// Queues what updates the weights, or leaves them as they are, and the copy of the outcome.
    fn queue_update(&mut self, step: u64) -> Result<(), TrainError> {
        let GpuEngine { workshop, run, memories, stream, messages, times, .. } = self;
        if let Some(update) = &mut run.update {
            queue(update, (workshop, memories, stream), times)?;
        }
        let Messages { scaler, loss, .. } = &mut messages[slot_of(step)];
        stream.download(memories.span(Memory::Scaler), scaler, 0..1)?;
        Ok(stream.download(memories.span(Memory::Loss), loss, 0..1)?)
    }

    /// Waits for the step that has begun, if any; returns its outcome.
    pub(super) fn settle(&mut self) -> Result<Option<Told>, TrainError> {
        let Some(Begun { mut report, flags, slot }) = self.begun.take() else { return Ok(None) };
        self.recorder.step(report.step);
        if self.exchange.is_none() {
            self.follow((self.config.batch_merge - 1, slot), &mut report)?;
        }
        let start = Instant::now();
        self.recorder.begin(Operation::Update, 0);
        self.judge(&mut report)?;
        self.times.take()?;
        let end = Instant::now();
        report.optimizer += end - start;
        self.seen.push(Seen { name: "update", start, end });
        Ok(Some(Told { report, flags, skipped_steps: self.scales.skipped_steps() }))
    }

    /// Reads the outcome of a step, and moves on what follows from it.
    fn judge(&mut self, report: &mut StepReport) -> Result<(), TrainError> {
        let Messages { scaler, loss, .. } = &self.messages[slot_of(report.step)];
        let told = scaler.values()?[0];
        report.loss = f64::from(loss.values()?[0]);
        report.gradient_norm = self.scales.judge(told.norm * report.loss_scale, report)?;
        if report.gradient_norm.is_some() {
            self.steps = self.steps.next();
            self.norms.observe();
        }
        self.norms.step.fill(0.0);
        // The device moves its own scale on, so that it need not wait for the host.
        let expected = self.scales.loss_scale();
        if told.scale != expected {
            let text = format!("internal error: the loss scale of the device is {}, expected {expected}", told.scale);
            return Err(TrainError::Usage(text));
        }
        Ok(())
    }
}

fn queue(
    segment: &mut Segment,
    (workshop, memories, stream): (&Workshop, &Memories, &Stream),
    times: &mut Times,
) -> Result<(), Error> {
    match times.of_step() {
        Some(times) => segment.queue_timed((workshop, memories, stream), times),
        None => segment.queue(workshop, memories, stream),
    }
}

/// Where the messages of a step are.
fn slot_of(step: u64) -> usize {
    (step % SLOTS as u64) as usize
}
