//! Scratch folders of the parts: configurations, weights, checkpoints.

use std::path::{Path, PathBuf};

/// Creates a scratch folder of this part. The probe removes it when the part ends, however it ends.
pub(crate) fn folder(name: &str) -> std::io::Result<PathBuf> {
    let folder = root_of(std::process::id()).join(name);
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Removes the scratch folders of a part's process.
pub(crate) fn remove(process: u32) {
    let _ = std::fs::remove_dir_all(root_of(process));
}

fn root_of(process: u32) -> PathBuf {
    Path::new(&std::env::temp_dir()).join(format!("gpu-probe-{process}"))
}
