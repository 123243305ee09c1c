//! What a rank trains, whatever it computes with.

use super::TrainError;
use crate::cpu::Format;
use crate::data::{Dataset, Order, StepShape};
use crate::model::{Model, Registry};
use crate::nn::{Bucket, Graph};
use std::sync::Arc;
use switchyard_worker_contract::config::{EngineConfig, HalfType, Length, Precision};

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
    pub(super) model: Arc<dyn Model>,
}

impl Training {
    /// Without the buckets of gradients, which follow from where they are.
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
        Ok(Training { config: config.clone(), world, dataset, order, buckets: Vec::new(), total_steps, model })
    }

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
        match self.config.precision {
            Precision::Fp32 => None,
            Precision::Amp(amp) => Some(amp.compute_type),
        }
    }

    /// The network on these data.
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

    /// The same in another format.
    ///
    /// # Errors
    /// See [`Training::graph`].
    pub(super) fn graph_in(&self, format: Format) -> Result<Graph, TrainError> {
        let (config, images) = (&self.config, &self.config.data.images);
        let mut graph = Graph::new(config.batch_size_per_process as usize, self.dataset.kind(), format)
            .with_label_smoothing(config.label_smoothing as f32)
            .with_normalisation(&images.mean, &images.deviation);
        self.model.build(&mut graph)?;
        Ok(graph)
    }
}
