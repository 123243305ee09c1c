//! A step of a stage.

use super::super::CpuEngine;
use super::super::step::Gradients;
use super::schedule::Action;
use super::{Pipeline, missing};
use crate::comm::{CommError, Reducer};
use crate::data::{Batch, Prefetcher};
use crate::nn::{Boundary, LossSums, Network};
use crate::train::TrainError;
use crate::train::engine::{Flags, StepInput};
use crate::train::exchange::{NORM, decode, encode};
use crate::train::report::StepReport;
use crate::train::statistics::add_share;
use std::sync::Arc;
use std::time::Instant;
use switchyard_worker_contract::recorder::Operation;

impl CpuEngine {
    /// Runs all micro-batches of the stage and starts its reductions.
    pub(in crate::train::cpu_engine) fn compute_stage(
        &mut self,
        reader: &mut Prefetcher,
        input: &StepInput,
        scale: f32,
        report: &mut StepReport,
    ) -> Result<(), TrainError> {
        let Some(mut pipeline) = self.pipeline.take() else { return Err(missing()) };
        let outcome = self.run_schedule(&mut pipeline, reader, input, scale, report);
        self.pipeline = Some(pipeline);
        outcome
    }

    fn run_schedule(
        &mut self,
        pipeline: &mut Pipeline,
        reader: &mut Prefetcher,
        input: &StepInput,
        scale: f32,
        report: &mut StepReport,
    ) -> Result<(), TrainError> {
        let (share, _) = self.shares();
        let mut loss = 0.0;
        self.statistics.fill(0.0);
        self.makings.clear();
        let actions = Arc::clone(&pipeline.actions);
        for action in actions.iter() {
            let at = Instant::now();
            match *action {
                Action::Forward(micro_batch) => {
                    let slot = pipeline.select(&mut self.network, micro_batch);
                    if pipeline.reads_samples() {
                        self.recorder.begin(Operation::Input, micro_batch);
                        let batch = reader.next()?;
                        if let Some(making) = batch.making {
                            report.read += making.took();
                            self.makings.push(making);
                        }
                        pipeline.batches[slot].clone_from(batch);
                        report.input_wait += at.elapsed();
                    }
                    let read = Instant::now();
                    self.recorder.begin(Operation::Forward, micro_batch);
                    loss += self.network.forward(self.state.weights(), &pipeline.batches[slot]).loss;
                    add_share(&mut self.statistics, self.network.batch_statistics(), share);
                    report.forward += read.elapsed();
                }
                Action::Backward(micro_batch) => {
                    let slot = pipeline.select(&mut self.network, micro_batch);
                    self.recorder.begin(Operation::Backward, micro_batch);
                    let batch = (micro_batch, &pipeline.batches[slot]);
                    report.backward_wait += self.backward(batch, input, (scale, loss as f32 * share))?;
                    report.backward += at.elapsed();
                }
                message => {
                    pipeline.communicate(&mut self.network, message)?;
                    report.pipeline_wait += at.elapsed();
                }
            }
        }
        self.loss = loss as f32 * share;
        Ok(())
    }

    /// Waits for the reductions of the stage, then exchanges what all stages need. Returns the
    /// gradients, the loss and the flags of all ranks.
    pub(in crate::train::cpu_engine) fn collect_from_stages(
        &mut self,
        input: &StepInput,
        scale: f32,
        report: &mut StepReport,
    ) -> Result<(Gradients, f32, Flags), TrainError> {
        let Some(pipeline) = self.pipeline.as_deref_mut() else { return Err(missing()) };
        let at = Instant::now();
        let last = self.exchange.buckets.metrics_bucket().max(self.exchange.buckets.gradients - 1);
        (0..=last).try_for_each(|bucket| self.exchange.reducer.wait(bucket))?;
        report.communication_wait += at.elapsed();
        // The last stage is done first: what follows takes as long as the pipeline empties.
        let at = Instant::now();
        let reducer = &mut self.exchange.reducer;
        let (next, previous) = (pipeline.place.next(), pipeline.place.previous());
        pipeline.norm.clear();
        if let Some(next) = next {
            pipeline.links.receive(pipeline.norm.bytes(), next)?;
        }
        pipeline.share_gradients(reducer, true)?;
        let squares = pipeline.norm.add(reducer);
        if let Some(previous) = previous {
            pipeline.links.send(pipeline.norm.bytes(), previous)?;
        }
        pipeline.share_gradients(reducer, false)?;
        let mut norm = [0.0; NORM];
        let has_all = previous.is_none() && pipeline.place.replica == 0;
        encode(has_all.then_some(squares), &mut norm);
        let Pipeline { metrics, .. } = pipeline;
        metrics.buckets.write_metrics(&mut metrics.reducer, self.loss, input.flags, &norm);
        metrics.reducer.all_reduce(metrics.buckets.metrics_bucket())?;
        let (loss, flags, norm) = metrics.buckets.read_metrics(&metrics.reducer);
        report.pipeline_wait += at.elapsed();
        let agreed = decode(norm).sqrt();
        Ok((Gradients { norm: agreed / f64::from(scale), scale, agreed }, loss, flags))
    }

