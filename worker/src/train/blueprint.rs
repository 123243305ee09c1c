//! The static plan of a run: everything that follows from its configuration, its data and the
//! number of ranks.

use super::config::most_reader_threads;
use super::cpu_engine::CpuPlan;
use super::cuda_engine::CudaPlan;
use super::digest::DIGEST_CHUNK;
use super::exchange::{check_servers, dedicated_bytes, short_runs};
use super::places::Places;
use super::training::{BUCKET, Training};
use super::{TrainError, load, memory};
use crate::data::{Dataset, Prefetcher, Task};
use crate::model::Registry;
use crate::nn::{Layout, fuse};
use crate::optimizer::Optimizer;
use std::sync::Arc;
use switchyard_worker_contract::config::{Device, EngineConfig, OuterOptimizer, Reader, Sharding};
use switchyard_worker_contract::event::{Inspection, MemoryUse};

/// Resident memory of a worker process without a job: code, libraries, stacks and buffers of its
/// threads.
const PROGRAM: u64 = 12 << 20;

/// Copies of the largest tensor: written models have other axes than the network.
const COPIES: usize = 2;

/// The plan for a rank's device.
pub(super) enum Plan {
    Cpu(Box<CpuPlan>),
    Gpu(Box<CudaPlan>),
}

/// The static plan of a rank.
pub struct Blueprint {
    pub training: Training,
    pub(super) plan: Plan,
}

/// Opens the data set of a configuration; the ranks of one process share it.
///
/// # Errors
/// The data cannot be used.
pub fn open(config: &EngineConfig) -> Result<Arc<Dataset>, TrainError> {
    Ok(Arc::new(Dataset::open(&config.data, &config.reader, &Task::of(&config.model), config.seed)?))
}

impl Blueprint {
    /// Plans a rank. `local_rank`: its number on its node, which selects the GPU. `kernel`: value
    /// of [`switchyard_worker_contract::env::KERNEL`].
    ///
    /// # Errors
    /// The model, the kernels or the device cannot be used, there is too little data for one step,
    /// or too little memory.
    pub fn new(
        config: &EngineConfig,
        dataset: Arc<Dataset>,
        (world, local_rank): (u32, u32),
        kernel: Option<&str>,
        registry: &Registry,
    ) -> Result<Blueprint, TrainError> {
        let training = Training::new(config, dataset, world, registry)?;
        let plan = match config.device {
            Device::Cpu => Plan::Cpu(Box::new(CpuPlan::new(&training, kernel)?)),
            Device::Cuda => Plan::Gpu(Box::new(CudaPlan::new(&training, local_rank, kernel)?)),
        };
        let mut blueprint = Blueprint { training, plan };
        blueprint.training.buckets = fuse(blueprint.layout(), BUCKET);
        if config.sharding == Sharding::Gradients {
            let Training { buckets, .. } = &blueprint.training;
            let places = Places::new(blueprint.layout(), buckets, short_runs(buckets, &config.overlap));
            blueprint.training.places = Some(places);
        }
        if config.sharding != Sharding::None {
            blueprint.training.packings = blueprint.training.packings(blueprint.layout());
        }
        check_servers(&blueprint.training)?;
        memory::check(&blueprint.memory(), config)?;
        Ok(blueprint)
    }

    /// Parameter layout.
    pub fn layout(&self) -> &Layout {
        match &self.plan {
            Plan::Cpu(plan) => plan.layout(),
            Plan::Gpu(plan) => plan.layout(),
        }
    }

    /// Host memory of the process.
    pub fn memory(&self) -> MemoryUse {
        self.with_common(match &self.plan {
            Plan::Cpu(plan) => plan.memory(&self.training),
            Plan::Gpu(plan) => plan.host_memory(&self.training),
        })
    }

    /// Adds the memory that does not depend on the device.
    fn with_common(&self, own: MemoryUse) -> MemoryUse {
        let Training { config, dataset, .. } = &self.training;
        let most = config.reader.workers.unwrap_or_else(|| most_reader_threads(config));
        let reader = Reader { workers: Some(most), ..config.reader };
        let batches = Prefetcher::memory_bytes(dataset, config.batch_size_per_process, &reader);
        let largest = self.layout().parameters.iter().map(|parameter| 4 * parameter.range().len()).max();
        let copies = 4 * DIGEST_CHUNK + COPIES * largest.unwrap_or(0);
        let (staged, chunk) = match config.checkpoint {
            Some(_) => (self.staged_bytes(), load::memory_bytes(self.training.world)),
            None => (0, 0),
        };
        MemoryUse {
            optimizer: own.optimizer + staged,
            input: own.input + dataset.facts().memory_bytes + batches,
            process: PROGRAM / u64::from(config.devices_per_process.max(1)) + (copies + chunk) as u64,
            ..own
        }
    }

