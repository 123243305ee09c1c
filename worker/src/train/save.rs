//! The trained model as safetensors: PyTorch, Hugging Face and the like read it as it is.

use super::TrainError;
use crate::model::Layout;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Writes all parameters by name. The file appears complete, under its name, or not at all.
pub(super) fn weights(file: &Path, layout: &Layout, weights: &[f32], step: u64) -> Result<(), TrainError> {
    let failed = |source| TrainError::Save { file: file.display().to_string(), source };
    let views: Result<Vec<_>, _> = layout
        .parameters
        .iter()
        .map(|parameter| {
            let bytes: &[u8] = bytemuck::cast_slice(&weights[parameter.range()]);
            Ok((parameter.name.clone(), TensorView::new(Dtype::F32, parameter.shape.clone(), bytes)?))
        })
        .collect();
    let views = views.map_err(|error: safetensors::SafeTensorError| failed(io::Error::other(error)))?;
    let metadata = HashMap::from([("format".to_string(), "pt".to_string()), ("step".to_string(), step.to_string())]);
    let bytes = safetensors::serialize(views, Some(metadata)).map_err(|error| failed(io::Error::other(error)))?;
    let temporary = file.with_extension("new");
    let write = || {
        let mut out = File::create(&temporary)?;
        out.write_all(&bytes)?;
        out.sync_all()?;
        fs::rename(&temporary, file)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        failed(source)
    })
}
