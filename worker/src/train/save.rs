//! Writes the trained model as safetensors, which PyTorch, Hugging Face and others can read.

use super::TrainError;
use super::disk::CountedDisk;
use super::engine::Engine;
use super::tensors::{TensorIndex, tensors};
use std::collections::BTreeMap;
use std::path::Path;
use switchyard_checkpoint::export::{ModelMetadata, write_model};
use switchyard_checkpoint::{Role, TensorSpec};

/// Writes all parameters and statistics by name. The file appears under its name only when it is
/// complete.
pub(super) fn model(
    disk: &CountedDisk,
    file: &Path,
    engine: &dyn Engine,
    (step, metadata): (u64, &ModelMetadata),
) -> Result<(), TrainError> {
    let index = TensorIndex::new(engine);
    let tensors: Vec<TensorSpec> =
        tensors(engine).into_iter().filter(|tensor| tensor.role != Role::Optimizer).collect();
    let mut all = BTreeMap::new();
    for tensor in &tensors {
        if let Some((array, range)) = index.find(&tensor.name) {
            let mut numbers = vec![0.0; range.len()];
            engine.read(array, range.start, &mut numbers)?;
            all.insert(tensor.name.clone(), numbers);
        }
    }
    let written = write_model(disk, &tensors, all, (step, metadata), file);
    written.map(drop).map_err(|error| TrainError::Save { file: file.display().to_string(), cause: error.to_string() })
}
