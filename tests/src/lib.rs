//! What the tests with real processes share: the two programs, manifests, deadlines, and the search for what is left behind.
#![forbid(unsafe_code)]

use std::path::Path;

/// Folder of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("invariant: this package lies in a folder of the repository")
}
