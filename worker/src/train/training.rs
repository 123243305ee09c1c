//! The device-independent part of a rank's training.

use super::TrainError;
use super::places::Places;
use crate::cpu::Format;
use crate::data::{Dataset, Order, StepShape};
use crate::model::{Model, Registry};
use crate::nn::{Bucket, Graph, ModelError};
use std::sync::Arc;
use switchyard_worker_contract::config::{EngineConfig, HalfType, Length, Precision, Recomputation};

/// Bytes of a gradient bucket, unless a single parameter has more. Small, so that the first bucket
/// is complete early and the last one is reduced quickly.
pub(super) const BUCKET: usize = 1 << 20;

/// Model, data and schedule of a rank, independent of the device.
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
    pub total_steps: u64,
    pub(super) model: Arc<dyn Model>,
}

impl Training {
    /// Leaves `buckets` and `places` empty, because they depend on the layout.
    ///
    /// # Errors
    /// The model cannot be used, or there is too little data for one step.
    pub(super) fn new(
        config: &EngineConfig,
        dataset: Arc<Dataset>,
        world: u32,
        registry: &Registry,
    ) -> Result<Training, TrainError> {
        let shape = StepShape { batch_size: config.batch_size_per_process, merge: config.batch_merge, world };
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
            total_steps,
            model,
        })
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
        self.graph_in(match self.half_type() {
            None => Format::F32,
            Some(HalfType::Bf16) => Format::Bf16,
            Some(HalfType::Fp16) => Format::F16,
        })
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
