//! From gradients to weights with parameter servers.
//!
//! ```text
//! direct   push -> weights
//! norms    push -> sums of squares of all ranks -> clip, unscale or skip -> weights
//! ```
//!
//! A step is direct if nothing depends on the norm of all gradients. Ranks compute the norm of the
//! sums from the servers' parts, so that all decide alike.

use super::CpuEngine;
use super::step::Gradients;
use crate::optimizer::gradient_scale;
use crate::train::TrainError;
use crate::train::engine::StepInput;
use crate::train::report::StepReport;
use std::time::Instant;
use switchyard_worker_contract::config::Updates;
use switchyard_worker_contract::recorder::Operation;

impl CpuEngine {
    /// Begins a step on the servers, if it ends with an exchange; returns whether all ranks meet
    /// after it.
    pub(super) fn begin_on_servers(&mut self, input: &StepInput) -> bool {
        match &mut self.exchange.servers {
            Some(servers) if input.exchange => servers.begin_step(input.synchronise),
            _ => input.synchronise,
        }
    }

    /// Whether backward pushes the gradients of a bucket as soon as they are complete.
    pub(super) fn pushes_in_backward(&self) -> bool {
        self.exchange.servers.as_ref().is_some_and(|servers| match servers.updates {
            Updates::Synchronous => true,
            // A rank clips by its own norm, which it knows after backward.
            Updates::Asynchronous { .. } => self.config.optimizer.gradient_clip_norm.is_none(),
            Updates::Geo { .. } => false,
        })
    }

    pub(super) fn missing() -> TrainError {
        TrainError::Usage("internal error: no parameter servers".into())
    }

    /// Waits for the sums of all buckets, and for the weights if the step is direct.
    pub(super) fn collect_updated(&mut self, scale: f32, report: &mut StepReport) -> Result<Gradients, TrainError> {
        let servers = self.exchange.servers.as_ref().ok_or_else(CpuEngine::missing)?;
        self.squares.fill(0.0);
        for (bucket, part) in self.exchange.ranges.iter().enumerate() {
            let at = Instant::now();
            let reply = servers.wait(bucket, &mut self.squares)?;
            let arrived = Instant::now();
            self.recorder.begin(Operation::Update, bucket as u32);
            report.communication_wait += arrived - at;
            if !reply.weights().is_empty() {
                self.state.receive(part.range.clone(), reply.weights(), &self.cpu);
            }
            report.optimizer += arrived.elapsed();
        }
        let at = Instant::now();
        self.exchange.reducer.wait(self.exchange.buckets.metrics_bucket())?;
        report.communication_wait += at.elapsed();
        let agreed = self.squares.iter().sum::<f64>().sqrt();
        Ok(Gradients { norm: agreed / f64::from(scale), scale, agreed })
    }

    /// Has the servers apply or skip the step, unless they already have, and waits for the weights.
    pub(super) fn finish_on_servers(
        &mut self,
        gradients: &Gradients,
        report: &mut StepReport,
    ) -> Result<(), TrainError> {
        let Gradients { norm, scale, .. } = *gradients;
        let is_direct = self.can_update_per_bucket();
        let servers = self.exchange.servers.as_ref().ok_or_else(CpuEngine::missing)?;
        if report.gradient_norm.is_none() {
            servers.skip();
            return Ok(());
        }
        let scale = gradient_scale(norm, self.config.optimizer.gradient_clip_norm, f64::from(scale));
        // Counts the step; the state is on the servers.
        self.state.optimizer.begin_step(report.learning_rate, scale);
        if !is_direct {
            servers.apply(report.learning_rate, scale);
            for (bucket, part) in self.exchange.ranges.iter().enumerate() {
                let at = Instant::now();
                let reply = servers.wait_applied(bucket)?;
                report.communication_wait += at.elapsed();
                self.state.receive(part.range.clone(), reply.weights(), &self.cpu);
            }
        }
        self.state.update_statistics(&self.statistics);
        Ok(())
    }
}
