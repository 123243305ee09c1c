//! Everything about a run that follows from its configuration, its data and the number of ranks, before anything
//! starts.

use super::TrainError;
use super::{cpu, memory};
use crate::cpu::{Cpu, Format, HalfKernel, Isa, Pool};
use crate::data::{Dataset, Order, Prefetcher, StepShape, Task};
use crate::model::{Model, Registry};
use crate::nn::{Bucket, Graph, Network, fuse};
use crate::optimizer::Optimizer;
use std::sync::Arc;
use switchyard_worker_contract::config::{EngineConfig, HalfType, Length, Precision};
use switchyard_worker_contract::event::{Inspection, MemoryUse};

/// Bytes of a gradient bucket, unless a single parameter has more: small enough that the first is complete, and the last
/// reduced, soon.
pub(super) const BUCKET: usize = 1 << 20;

/// What a rank trains, on which data and for how long, whatever it computes with.
pub struct Training {
    pub config: EngineConfig,
    pub world: u32,
    pub dataset: Arc<Dataset>,
    /// Which samples each step takes.
    pub order: Order,
    /// The gradient buckets, in the order in which backward completes them.
    pub buckets: Vec<Bucket>,
    pub total_steps: u64,
}

/// The static plan of a rank that computes with CPUs.
pub struct Blueprint {
    pub training: Training,
    pub cpu: Cpu,
    pub network: Network,
    model: Arc<dyn Model>,
    /// Kernels for products of bf16 that this process may use, the best first.
    pub(super) half_kernels: Vec<HalfKernel>,
}

/// Opens the data of a configuration; the ranks of one process share them.
///
/// # Errors
/// The data cannot be used.
pub fn open(config: &EngineConfig) -> Result<Arc<Dataset>, TrainError> {
    Ok(Arc::new(Dataset::open(&config.data, &config.reader, &Task::of(&config.model), config.seed)?))
}

impl Training {
    /// Continues where a checkpoint ended, in samples and in steps.
    pub(super) fn go_on_from(&mut self, step: u64, epoch: u64, position: u64) {
        self.order = self.order.from_position(step, epoch, position);
        if let Length::Epochs(epochs) = self.config.length {
            self.total_steps = self.order.steps_of(epochs);
        }
    }

    /// Items of one optimizer step on all ranks.
    pub fn items_per_step(&self) -> u64 {
        self.order.samples_per_step() * self.dataset.kind().items_per_sample()
    }

    pub fn half_type(&self) -> Option<HalfType> {
        half_type(&self.config)
    }
}

fn half_type(config: &EngineConfig) -> Option<HalfType> {
    match config.precision {
        Precision::Fp32 => None,
        Precision::Amp(amp) => Some(amp.compute_type),
    }
}

impl Blueprint {
    /// Plans a rank.
    ///
    /// # Errors
    /// The model or the kernels cannot be used, there is too little data for one step, or too little memory.
    pub fn new(
        config: &EngineConfig,
        dataset: Arc<Dataset>,
        world: u32,
        kernel: Option<&str>,
        registry: &Registry,
    ) -> Result<Blueprint, TrainError> {
        let (isa, half_kernels) = (Isa::detect(kernel)?, HalfKernel::usable(kernel)?);
        let half = half_kernels.first().copied().unwrap_or(HalfKernel::F32);
        let cpu = Cpu { pool: Arc::new(Pool::new(config.cpu_threads as usize)), isa, half };
        let shape = StepShape { batch_size: config.batch_size_per_process, merge: config.batch_merge, world };
        let order = Order::new(&dataset, shape, config.seed)?;
        let model: Arc<dyn Model> = Arc::from(registry.model(&config.model)?);
        let network = network(config, &dataset, &*model, &cpu)?;
        let buckets = fuse(network.layout(), BUCKET);
        let total_steps = match config.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => order.steps_of(epochs),
        };
        let training = Training { config: config.clone(), world, dataset, order, buckets, total_steps };
        let blueprint = Blueprint { training, cpu, network, model, half_kernels };
        memory::check(&blueprint.memory(), config)?;
        Ok(blueprint)
    }

    /// The same plan with another kernel for products of bf16.
    ///
    /// # Errors
    /// The memory is no longer available.
    pub(super) fn with_half_kernel(mut self, half: HalfKernel) -> Result<Blueprint, TrainError> {
        if self.cpu.half != half {
            self.cpu.half = half;
            self.network = network(&self.training.config, &self.training.dataset, &*self.model, &self.cpu)?;
        }
        Ok(self)
    }

    pub fn memory(&self) -> MemoryUse {
        let layout = self.network.layout();
        let flat = 4 * layout.len as u64;
        let Training { config, world, dataset, .. } = &self.training;
        let batches = Prefetcher::memory_bytes(dataset, config.batch_size_per_process, &config.reader);
        let staged = if config.checkpoint.is_some() { self.state_bytes() / u64::from(*world) } else { 0 };
        MemoryUse {
            weights: flat + if self.training.half_type().is_some() { flat / 2 } else { 0 },
            gradients: flat,
            optimizer: Optimizer::memory_bytes(layout, &config.optimizer.rule) as u64 + staged,
            activations: self.network.memory_bytes() as u64,
            input: dataset.facts().memory_bytes + batches,
        }
    }

    /// Bytes of everything that a checkpoint holds, but for running statistics.
    fn state_bytes(&self) -> u64 {
        let layout = self.network.layout();
        4 * layout.len as u64 + Optimizer::memory_bytes(layout, &self.training.config.optimizer.rule) as u64
    }

    /// Memory of one rank if all numbers had 32 bits; `None` if they have.
    fn memory_fp32(&self) -> Option<u64> {
        self.training.half_type()?;
        let now = self.memory();
        let flat = 4 * self.network.layout().len as u64;
        Some(MemoryUse { weights: flat, activations: self.network.memory_bytes_f32() as u64, ..now }.total())
    }

    /// The kernel for products of bf16; `None` if there are none.
    pub fn half_kernel(&self) -> Option<HalfKernel> {
        (self.training.half_type() == Some(HalfType::Bf16)).then_some(self.cpu.half)
    }

    /// What the launcher shows before the start.
    ///
    /// # Errors
    /// The data can no longer be read.
    pub fn inspection(&self) -> Result<Inspection, TrainError> {
        let layout = self.network.layout();
        let facts = self.training.dataset.facts();
        let entropies = self.training.dataset.entropies()?;
        Ok(Inspection {
            model: self.model.words(),
            sample: facts.sample.clone(),
            item: facts.item,
            parameters: layout.trainable() as u64,
            gradient_tensors: layout.parameters.len() as u32,
            memory: self.memory(),
            fp32_memory_bytes: self.memory_fp32(),
            kernel: cpu::name(&self.cpu, self.half_kernel()),
            files: facts.files,
            empty_files: facts.empty_files,
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

fn network(config: &EngineConfig, dataset: &Dataset, model: &dyn Model, cpu: &Cpu) -> Result<Network, TrainError> {
    let format = match half_type(config) {
        None => Format::F32,
        Some(HalfType::Bf16) => Format::Bf16,
        Some(HalfType::Fp16) => Format::F16,
    };
    let images = &config.data.images;
    let mut graph = Graph::new(config.batch_size_per_process as usize, dataset.kind(), format)
        .with_label_smoothing(config.label_smoothing as f32)
        .with_normalisation(&images.mean, &images.deviation);
    model.build(&mut graph)?;
    Ok(Network::new(graph, cpu.clone())?)
}
