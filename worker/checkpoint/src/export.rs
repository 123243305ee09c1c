//! Exports the model as one safetensors file for other programs: weights and statistics, without
//! optimizer state.

use crate::disk::Vfs;
use crate::error::CheckpointError;
use crate::format::{Role, TensorEntry, TensorSpec, encode_header};
use crate::store::{Checkpoint, Store, write_atomically};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// File metadata: the format that PyTorch's readers expect, the progress of the run, and what else
/// the model needs.
#[derive(Serialize)]
struct Metadata<'a> {
    format: &'static str,
    step: String,
    #[serde(flatten)]
    model: &'a ModelMetadata,
}

/// What a program needs besides tensors to use the model, as metadata of the file.
pub type ModelMetadata = BTreeMap<String, String>;

/// The part of a run's progress that is exported.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ExportedProgress {
    model_metadata: ModelMetadata,
}

/// Size of the exported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub tensors: usize,
    /// Length of the file in bytes.
    pub bytes: u64,
}

/// Writes the model of a checkpoint to a file, replacing an existing one. The model is held in
/// memory, and all digests are verified before anything is written.
///
/// # Errors
/// The checkpoint is damaged, or the file cannot be written.
pub fn export(
    vfs: &dyn Vfs,
    store: &Store<'_>,
    checkpoint: &Checkpoint,
    to: &Path,
) -> Result<Exported, CheckpointError> {
    let manifest = checkpoint.manifest();
    let model: Vec<TensorSpec> =
        manifest.plan().tensors().iter().filter(|tensor| tensor.role != Role::Optimizer).cloned().collect();
    // The manifest guarantees that every tensor is backed by shards of the right length, so this
    // allocates no more than is on the disk.
    let mut numbers: BTreeMap<String, Vec<f32>> =
        model.iter().map(|tensor| (tensor.name.clone(), vec![0.0; tensor.element_count()])).collect();
    store.restore(checkpoint, &mut numbers)?;
    let take = |name: &str| numbers.remove(name).ok_or_else(|| io::Error::other(format!("tensor `{name}` is missing")));
    // Any progress has a form without metadata.
    let ExportedProgress { model_metadata } = manifest.info().progress.read().unwrap_or_default();
    write_model(vfs, &model, take, (manifest.info().id.step, &model_metadata), to)
}

/// Writes tensors to a file that PyTorch, Hugging Face and others can read, replacing an existing
/// one. Uses the export names, parts and axis order of each tensor. `numbers` returns the values of
/// a tensor by name, once per tensor, so that only one tensor need be in memory.
///
/// # Errors
/// `numbers` failed, or the file cannot be written.
pub fn write_model(
    vfs: &dyn Vfs,
    model: &[TensorSpec],
    mut numbers: impl FnMut(&str) -> io::Result<Vec<f32>>,
    (step, metadata): (u64, &ModelMetadata),
    to: &Path,
) -> Result<Exported, CheckpointError> {
    let mut at = 0;
    let mut entries = Vec::with_capacity(model.len());
    for tensor in model {
        let (names, shape) = tensor.exported();
        let part = (tensor.element_count() / names.len()) as u64 * 4;
        for name in names {
            entries.push(TensorEntry { name, shape: shape.clone(), bytes: at..at + part });
            at += part;
        }
    }
    let tensors = entries.len();
    let header =
        encode_header(&Metadata { format: "pt", step: step.to_string(), model: metadata }, entries.into_iter());
    let length = header.len() as u64 + at;
    write_atomically(vfs, to, length, |out| {
        out.write_all(&header)?;
        model.iter().try_for_each(|tensor| {
            let mut numbers = numbers(&tensor.name)?;
            if let Some(axes) = &tensor.export_axes {
                numbers = permute(&numbers, &tensor.shape, axes);
            }
            out.write_all(bytemuck::cast_slice(&numbers))
        })
    })?;
    Ok(Exported { tensors, bytes: length })
}

/// Transposes a row-major tensor: axis `i` of the result is axis `axes[i]` of the input.
fn permute(numbers: &[f32], shape: &[usize], axes: &[usize]) -> Vec<f32> {
    let stride = |axis: usize| shape[axis + 1..].iter().product::<usize>();
    let steps: Vec<(usize, usize)> = axes.iter().map(|axis| (shape[*axis], stride(*axis))).collect();
    let mut index = vec![0; axes.len()];
    let mut at = 0;
    let mut out = Vec::with_capacity(numbers.len());
    for _ in 0..numbers.len() {
        out.push(numbers[at]);
        // The last axis varies fastest; an axis that reaches its end wraps to 0 and carries over.
        for (place, (extent, stride)) in index.iter_mut().zip(&steps).rev() {
            *place += 1;
            at += stride;
            if *place < *extent {
                break;
            }
            *place = 0;
            at -= stride * extent;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permute_matches_indexing() {
        let shape = [2, 3, 4, 5];
        let numbers: Vec<f32> = (0..120).map(|i| i as f32).collect();
        let out = permute(&numbers, &shape, &[0, 3, 1, 2]);
        for (o, h, w, i) in (0..120).map(|n| (n / 60, n / 20 % 3, n / 5 % 4, n % 5)) {
            assert_eq!(out[((o * 5 + i) * 3 + h) * 4 + w], numbers[((o * 3 + h) * 4 + w) * 5 + i]);
        }
        assert_eq!(permute(&numbers, &shape, &[0, 1, 2, 3]), numbers);
        assert_eq!(permute(&[7.0], &[], &[]), [7.0]);
    }
}
