//! The kernel times file of a rank on a GPU, and the layer times file of one on CPUs.

use super::replace;
use std::io;
use std::path::Path;
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::layers::LayerTimes;
use switchyard_worker_contract::record;

/// Writes a rank's file to the run directory.
///
/// # Errors
/// The file cannot be written.
pub fn write_kernel_times(run_dir: &Path, rank: u32, attempt: u32, times: &KernelTimes) -> io::Result<()> {
    replace(run_dir, &record::kernels_file(rank), &KernelTimes { attempt, ..times.clone() })
}

/// Writes a rank's layer times to the run directory.
///
/// # Errors
/// The file cannot be written.
pub fn write_layer_times(run_dir: &Path, rank: u32, times: &LayerTimes) -> io::Result<()> {
    replace(run_dir, &record::layers_file(rank), times)
}
