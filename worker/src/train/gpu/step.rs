//! The step: the host queues micro-batches one ahead of the device, then the update, and reads the outcome.

use super::feed::SLOTS;
use super::{GpuEngine, Seen};
use crate::data::Prefetcher;
use crate::gpu::{Memory, Share};
use crate::train::TrainError;
use crate::train::engine::{Flags, Given, Told};
use crate::train::trainer::StepReport;
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

    /// Runs all micro-batches.
    fn compute(&mut self, reader: &mut Prefetcher, loss_scale: f32, report: &mut StepReport) -> Result<(), TrainError> {
        let merge = self.config.batch_merge;
        // Gradients are those of the mean over the global batch: every micro-batch of every rank has the same weight.
        let share = Share { part: 1.0 / (merge as f32 * self.world as f32), loss_scale };
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
            let passes = if micro_batch == 0 { &self.run.first } else { &self.run.later };
            self.workshop.queue(&passes.forward, &self.memories, &self.stream)?;
            self.stream.record(&self.marks[slot].forward)?;
            self.workshop.queue(&passes.backward, &self.memories, &self.stream)?;
            self.stream.record(&self.marks[slot].backward)?;
            report.forward += read.elapsed();
            if micro_batch > 0 {
                self.follow(micro_batch - 1, report)?;
            }
        }
        self.follow(merge - 1, report)
    }

    /// Waits until the device has computed a micro-batch.
    fn follow(&mut self, micro_batch: u32, report: &mut StepReport) -> Result<(), TrainError> {
        let marks = &self.marks[micro_batch as usize % SLOTS];
        let waits = [
            (Operation::Forward, "forward", &marks.forward, &mut report.forward),
            (Operation::Backward, "backward", &marks.backward, &mut report.backward),
        ];
        for (operation, name, mark, total) in waits {
            let start = Instant::now();
            self.recorder.begin(operation, micro_batch);
            mark.synchronize()?;
            let end = Instant::now();
            *total += end - start;
            self.seen.push(Seen { name, start, end });
        }
        Ok(())
    }

    /// Sums gradients, loss and flags over all ranks, by way of the host.
    fn exchange_gradients(&mut self, flags: Flags, report: &mut StepReport) -> Result<Flags, TrainError> {
        let GpuEngine { exchange, memories, scales, config, .. } = self;
        let Some(exchange) = exchange else { return Ok(flags) };
        if let Some(wire) = &scales.wire {
            exchange.reducer.set_wire_scale(wire.scale());
        }
        let (on_device, mut loss) = (memories.buffer(Memory::Gradients), [0.0]);
        memories.buffer(Memory::Loss).read(0, &mut loss)?;
        let metrics = exchange.buckets.of_metrics();
        for number in 0..exchange.buckets.runs.len() {
            let run = exchange.buckets.runs[number].clone();
            for bucket in run.clone() {
                let range = exchange.ranges[bucket].range.clone();
                on_device.read(4 * range.start, &mut exchange.reducer.bucket_mut(bucket)[..range.len()])?;
            }
            if run.contains(&metrics) {
                exchange.buckets.write_metrics(&mut exchange.reducer, loss[0], flags, &[]);
            }
            exchange.reducer.start_all(run.clone(), number);
            if config.overlap.sync_all_reduce {
                run.clone().try_for_each(|bucket| exchange.reducer.wait(bucket))?;
            }
        }
        if metrics >= exchange.buckets.gradients {
            exchange.buckets.write_metrics(&mut exchange.reducer, loss[0], flags, &[]);
            exchange.reducer.start(metrics);
        }
        report.left_bytes = exchange.bytes_left();
        let at = Instant::now();
        let mut copied = Duration::ZERO;
        for bucket in 0..exchange.buckets.gradients {
            exchange.reducer.wait(bucket)?;
            let arrived = Instant::now();
            let range = exchange.ranges[bucket].range.clone();
            on_device.write(4 * range.start, &exchange.reducer.bucket(bucket)[..range.len()])?;
            copied += arrived.elapsed();
        }
        exchange.reducer.wait(metrics)?;
        report.communication_wait += at.elapsed() - copied;
        report.optimizer += copied;
        report.reduce = exchange.time_of_reductions();
        let (loss, flags, _) = exchange.buckets.read_metrics(&exchange.reducer);
        memories.buffer(Memory::Loss).write(0, &[loss])?;
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
