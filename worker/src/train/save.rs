//! Writes the trained model as safetensors, which PyTorch, Hugging Face and others can read.

use super::TrainError;
use super::disk::CountedDisk;
use super::engine::Engine;
use super::tensors::{TensorIndex, tensors};
use crate::comm::CommError;
use std::io;
use std::path::Path;
use switchyard_checkpoint::export::{ModelMetadata, write_model};
use switchyard_checkpoint::{Role, TensorSpec};

/// Writes all parameters and statistics by name. The file appears under its name only when it is
/// complete. If this rank has only some of the weights, it calls `announce` before each tensor, and
/// all other ranks collect with it.
pub(super) fn model(
    disk: &CountedDisk,
    file: &Path,
    engine: &mut dyn Engine,
    mut announce: impl FnMut() -> Result<(), CommError>,
    (step, metadata): (u64, &ModelMetadata),
) -> Result<(), TrainError> {
    let index = TensorIndex::new(engine, 0);
    let tensors: Vec<TensorSpec> =
        tensors(engine).into_iter().filter(|tensor| tensor.role != Role::Optimizer).collect();
    // One tensor at a time: a copy of the whole model might not fit into memory.
    let mut failed = None;
    let read = |name: &str| {
        let (array, range) = index.find(name).ok_or_else(|| io::Error::other(format!("no tensor `{name}`")))?;
        let mut numbers = vec![0.0; range.len()];
        let read = match engine.has_all_weights() {
            true => engine.read(array, range.start, &mut numbers),
            false => announce().map_err(TrainError::from).and_then(|()| {
                let place = 0..numbers.len();
                engine.collect(&[(array, range.start, place)], &mut numbers)
            }),
        };
        read.map_err(|error| io::Error::other(failed.insert(error).to_string()))?;
        Ok(numbers)
    };
    let written = write_model(disk, &tensors, read, (step, metadata), file);
    // No other file helps if the group has failed.
    if let Some(error @ TrainError::Comm(_)) = failed {
        return Err(error);
    }
    written.map(drop).map_err(|error| TrainError::Save { file: file.display().to_string(), cause: error.to_string() })
}
