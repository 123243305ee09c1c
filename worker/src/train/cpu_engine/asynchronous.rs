//! Steps with asynchronous parameter servers: no rank waits for all others, except at meetings.
//!
//! ```text
//! asynchronous   gradients, clipped by the rank's own norm -> servers -> weights
//! geo            optimizer step of the rank; every few steps the change of its weights / ranks
//!                -> servers -> weights
//! meeting        weights without anything missing; metrics and statistics of all ranks
//! ```
//!
//! Geo updates are geo-SGD, local steps whose changes are exchanged without waiting; their rule is
//! that of PaddlePaddle's `GeoStrategy`. Checkpoints, evaluations and stops happen at meetings.

use super::CpuEngine;
use crate::optimizer::{gradient_scale, sum_of_squares};
use crate::train::TrainError;
use crate::train::engine::{Flags, StepInput, StepOutcome};
use crate::train::exchange::Push;
use crate::train::report::StepReport;
use std::time::Instant;
use switchyard_worker_contract::recorder::Operation;

impl CpuEngine {
    /// Whether servers do not wait for all ranks.
    pub(super) fn is_asynchronous(&self) -> bool {
        self.exchange.servers.as_ref().is_some_and(|servers| servers.is_asynchronous())
    }

    /// From the rank's own gradients to new weights. `meets`: all ranks wait for each other.
    pub(super) fn finish_asynchronous(
        &mut self,
        input: &StepInput,
        meets: bool,
        mut report: StepReport,
    ) -> Result<StepOutcome, TrainError> {
        let at = Instant::now();
        self.recorder.begin(Operation::Update, 0);
        let exchange = &self.exchange;
        let lens = exchange.ranges.iter().map(|bucket| bucket.range.len());
        let squares = lens.enumerate().map(|(bucket, len)| sum_of_squares(&exchange.reducer.bucket(bucket)[..len]));
        let norm = squares.sum::<f64>().sqrt();
        report.loss = f64::from(self.loss) * f64::from(self.world);
        report.gradient_norm = self.state.scales.check_overflow(norm, &report)?;
        let scale = gradient_scale(norm, self.config.optimizer.gradient_clip_norm, 1.0);
        let servers = self.exchange.servers.as_ref().ok_or_else(CpuEngine::missing)?;
        let meet = input.flags.needs_all_ranks();
        let learning_rate = report.learning_rate;
        let push = Push { learning_rate, scale, direct: false, staleness: servers.staleness(), meet };
        if let Some(outer) = &self.state.geo {
            self.state.optimizer.begin_step(learning_rate, scale);
            for (bucket, part) in self.exchange.ranges.iter().enumerate() {
                let gradients = &self.exchange.reducer.bucket(bucket)[..part.range.len()];
                let half = super::state::half_weights(&mut self.state.half);
                let weights = &mut self.state.weights;
                self.state.optimizer.apply(part.range.clone(), weights, gradients, half, &self.cpu.pool);
                if input.exchange {
                    let mut change = vec![0.0; part.range.len()];
                    outer.write_change(part.range.clone(), weights, 1.0 / self.world as f32, &mut change);
                    servers.push(bucket, &change, push);
                }
            }
        } else {
            // Every push of every rank is a step of the servers' optimizer; the count is exact
            // where ranks meet.
            let steps = self.state.optimizer.steps() + u64::from(self.world);
            self.state.optimizer.restore(steps);
            if !self.pushes_in_backward() {
                for (bucket, part) in self.exchange.ranges.iter().enumerate() {
                    servers.push(bucket, &self.exchange.reducer.bucket(bucket)[..part.range.len()], push);
                }
            }
        }
        self.state.update_statistics(&self.statistics);
        report.optimizer += at.elapsed();
        if input.exchange {
            self.pull(&mut report)?;
        }
        let flags = if meets { self.meet(input, &mut report)? } else { Flags::default() };
        report.reduce = if input.exchange { self.exchange.reduction_time() } else { report.reduce };
        let skipped_steps = self.state.scales.skipped_steps();
        Ok(StepOutcome { report, flags, skipped_steps, synchronised: meets })
    }

    /// Waits for the weights of all buckets.
    fn pull(&mut self, report: &mut StepReport) -> Result<(), TrainError> {
        let servers = self.exchange.servers.as_mut().ok_or_else(CpuEngine::missing)?;
        for (bucket, part) in self.exchange.ranges.iter().enumerate() {
            let at = Instant::now();
            let (reply, staleness) = servers.wait_asynchronous(bucket)?;
            report.communication_wait += at.elapsed();
            report.staleness = report.staleness.max(staleness);
            self.state.receive(part.range.clone(), reply.weights(), &self.cpu);
        }
        if let Some(outer) = &mut self.state.geo {
            outer.begin(&self.state.weights);
        }
        Ok(())
    }

    /// Exchanges the metrics of all ranks, and averages the running statistics.
    fn meet(&mut self, input: &StepInput, report: &mut StepReport) -> Result<Flags, TrainError> {
        let at = Instant::now();
        let share = 1.0 / self.world as f32;
        let shares: Vec<f32> = self.state.statistics.iter().map(|value| value * share).collect();
        let exchange = &mut self.exchange;
        exchange.buckets.write_metrics(&mut exchange.reducer, self.loss, input.flags, &shares);
        exchange.reducer.all_reduce(exchange.buckets.metrics_bucket())?;
        let (loss, flags, sums) = exchange.buckets.read_metrics(&exchange.reducer);
        report.loss = f64::from(loss);
        self.state.statistics.copy_from_slice(sums);
        report.communication_wait += at.elapsed();
        Ok(flags)
    }

    /// Waits for all ranks: after a meeting, none may push before the others have read the servers'
    /// state.
    pub(super) fn await_readers(&mut self) -> Result<(), TrainError> {
        if self.is_asynchronous() {
            self.exchange.reducer.all_reduce(self.exchange.buckets.metrics_bucket())?;
        }
        Ok(())
    }
}
