//! From gradients to the optimizer without reducing all of them: local steps and top-k.
//!
//! Ranks still exchange the metrics of each step, a few hundred bytes. They carry what all ranks
//! must decide alike: whether a step is skipped, whether the run has diverged or must stop.

use super::CpuEngine;
use super::step::Gradients;
use crate::optimizer::sum_of_squares;
use crate::train::TrainError;
use crate::train::engine::StepInput;
use crate::train::report::StepReport;
use std::time::Instant;

impl CpuEngine {
    /// Exchanges the metrics of a local step, among them the mean of the norms of all ranks, which
    /// is finite exactly if all are. The gradients remain this rank's own.
    pub(super) fn collect_own(&mut self, input: &StepInput, report: &mut StepReport) -> Result<Gradients, TrainError> {
        let at = Instant::now();
        let exchange = &mut self.exchange;
        let squares: f64 =
            (0..exchange.ranges.len()).map(|bucket| sum_of_squares(exchange.reducer.bucket(bucket))).sum();
        let share = (squares.sqrt() / f64::from(self.world)) as f32;
        exchange.buckets.write_metrics(&mut exchange.reducer, self.loss, input.flags, &[share]);
        let ready = Instant::now();
        exchange.reducer.all_reduce(exchange.buckets.metrics_bucket())?;
        report.optimizer += ready - at;
        report.communication_wait += ready.elapsed();
        let (_, _, sums) = exchange.buckets.read_metrics(&exchange.reducer);
        let agreed = f64::from(sums.iter().sum::<f32>());
        let scale = self.state.scales.loss_scale();
        Ok(Gradients { norm: squares.sqrt() / f64::from(scale), scale, agreed })
    }

    /// Exchanges the largest gradients of all ranks.
    pub(super) fn collect_largest(&mut self, report: &mut StepReport) -> Result<Gradients, TrainError> {
        let at = Instant::now();
        let exchange = &mut self.exchange;
        let (Some(top_k), Some(residual)) = (&mut exchange.top_k, &mut self.state.residual) else {
            return Err(TrainError::Usage("internal error: top-k without its state".into()));
        };
        let scale = self.state.scales.loss_scale();
        let (squares, mut waited) = top_k.exchange(&mut exchange.reducer, residual, scale)?;
        let ready = Instant::now();
        exchange.reducer.wait(exchange.buckets.metrics_bucket())?;
        waited += ready.elapsed();
        report.communication_wait += waited;
        report.optimizer += at.elapsed().saturating_sub(waited);
        let norm = squares.sqrt();
        Ok(Gradients { norm, scale: 1.0, agreed: norm * f64::from(scale) })
    }

    /// Averages what the ranks learned in their local steps, if this step is the last of them.
    pub(super) fn average(&mut self, synchronise: bool, report: &mut StepReport) -> Result<(), TrainError> {
        let exchange = &mut self.exchange;
        exchange.reduced = if synchronise { 0..exchange.buckets.gradients } else { 0..0 };
        let Some(outer) = self.state.outer.as_mut().filter(|_| synchronise) else { return Ok(()) };
        let share = 1.0 / self.world as f32;
        let started = Instant::now();
        for (number, run) in exchange.buckets.runs.iter().enumerate() {
            for bucket in run.clone() {
                let range = exchange.ranges[bucket].range.clone();
                outer.write_change(range, &self.state.weights, share, exchange.reducer.bucket_mut(bucket));
            }
            exchange.reducer.start_all(run.clone(), number);
        }
        if let Some(bucket) = exchange.buckets.averages {
            let shares = exchange.reducer.bucket_mut(bucket);
            shares.iter_mut().zip(&self.state.statistics).for_each(|(into, own)| *into = own * share);
            exchange.reducer.start(bucket);
        }
        report.optimizer += started.elapsed();
        for (bucket, part) in exchange.ranges.iter().enumerate() {
            let at = Instant::now();
            exchange.reducer.wait(bucket)?;
            let arrived = Instant::now();
            report.communication_wait += arrived - at;
            outer.apply(part.range.clone(), exchange.reducer.bucket(bucket), &mut self.state.weights);
            report.optimizer += arrived.elapsed();
        }
        if let Some(bucket) = exchange.buckets.averages {
            let at = Instant::now();
            exchange.reducer.wait(bucket)?;
            report.communication_wait += at.elapsed();
            self.state.statistics.copy_from_slice(exchange.reducer.bucket(bucket));
        }
        let at = Instant::now();
        self.state.round(&self.cpu);
        report.optimizer += at.elapsed();
        Ok(())
    }
}
