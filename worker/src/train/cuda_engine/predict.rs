//! Predicts a lower bound of the step time on a GPU that may be absent.

use super::machine::target_of;
use super::plan::{computation, memory, too_large};
use crate::data::Dataset;
use crate::lowering::CudnnKinds;
use crate::model::Registry;
use crate::train::TrainError;
use crate::train::training::Training;
use std::sync::Arc;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::prediction::{Gpu, Prediction};

/// Plans a rank of a job for a GPU; needs no CUDA library.
///
/// # Errors
/// The model cannot be built or run on a GPU, there is too little data for one step, or the GPU has
/// too little memory.
pub fn predict(
    config: &EngineConfig,
    dataset: Arc<Dataset>,
    world: u32,
    gpu: Gpu,
    registry: &Registry,
) -> Result<Prediction, TrainError> {
    let training = Training::new(config, dataset, world, registry)?;
    let graph = training.graph()?;
    // The bound is lowest if cuDNN computes everything it can.
    let all = CudnnKinds::all(&graph);
    let target = target_of(gpu.multiprocessors, gpu.shared_bytes_per_block).with(all);
    let computation = computation(&training, graph, target)?;
    let limit = (gpu.memory_bytes as f64 * config.memory.fraction) as u64;
    let need = memory(&computation, &training);
    if need.total() > limit {
        return Err(too_large(&need, &training, limit));
    }
    Ok(Prediction {
        model: training.model.words(),
        parameters: computation.layout().trainable() as u64,
        items: training.items_per_step() / u64::from(world),
        item: training.dataset.facts().item,
        memory_bytes: need.total(),
        memory_limit_bytes: limit,
        operations: computation.predict(config.batch_merge, &gpu)?,
        gpu,
    })
}
