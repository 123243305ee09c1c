//! The trained model as safetensors, which PyTorch, Hugging Face and others read as it is.

use super::TrainError;
use super::blueprint::Blueprint;
use super::disk::CountedDisk;
use super::state::{Names, TrainingState};
use std::collections::BTreeMap;
use std::path::Path;
use switchyard_checkpoint::export::write_model;
use switchyard_checkpoint::{Role, TensorSpec};

/// Writes all parameters and statistics by name. The file appears under its name when it is complete, or not at all.
pub(super) fn model(
    disk: &CountedDisk,
    file: &Path,
    blueprint: &Blueprint,
    state: &TrainingState,
) -> Result<(), TrainError> {
    let names = Names::new(state, blueprint);
    let tensors: Vec<TensorSpec> =
        state.tensors(blueprint).into_iter().filter(|tensor| tensor.role != Role::Optimizer).collect();
    let numbers: BTreeMap<String, Vec<f32>> = tensors
        .iter()
        .filter_map(|tensor| Some((tensor.name.clone(), state.tensor(&names, &tensor.name)?.to_vec())))
        .collect();
    let written = write_model(disk, &tensors, numbers, state.step, file);
    written.map(drop).map_err(|error| TrainError::Save { file: file.display().to_string(), cause: error.to_string() })
}
