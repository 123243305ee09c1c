//! One rank's training state, moved one optimizer step at a time.

use super::blueprint::Blueprint;
use super::sink::{BucketSink, Places};
use super::{TrainError, save};
use crate::comm::{Cause, Communicator, GroupConfig};
use crate::cpu::AlignedBuffer;
use crate::data::{Prefetcher, TokenBatch, ValidationSet};
use crate::model::Model;
use crate::optimizer::{AdamW, Schedule, sum_of_squares};
use std::path::Path;
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::{self, EngineConfig};
use xxhash_rust::xxh3::xxh3_128;

/// Floats that travel with the last gradient bucket: the first is the loss. One cache line, so that nothing shares it.
const METRICS: usize = 16;

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// Figures of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepReport {
    /// Optimizer steps done, this one included.
    pub step: u64,
    /// Mean loss over all ranks, nats per token.
    pub loss: f64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Global gradient norm before clipping.
    pub gradient_norm: f64,
    /// Wall time of the step.
    pub total: Duration,
    /// Forward passes.
    pub forward: Duration,
    /// Backward passes, with what they start.
    pub backward: Duration,
    /// Waiting for reductions after backward: the exposed communication.
    pub communication_wait: Duration,
    /// Waiting for the reader.
    pub input_wait: Duration,
    /// Norm, clipping, optimizer.
    pub optimizer: Duration,
}

/// One rank's training state.
pub struct Trainer {
    blueprint: Blueprint,
    communicator: Communicator,
    reader: Prefetcher,
    places: Places,
    weights: AlignedBuffer,
    optimizer: AdamW,
    validation: Option<(ValidationSet, TokenBatch)>,
    step: u64,
}

impl Trainer {
    /// Joins the group and sets the initial weights. All ranks must have read the same data with the same configuration.
    ///
    /// # Errors
    /// The group cannot form, or its ranks differ.
    pub fn join(blueprint: Blueprint, group: &GroupConfig) -> Result<Trainer, TrainError> {
        let mut lens: Vec<usize> = blueprint.buckets.iter().map(|bucket| bucket.range.len()).collect();
        if let Some(last) = lens.last_mut() {
            *last += METRICS;
        }
        lens.push(METRICS);
        let mut communicator = Communicator::connect(group, &lens)?;
        // Threads may differ between nodes: they do not change a bit of the results.
        let shared = EngineConfig { cpu_threads: 0, ..blueprint.config.clone() };
        let configuration = serde_json::to_vec(&shared).unwrap_or_default();
        communicator.agree("the engine configuration", digest(&configuration).as_bytes())?;
        communicator.agree("the training data", blueprint.corpus.digest().as_bytes())?;
        let mut weights = AlignedBuffer::zeroed(blueprint.model.layout().len);
        blueprint.model.initialise(blueprint.config.seed, &mut weights);
        let rank = communicator.rank();
        let reader = Prefetcher::start(blueprint.corpus.clone(), blueprint.sampler, rank, 0)?;
        let shape = blueprint.sampler.shape();
        let validation = ValidationSet::new(
            blueprint.corpus.validation().len() as u64,
            shape.context_length,
            shape.batch_size,
            blueprint.config.evaluation.batches,
            blueprint.world,
        )
        .map(|set| (set, TokenBatch::new(shape.batch_size, shape.context_length)));
        let places = Places::new(blueprint.model.layout(), &blueprint.buckets);
        let optimizer = blueprint.optimizer();
        let mut trainer = Trainer { blueprint, communicator, reader, places, weights, optimizer, validation, step: 0 };
        trainer.agree_on_weights()?;
        Ok(trainer)
    }

    /// What it trains.
    pub fn blueprint(&self) -> &Blueprint {
        &self.blueprint
    }