    /// Passes a batch of the validation set through the pipeline. The last stage has the result.
    pub(in crate::train::cpu_engine) fn evaluate_stage(
        &mut self,
        batch: &Batch,
    ) -> Result<Option<LossSums>, TrainError> {
        let Some(pipeline) = self.pipeline.as_deref_mut() else { return Err(missing()) };
        self.network.select(0);
        if let Some(previous) = pipeline.place.previous() {
            pipeline.links.receive(self.network.boundary(Boundary::Input), previous)?;
        }
        let sums = self.network.evaluate(self.state.weights(), batch);
        let Some(next) = pipeline.place.next() else { return Ok(Some(sums)) };
        pipeline.links.send(self.network.boundary(Boundary::Output), next)?;
        Ok(None)
    }
}

impl Pipeline {
    /// Whether this stage has inputs of the network or losses.
    fn reads_samples(&self) -> bool {
        self.place.previous().is_none() || self.place.next().is_none()
    }

    /// Selects the memory of a micro-batch; returns its number.
    fn select(&self, network: &mut Network, micro_batch: u32) -> usize {
        let slot = micro_batch as usize % self.batches.len();
        network.select(slot);
        slot
    }

    /// Carries out a message.
    fn communicate(&mut self, network: &mut Network, message: Action) -> Result<(), CommError> {
        let place = self.place;
        let [before, after] = [place.previous(), place.next()].map(|rank| rank.unwrap_or(place.rank()));
        match message {
            Action::Forward(_) | Action::Backward(_) => Ok(()),
            Action::ReceiveInput(micro_batch) => {
                self.select(network, micro_batch);
                self.links.receive(network.boundary(Boundary::Input), before)
            }
            Action::SendOutput(micro_batch) => {
                self.select(network, micro_batch);
                self.links.send(network.boundary(Boundary::Output), after)
            }
            Action::ReceiveGradient(micro_batch) => {
                self.select(network, micro_batch);
                self.links.receive(network.boundary(Boundary::OutputGradient), after)
            }
            Action::SendGradient(micro_batch) => {
                self.select(network, micro_batch);
                self.links.send(network.boundary(Boundary::InputGradient), before)
            }
            Action::SwapOutput { output, gradient } => {
                let boundaries = [(output, Boundary::Output), (gradient, Boundary::OutputGradient)];
                self.swap(network, 1, boundaries, after)
            }
            Action::SwapGradient { gradient, input } => {
                let boundaries = [(gradient, Boundary::InputGradient), (input, Boundary::Input)];
                self.swap(network, 0, boundaries, before)
            }
        }
    }

    /// Sends the first tensor to a rank and receives the second one from it.
    fn swap(
        &mut self,
        network: &mut Network,
        side: usize,
        [(sent, from), (received, to)]: [(u32, Boundary); 2],
        with: u32,
    ) -> Result<(), CommError> {
        let half = self.swapped[side].len() / 2;
        self.select(network, sent);
        self.swapped[side][..half].copy_from_slice(network.boundary(from));
        self.links.exchange(&mut self.swapped[side], with)?;
        self.select(network, received);
        network.boundary(to).copy_from_slice(&self.swapped[side][half..]);
        Ok(())
    }

    /// Adds the gradients of shared parameters: those that belong to this stage, or the others.
    fn share_gradients(&mut self, reducer: &mut Reducer, own: bool) -> Result<(), CommError> {
        for shared in self.shared.iter_mut().filter(|shared| shared.is_own == own) {
            let gradient = &mut reducer.bucket_mut(shared.bucket)[shared.range.clone()];
            let half = gradient.len();
            shared.halves[..half].copy_from_slice(gradient);
            self.links.exchange(&mut shared.halves, shared.with)?;
            for (sum, other) in gradient.iter_mut().zip(&shared.halves[half..]) {
                *sum += other;
            }
        }
        Ok(())
    }
}
