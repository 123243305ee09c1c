//! What tests need of NVIDIA's.

use std::path::{Path, PathBuf};

/// A folder that `cargo xtask data cuda` fetches.
///
/// # Panics
/// It is missing. A test without it would test nothing, so it must not pass.
pub fn fetched(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/data").join(name);
    assert!(folder.is_dir(), "target/data/{name} is missing: `cargo xtask data cuda` fetches it");
    folder
}