    /// Its membership in the group.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// Optimizer steps done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Time of one all-reduce of all gradient buckets, ms: the best of three after a first one. All ranks call it together, before the
    /// first step.
    ///
    /// # Errors
    /// The group failed.
    pub fn measure_all_reduce(&mut self) -> Result<f64, TrainError> {
        if self.communicator.world() == 1 {
            return Ok(0.0);
        }
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            self.communicator.barrier()?;
            let start = Instant::now();
            for bucket in 0..self.blueprint.buckets.len() {
                self.communicator.all_reduce(bucket)?;
            }
            best = best.min(start.elapsed().as_secs_f64() * 1e3);
        }
        Ok(best)
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// The group failed, the reader ended, or the loss is not finite; the weights are then those before the step.
    pub fn step(&mut self) -> Result<StepReport, TrainError> {
        let start = Instant::now();
        let mut report = StepReport { step: self.step + 1, ..StepReport::default() };
        let config = &self.blueprint.config;
        let merge = config.batch_merge;
        let overlap = config.overlap.enabled;
        // Gradients of the mean over the whole global batch: each micro-batch of each rank weighs the same.
        let scale = 1.0 / (merge as f32 * self.blueprint.world as f32);
        let last_bucket = self.blueprint.buckets.len() - 1;
        let mut loss = 0.0;
        for micro_batch in 0..merge {
            let at = Instant::now();
            let batch = self.reader.next()?;
            let read = Instant::now();
            loss += self.blueprint.model.forward(&self.weights, batch.inputs, batch.targets);
            let forwarded = Instant::now();
            let last = micro_batch + 1 == merge;
            if last {
                let bucket = self.communicator.bucket_mut(last_bucket);
                let metric = bucket.len() - METRICS;
                bucket[metric] = loss as f32 * scale;
            }
            let mut sink = BucketSink {
                communicator: &mut self.communicator,
                places: &self.places,
                accumulate: micro_batch > 0,
                start: overlap && last,
            };
            self.blueprint.model.backward(&self.weights, scale, &mut sink);
            report.input_wait += read - at;
            report.forward += forwarded - read;
            report.backward += forwarded.elapsed();
        }
        if !overlap {
            (0..=last_bucket).for_each(|bucket| self.communicator.start(bucket));
        }
        let mut squares = 0.0;
        for (index, bucket) in self.blueprint.buckets.iter().enumerate() {
            let at = Instant::now();
            self.communicator.wait(index)?;
            let arrived = Instant::now();
            report.communication_wait += arrived - at;
            squares += sum_of_squares(&self.communicator.bucket(index)[..bucket.range.len()]);
            report.optimizer += arrived.elapsed();
        }
        let metrics = self.communicator.bucket(last_bucket);
        report.loss = f64::from(metrics[metrics.len() - METRICS]);
        report.gradient_norm = squares.sqrt();
        if !report.loss.is_finite() || !report.gradient_norm.is_finite() {
            let error = TrainError::NotFinite { step: report.step, loss: report.loss };
            self.tell(&error);
            return Err(error);
        }
        let at = Instant::now();
        report.learning_rate = self.update(report.gradient_norm);
        report.optimizer += at.elapsed();
        self.step += 1;
        report.total = start.elapsed();
        Ok(report)
    }

    /// Clips and applies the reduced gradients; answers the learning rate.
    fn update(&mut self, norm: f64) -> f64 {
        let config = &self.blueprint.config;
        let config::Optimizer::AdamW(adam_w) = config.optimizer;
        let clip = adam_w.gradient_clip_norm.map_or(1.0, |most| (most / (norm + CLIP_EPSILON)).min(1.0));
        let learning_rate =
            Schedule::learning_rate(&config.schedule, adam_w.learning_rate, self.step, self.blueprint.total_steps);
        self.optimizer.begin_step();
        for (index, bucket) in self.blueprint.buckets.iter().enumerate() {
            let gradients = &self.communicator.bucket(index)[..bucket.range.len()];
            self.optimizer.apply(
                bucket.range.clone(),
                &mut self.weights,
                gradients,
                learning_rate,
                clip as f32,
                &self.blueprint.pool,
            );
        }
        learning_rate
    }

    /// Mean loss over the validation set of all ranks, nats per token; `None` without a validation split.
    ///
    /// # Errors
    /// The group failed.
    pub fn evaluate(&mut self) -> Result<Option<f64>, TrainError> {
        let Some((set, batch)) = &mut self.validation else { return Ok(None) };
        let mut sum = 0.0;
        for index in 0..set.batches() {
            set.fill(&self.blueprint.corpus, self.communicator.rank(), index, batch);
            sum += self.blueprint.model.evaluate(&self.weights, &batch.inputs, &batch.targets);
            // A rank that is told to stop must not finish a long evaluation first.
            if let Some(cause) = self.communicator.failure() {
                return Err(crate::comm::CommError::Failed(cause).into());
            }
        }
        let mean = sum / f64::from(set.batches()) / f64::from(self.communicator.world());
        let bucket = self.blueprint.buckets.len();
        self.communicator.bucket_mut(bucket)[0] = mean as f32;
        self.communicator.all_reduce(bucket)?;
        Ok(Some(f64::from(self.communicator.bucket(bucket)[0])))
    }

    /// Digest of all weights, 32 hexadecimal digits.
    pub fn weights_digest(&self) -> String {
        digest(bytemuck::cast_slice(&self.weights))
    }

    /// Every rank compares its digest with the others'.
    ///
    /// # Errors
    /// They differ, or the group failed.
    pub fn agree_on_weights(&mut self) -> Result<String, TrainError> {
        let digest = self.weights_digest();
        self.communicator.agree("the weights", digest.as_bytes())?;
        Ok(digest)
    }

    /// Writes the weights to a safetensors file, as a whole or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, file: &Path) -> Result<(), TrainError> {
        save::weights(file, self.blueprint.model.layout(), &self.weights, self.step)
    }

    /// Tells the other ranks why this one gives up. Where the group knows a cause already, that one stays.
    pub fn tell(&self, error: &TrainError) {
        if !matches!(error, TrainError::Comm(_)) {
            self.communicator.abort(Cause::failed(self.communicator.rank(), error.to_string()));
        }
    }

    /// Leaves the group in good order, together with all other ranks.
    ///
    /// # Errors
    /// A rank failed before.
    pub fn leave(self) -> Result<(), TrainError> {
        Ok(self.communicator.leave()?)
    }
}

/// 32 hexadecimal digits that differ when the bytes do.
fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
