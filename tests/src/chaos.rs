//! Long tests: how much of them is done, and where their results go.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;

/// Folder for results: set by `cargo xtask chaos`, which has everything done in full.
fn folder() -> Option<PathBuf> {
    std::env::var_os("SWITCHYARD_CHAOS").map(PathBuf::from)
}

/// True where everything is done in full.
pub fn is_full() -> bool {
    folder().is_some()
}

/// How many, in CI and in `cargo xtask chaos`.
pub fn size(ci: usize, full: usize) -> usize {
    if is_full() { full } else { ci }
}

/// The seed of this run, where somebody asks for one: a failure is played again by it.
pub fn seed() -> Option<u64> {
    std::env::var("SWITCHYARD_SEED").ok().and_then(|text| text.parse().ok())
}

/// Says what was counted, and writes it down where `cargo xtask chaos` collects it.
///
/// # Errors
/// The file cannot be written.
pub fn report(id: &str, result: &Value) -> Result<()> {
    println!("{id}: {result}");
    if let Some(folder) = folder() {
        let path = folder.join(format!("{id}.json"));
        std::fs::write(&path, format!("{}\n", serde_json::to_string_pretty(result)?))
            .with_context(|| path.display().to_string())?;
    }
    Ok(())
}
