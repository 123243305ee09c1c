//! Recordings of a training rank; see [`switchyard_worker_contract::record`] for the files.
//!
//! Always on: one line per step, buffered and written with the progress reports. On request: every
//! operation of selected steps.

mod kernels;
mod steps;
mod tensorboard;
mod trace;

pub use kernels::{write_kernel_times, write_layer_times};
pub use steps::StepFile;
pub use tensorboard::EventFile;
pub use trace::{Row, Trace};

use serde::Serialize;
use std::fs::{self, DirBuilder};
use std::io;
use std::path::Path;
use switchyard_worker_contract::record;

/// Writes or replaces a record file atomically.
fn replace(run_dir: &Path, name: &str, value: &impl Serialize) -> io::Result<()> {
    let folder = run_dir.join(record::DIR);
    DirBuilder::new().recursive(true).create(&folder)?;
    let file = folder.join(name);
    let temporary = file.with_extension("new");
    fs::write(&temporary, serde_json::to_vec(value)?)?;
    fs::rename(temporary, file)
}