    /// Bytes of this rank's part of a checkpoint, without running statistics: its share of what all
    /// ranks have in common, and all of its own.
    fn staged_bytes(&self) -> u64 {
        let Training { config, world, .. } = &self.training;
        let weights = 4 * self.layout().len as u64;
        let moments = Optimizer::memory_bytes(self.layout().len, &config.optimizer.rule) as u64;
        let has_own = config.parameter_server.is_some_and(|servers| !servers.has_state());
        let (common, own) = match (config.sync.local().map(|local| local.outer_optimizer), config.compression) {
            (Some(OuterOptimizer::Nesterov(_)), _) => (2 * weights, moments),
            (Some(OuterOptimizer::Average), _) => (weights, moments),
            (None, Some(_)) => (weights + moments, weights),
            (None, None) if has_own => (weights, moments),
            (None, None) => (weights + moments, 0),
        };
        common / u64::from(*world) + own
    }

    /// Memory of one rank on CPUs with all values in f32; `None` if they already are.
    fn memory_fp32(&self) -> Option<u64> {
        let Plan::Cpu(plan) = &self.plan else { return None };
        self.training.half_type()?;
        Some(self.with_common(plan.memory_fp32(&self.training)).total())
    }

    /// Activations of one rank without recomputation, in bytes; `None` if nothing is recomputed.
    fn kept_activations(&self) -> Option<u64> {
        match &self.plan {
            Plan::Cpu(plan) => plan.kept_activations(),
            Plan::Gpu(_) => None,
        }
    }

    /// GPU memory of one rank.
    fn gpu_memory(&self) -> Option<MemoryUse> {
        match &self.plan {
            Plan::Cpu(_) => None,
            Plan::Gpu(plan) => Some(plan.memory(&self.training)),
        }
    }

    /// GPU memory in bytes with all values in f32; `None` if they already are.
    fn gpu_memory_fp32(&self) -> Result<Option<u64>, TrainError> {
        match &self.plan {
            Plan::Gpu(plan) if self.training.half_type().is_some() => plan.memory_fp32(&self.training).map(Some),
            _ => Ok(None),
        }
    }

    fn kernel(&self) -> String {
        match &self.plan {
            Plan::Cpu(plan) => plan.kernel(&self.training),
            Plan::Gpu(plan) => plan.kernel(),
        }
    }

    /// The summary that the launcher shows before the start.
    ///
    /// # Errors
    /// The data can no longer be read, or other processes use the memory of a GPU.
    pub fn inspection(&self) -> Result<Inspection, TrainError> {
        if let Plan::Gpu(plan) = &self.plan {
            plan.check_room(&self.training)?;
        }
        let layout = self.layout();
        let facts = self.training.dataset.facts();
        let entropies = self.training.dataset.entropies()?;
        Ok(Inspection {
            model: self.training.model.words(),
            sample: facts.sample.clone(),
            item: facts.item,
            parameters: layout.trainable() as u64,
            gradient_tensors: layout.parameters.len() as u32,
            memory: self.memory(),
            server_memory_bytes: dedicated_bytes(&self.training).map(|bytes| PROGRAM + bytes),
            fp32_memory_bytes: self.memory_fp32(),
            kept_activation_bytes: self.kept_activations(),
            gpu_memory: self.gpu_memory(),
            gpu_fp32_memory_bytes: self.gpu_memory_fp32()?,
            kernel: self.kernel(),
            files: facts.files,
            skipped: facts.skipped.clone(),
            bytes: facts.bytes,
            train_items: facts.train_items,
            validation_items: facts.validation_items,
            data_digest: facts.digest.clone(),
            unigram_nats: entropies.map(|entropies| entropies.unigram),
            bigram_nats: entropies.and_then(|entropies| entropies.bigram),
            samples_per_step: self.training.order.samples_per_step(),
            items_per_step: self.training.items_per_step(),
            steps_per_epoch: self.training.order.steps_per_epoch(),
            total_steps: self.training.total_steps,
        })
    }
}
