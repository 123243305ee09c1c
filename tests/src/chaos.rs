//! Long tests: how many iterations they run, and where their results are written.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;

/// Folder for results. Set by `cargo xtask chaos`, which runs every test at full size.
fn folder() -> Option<PathBuf> {
    std::env::var_os("SWITCHYARD_CHAOS").map(PathBuf::from)
}

/// True if tests run at full size.
pub fn is_full() -> bool {
    folder().is_some()
}

/// Returns the number of iterations: `ci` in CI, `full` in `cargo xtask chaos`.
pub fn size(ci: usize, full: usize) -> usize {
    if is_full() { full } else { ci }
}

/// Returns the seed from `SWITCHYARD_SEED`, if set, to reproduce a failure.
pub fn seed() -> Option<u64> {
    std::env::var("SWITCHYARD_SEED").ok().and_then(|text| text.parse().ok())
}

/// Prints a result, and writes it to the folder that `cargo xtask chaos` collects.
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
