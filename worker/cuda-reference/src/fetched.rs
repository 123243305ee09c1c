//! NVIDIA files that the tests need.

use std::path::{Path, PathBuf};

/// A folder fetched by `cargo xtask data cuda`.
///
/// # Panics
/// If it is missing. A test without it would check nothing, so it must not pass.
pub fn fetched(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/data").join(name);
    assert!(folder.is_dir(), "target/data/{name} is missing: `cargo xtask data cuda` fetches it");
    folder
}
