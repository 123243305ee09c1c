//! The times of the kernels of a GPU, as a file.

use super::replace;
use std::io;
use std::path::Path;
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::record;

/// Writes the file of a rank to the run directory.
///
/// # Errors
/// The file cannot be written.
pub fn write_kernel_times(run_dir: &Path, rank: u32, attempt: u32, times: &KernelTimes) -> io::Result<()> {
    replace(run_dir, &record::kernels_file(rank), &KernelTimes { attempt, ..times.clone() })
}
