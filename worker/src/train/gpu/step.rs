//! The step: the host queues micro-batches one ahead of the device, then the update, and reads the outcome.

use super::feed::SLOTS;
use super::{GpuEngine, Seen};
use crate::amp::WireScale;
use crate::data::Prefetcher;
use crate::gpu::{Memory, Share};
use crate::train::TrainError;
use crate::train::engine::{Flags, Given, Told};
use crate::train::report::StepReport;
use std::time::{Duration, Instant};
use switchyard_worker_contract::recorder::Operation;

impl GpuEngine {
    /// One optimizer step.
    pub(super) fn run_step(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Told, TrainError> {
        let loss_scale = self.scales.loss_scale();
        let mut report = StepReport {
            step: given.step,
            learning_rate: given.learning_rate,
            loss_scale: f64::from(loss_scale),
            ..StepReport::default()
        };
        let numbers = self.computation.update().numbers(given.learning_rate, &self.steps.next());
        self.messages.numbers.values_mut()?[0] = numbers;
        self.stream.upload(&self.messages.numbers, 0..1, self.memories.span(Memory::Numbers))?;
        self.compute(reader, loss_scale, &mut report)?;
        let flags = self.exchange_gradients(given.flags, &mut report)?;
        let at = Instant::now();
        self.recorder.begin(Operation::Update, 0);
        self.update(&mut report)?;
        report.optimizer += at.elapsed();
        self.seen.push(Seen { name: "update", start: at, end: Instant::now() });
        Ok(Told { report, flags, skipped_steps: self.scales.skipped_steps() })
    }

    /// Queues all micro-batches, and follows the device up to the last.
    fn compute(&mut self, reader: &mut Prefetcher, loss_scale: f32, report: &mut StepReport) -> Result<(), TrainError> {
        let merge = self.config.batch_merge;
        let share = Share { part: self.share(), loss_scale };
        self.norms.step.fill(0.0);
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
            let slot = micro_batch as usize % SLOTS;
            self.feed.send(slot, (batch, share), &self.memories, &self.stream)?;
            self.queue(micro_batch)?;
            report.forward += read.elapsed();
            if micro_batch > 0 {
                self.follow(micro_batch - 1, report)?;
            }
        }
        Ok(())
    }

    /// Gradients are those of the mean over the global batch: every micro-batch of every rank has the same weight.
    fn share(&self) -> f32 {
        1.0 / (self.config.batch_merge as f32 * self.world as f32)
    }

    /// Queues forward and backward of a micro-batch. In the last one, it is recorded when each bucket of gradients is complete.
    fn queue(&mut self, micro_batch: u32) -> Result<(), TrainError> {
        let GpuEngine { workshop, memories, stream, run, marks, norms, exchange, config, .. } = self;
        let (passes, which) = if micro_batch == 0 { (&run.first, 0) } else { (&run.later, 1) };
        let slot = micro_batch as usize % SLOTS;
        let marks = &marks[slot];
        workshop.queue(&passes.forward, memories, stream)?;
        norms.download(slot, memories, stream)?;
        stream.record(&marks.forward)?;
        let mut from = 0;
        if let Some((_, staging)) = exchange.as_ref().filter(|_| micro_batch + 1 == config.batch_merge) {
            for (end, ready) in staging.complete[which].iter().zip(&staging.ready) {
                workshop.queue(&passes.backward[from..*end], memories, stream)?;
                stream.record(ready)?;
                from = *end;
            }
        }
        workshop.queue(&passes.backward[from..], memories, stream)?;
        Ok(stream.record(&marks.backward)?)
    }

    /// Waits until the device has computed a micro-batch.
    fn follow(&mut self, micro_batch: u32, report: &mut StepReport) -> Result<(), TrainError> {
        report.forward += self.await_pass(Operation::Forward, micro_batch)?;
        report.backward += self.await_pass(Operation::Backward, micro_batch)?;
        Ok(())
    }

    /// Waits for forward or backward of a micro-batch; returns how long.
    fn await_pass(&mut self, operation: Operation, micro_batch: u32) -> Result<Duration, TrainError> {
        let marks = &self.marks[micro_batch as usize % SLOTS];
        let (name, mark) = match operation {
            Operation::Forward => ("forward", &marks.forward),
            _ => ("backward", &marks.backward),
        };
        let start = Instant::now();
        self.recorder.begin(operation, micro_batch);
        mark.synchronize()?;
        if operation == Operation::Forward {
            self.norms.add(micro_batch as usize % SLOTS, self.share())?;
        }
        let end = Instant::now();
        self.seen.push(Seen { name, start, end });
        Ok(end - start)
    }

    /// Sums gradients, loss and flags over all ranks while the device computes the last micro-batch, or after it.
    fn exchange_gradients(&mut self, flags: Flags, report: &mut StepReport) -> Result<Flags, TrainError> {
        let last = self.config.batch_merge - 1;
        if self.exchange.is_none() {
            self.follow(last, report)?;
            return Ok(flags);
        }
        report.forward += self.await_pass(Operation::Forward, last)?;
        if !self.config.overlap.enabled {
            report.backward += self.await_pass(Operation::Backward, last)?;
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
        let GpuEngine { collectives, exchange, memories, marks, norms, scales, config, .. } = self;
        let Some((exchange, staging)) = exchange else { return Ok(()) };
        if let Some(collectives) = collectives {
            let scale = scales.wire.as_ref().map(WireScale::scale);
            report.backward_wait +=
                collectives.start(&staging.ready, scale, memories, config.overlap.sync_all_reduce)?;
        }
        if let Some(wire) = &scales.wire {
            exchange.reducer.set_wire_scale(wire.scale());
        }
        let end = &marks[(config.batch_merge as usize - 1) % SLOTS].backward;
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

    /// Updates the weights, or leaves them as they are, and waits for the outcome.
    fn update(&mut self, report: &mut StepReport) -> Result<(), TrainError> {
        let GpuEngine { workshop, run, memories, stream, messages, .. } = self;
        workshop.queue(&run.update, memories, stream)?;
        stream.download(memories.span(Memory::Scaler), &mut messages.scaler, 0..1)?;
        stream.download(memories.span(Memory::Loss), &mut messages.loss, 0..1)?;
        let told = messages.scaler.values()?[0];
        report.loss = f64::from(messages.loss.values()?[0]);
        report.gradient_norm = self.scales.judge(told.norm * report.loss_scale, report)?;
        if report.gradient_norm.is_some() {
            self.steps = self.steps.next();
            self.norms.observe();
        }
        // The device moves its own scale on, so that it need not wait for the host.
        let expected = self.scales.loss_scale();
        if told.scale != expected {
            let text = format!("internal error: the loss scale of the device is {}, expected {expected}", told.scale);
            return Err(TrainError::Usage(text));
        }
        Ok(())
    }
}
