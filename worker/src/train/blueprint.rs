//! Everything about a run that follows from its configuration, its data and the number of ranks, before anything is started.

use super::TrainError;
use crate::cpu::{Isa, Pool};
use crate::data::{Corpus, Sampler, Shape, bigram_entropy, unigram_entropy};
use crate::model::{Bucket, Gpt, Model, fuse};
use crate::optimizer::AdamW;
use std::sync::Arc;
use switchyard_worker_contract::config::{self, Data, EngineConfig, Length};
use switchyard_worker_contract::event::Inspection;

/// Bytes in a MiB.
const MIB: usize = 1 << 20;

/// The static plan of a rank.
pub struct Blueprint {
    /// The configuration it was made from.
    pub config: EngineConfig,
    /// Number of ranks.
    pub world: u32,
    /// CPU kernels.
    pub isa: Isa,
    /// The text.
    pub corpus: Arc<Corpus>,
    /// Which samples a step takes.
    pub sampler: Sampler,
    /// The model with its arena.
    pub model: Gpt,
    /// The compute threads.
    pub pool: Arc<Pool>,
    /// The fused gradient buckets, in the order in which backward completes them.
    pub buckets: Vec<Bucket>,
    /// Optimizer steps of the run.
    pub total_steps: u64,
}

impl Blueprint {
    /// Reads the data and lays everything out.
    ///
    /// # Errors
    /// Data, model or kernels that cannot be used.
    pub fn new(config: &EngineConfig, world: u32, kernel: Option<&str>) -> Result<Blueprint, TrainError> {
        let config::Model::Gpt(gpt) = &config.model;
        let isa = Isa::detect(kernel)?;
        let Data::Text(text) = &config.data;
        let corpus = Arc::new(Corpus::load(text, gpt.context_length)?);
        let shape = Shape {
            context_length: gpt.context_length,
            batch_size: config.batch_size_per_process,
            merge: config.batch_merge,
            world,
        };
        let sampler = Sampler::new(corpus.train().len() as u64, shape, config.seed)?;
        let pool = Arc::new(Pool::new(config.cpu_threads as usize));
        let model = Gpt::new(gpt, config.batch_size_per_process as usize, Arc::clone(&pool), isa)?;
        let buckets = fuse(model.layout(), config.overlap.bucket_size_mib as usize * MIB);
        let total_steps = match config.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => epochs.saturating_mul(sampler.steps_per_epoch()),
        };
        Ok(Blueprint { config: config.clone(), world, isa, corpus, sampler, model, pool, buckets, total_steps })
    }

    /// Tokens of one optimizer step over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.sampler.windows_per_step() * u64::from(self.sampler.shape().context_length)
    }

    /// Memory of one rank: weights, gradients, two moments, activations, text.
    pub fn memory_bytes(&self) -> u64 {
        let flat = 4 * self.model.layout().len as u64;
        4 * flat + self.model.memory_bytes() as u64 + self.corpus.memory_bytes()
    }

    /// The optimizer of this run, with moments of zero.
    pub(super) fn optimizer(&self) -> AdamW {
        let config::Optimizer::AdamW(adam_w) = self.config.optimizer;
        AdamW::with_isa(self.model.layout(), adam_w, self.isa)
    }

    /// What the launcher shows before the start.
    pub fn inspection(&self) -> Inspection {
        let layout = self.model.layout();
        let measured = if self.corpus.validation().is_empty() { self.corpus.train() } else { self.corpus.validation() };
        Inspection {
            parameters: layout.trainable() as u64,
            gradient_tensors: layout.parameters.len() as u32,
            bucket_bytes: self.buckets.iter().map(|bucket| 4 * bucket.range.len() as u64).collect(),
            memory_bytes: self.memory_bytes(),
            kernel: self.isa.name().to_string(),
            files: self.corpus.files(),
            empty_files: self.corpus.empty_files(),
            bytes: self.corpus.bytes(),
            train_tokens: self.corpus.train().len() as u64,
            validation_tokens: self.corpus.validation().len() as u64,
            data_digest: self.corpus.digest(),
            unigram_nats: unigram_entropy(measured),
            bigram_nats: bigram_entropy(measured),
            tokens_per_step: self.tokens_per_step(),
            steps_per_epoch: self.sampler.steps_per_epoch(),
            total_steps: self.total_steps,
        }
    }
}
