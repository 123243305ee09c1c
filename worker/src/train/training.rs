//! The device-independent part of a rank's training.

use super::TrainError;
use super::places::Places;
use crate::comm::Packing;
use crate::cpu::Format;
use crate::data::{Dataset, Order, StepShape};
use crate::model::{Model, Registry};
use crate::nn::{Bucket, Graph, Layout, ModelError, Role};
use std::sync::Arc;
use switchyard_worker_contract::config::{Device, EngineConfig, HalfType, Length, Precision, Recomputation};

/// Bytes of a gradient bucket, unless a single parameter has more. Small, so that the first bucket
/// is complete early and the last one is reduced quickly.
pub(super) const BUCKET: usize = 1 << 20;

/// Model, data and schedule of a rank, independent of the device.
#[derive(Clone)]
pub struct Training {
    pub config: EngineConfig,
    pub world: u32,
    pub dataset: Arc<Dataset>,
    /// The samples of each step.
    pub order: Order,
    /// The gradient buckets, in the order in which backward completes them.
    pub buckets: Vec<Bucket>,
    /// Where gradients are while they are reduced, if they are divided among the ranks.
    pub(super) places: Option<Places>,
    /// With sharding, the form in which weights travel, by bucket.
    pub(super) packings: Vec<Packing>,
    pub total_steps: u64,
    pub(super) model: Arc<dyn Model>,
}

impl Training {
    /// Leaves `buckets`, `places` and `packings` empty, because they depend on the layout.
    ///
    /// # Errors
    /// The model cannot be used, or there is too little data for one step.
    pub(super) fn new(
        config: &EngineConfig,
        dataset: Arc<Dataset>,
        world: u32,
        registry: &Registry,
    ) -> Result<Training, TrainError> {
        check_pipelines(config, world)?;
        let (batch_size, merge) = (config.batch_size_per_process, config.batch_merge);
        let shape = StepShape { batch_size, merge, world: config.replicas(world) };
        let order = Order::new(&dataset, shape, config.seed)?;
        let model: Arc<dyn Model> = Arc::from(registry.model(&config.model)?);
        let total_steps = match config.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => order.steps_of(epochs),
        };
        Ok(Training {
            config: config.clone(),
            world,
            dataset,
            order,
            buckets: Vec::new(),
            places: None,
            packings: Vec::new(),
            total_steps,
            model,
        })
    }

    /// Number of ranks, or of pipelines, that train on different samples.
    pub fn replicas(&self) -> u32 {
        self.config.replicas(self.world)
    }

    /// The number of a rank, or of its pipeline, among them.
    pub(super) fn replica(&self, rank: u32) -> u32 {
        self.config.place(rank, self.world).replica
    }

    /// Continues in steps and samples where a checkpoint ended.
    pub(super) fn resume_at(&mut self, step: u64, epoch: u64, position: u64) {
        self.order = self.order.from_position(step, epoch, position);
        if let Length::Epochs(epochs) = self.config.length {
            self.total_steps = self.order.steps_of(epochs);
        }
    }

    /// Most weights that a rank updates if they are divided among the ranks: its parts of all
    /// buckets, which are whole cache lines.
    pub(super) fn most_owned(&self) -> usize {
        let part = |len: usize| len.div_ceil(self.world as usize).next_multiple_of(16).min(len);
        self.buckets.iter().map(|bucket| part(bucket.range.len())).sum()
    }

    /// Items per optimizer step over all ranks.
    pub fn items_per_step(&self) -> u64 {
        self.order.samples_per_step() * self.dataset.kind().items_per_sample()
    }

    /// The form of each bucket in which weights travel, with sharding: those that layers read in 16
    /// bits take 2 bytes.
    pub(super) fn packings(&self, layout: &Layout) -> Vec<Packing> {
        let is_mixed = self.half_type().is_some();
        let packing = |bucket: &Bucket| {
            let mut packing = Packing::default();
            let parameters = &layout.parameters[bucket.first..=bucket.last];
            let ends = parameters[1..].iter().map(|next| next.offset).chain([bucket.range.end]);
            for (parameter, end) in parameters.iter().zip(ends) {
                packing.push(end - parameter.offset, is_mixed && parameter.role != Role::Vector);
            }
            packing
        };
        self.buckets.iter().map(packing).collect()
    }

    pub fn half_type(&self) -> Option<HalfType> {
        match self.config.precision {
            Precision::Fp32 => None,
            Precision::Amp(amp) => Some(amp.compute_type),
        }
    }

    /// Builds the network for this data set.
    ///
    /// # Errors
    /// The model does not fit the data.
    pub(super) fn graph(&self) -> Result<Graph, TrainError> {
        self.graph_in(self.format())
    }

    /// Format of the activations.
    pub(super) fn format(&self) -> Format {
        match self.half_type() {
            None => Format::F32,
            Some(HalfType::Bf16) => Format::Bf16,
            Some(HalfType::Fp16) => Format::F16,
        }
    }

    /// Builds the network in another format.
    ///
    /// # Errors
    /// See [`Training::graph`].
    pub(super) fn graph_in(&self, format: Format) -> Result<Graph, TrainError> {
        let (config, images) = (&self.config, &self.config.data.images);
        let mut graph = Graph::new(config.batch_size_per_process as usize, self.dataset.kind(), format)
            .with_label_smoothing(config.label_smoothing as f32)
            .with_normalisation(&images.mean, &images.deviation);
        if config.recomputation == Recomputation::Blocks {
            graph = graph.with_recomputation();
        }
        self.model.build(&mut graph)?;
        if config.recomputation == Recomputation::Blocks && graph.blocks() == 0 {
            return Err(ModelError::NoBlocks.into());
        }
        Ok(graph)
    }
}

/// Checks that pipelines can be made of these ranks.
fn check_pipelines(config: &EngineConfig, world: u32) -> Result<(), TrainError> {
    let Some(pipeline) = config.pipeline else { return Ok(()) };
    let refused = |got: String, expected: &str| {
        let text = format!("spec.engine.parallelism.pipelineStages: got {got}; expected {expected}");
        Err(TrainError::Usage(text))
    };
    let stages = pipeline.stages;
    if config.device == Device::Cuda {
        return refused(format!("{stages} on GPUs"), "1: only ranks on CPUs form pipelines yet");
    }
    if !world.is_multiple_of(stages.max(1)) {
        let ranks = "a number that divides the ranks, trainer.numNodes * trainer.numProcPerNode";
        return refused(format!("{stages} with {world} ranks"), ranks);
    }
    Ok(())
}
