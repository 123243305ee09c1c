//! Folders for what a part needs while it runs: configurations, weights, checkpoints.

use std::path::{Path, PathBuf};

/// The folder of this part, made when it is asked for. The probe removes it when the part has ended, however it ended.
pub(crate) fn folder(name: &str) -> std::io::Result<PathBuf> {
    let folder = of(std::process::id()).join(name);
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Removes what the part in this process left.
pub(crate) fn remove_of(process: u32) {
    let _ = std::fs::remove_dir_all(of(process));
}

fn of(process: u32) -> PathBuf {
    Path::new(&std::env::temp_dir()).join(format!("gpu-probe-{process}"))
}
