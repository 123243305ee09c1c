//! Writes `crds/generated`. `cargo xtask gen` runs this before generating files that depend on
//! them.
#![forbid(unsafe_code)]

use std::path::Path;
use switchyard_crds::generate::{crds, yaml};

fn main() -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("generated");
    std::fs::create_dir_all(&folder)?;
    for (name, crd) in crds() {
        std::fs::write(folder.join(name), yaml(&crd))?;
        println!("crds/generated/{name}");
    }
    Ok(())
}
