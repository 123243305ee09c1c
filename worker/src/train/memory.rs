//! Checks before the first step that a rank has enough host memory.

use super::TrainError;
use crate::cgroup;
use crate::process::variable;
use rustix::process::getppid;
use std::fs;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::MemoryUse;

/// Rejects a plan that exceeds its share of the memory.
///
/// # Errors
/// The plan is too large; the error suggests a change that fits.
pub(super) fn check(need: &MemoryUse, config: &EngineConfig) -> Result<(), TrainError> {
    let Some(capacity) = capacity() else { return Ok(()) };
    let ranks = variable(env::PROCS_PER_NODE).and_then(|text| text.parse().ok()).unwrap_or(1u64).max(1);
    check_share(need, config.batch_size_per_process, config.memory.fraction, capacity / ranks)
}

/// `share`: this rank's share of the node in bytes, of which it can use `fraction`.
fn check_share(need: &MemoryUse, batch: u32, fraction: f64, share: u64) -> Result<(), TrainError> {
    let limit = (share as f64 * fraction) as u64;
    if need.total() <= limit {
        return Ok(());
    }
    Err(TrainError::Memory {
        // Rounded up, and the limit down, so that the two figures always differ.
        need: need.total().div_ceil(1 << 20),
        activations: need.activations >> 20,
        limit: limit >> 20,
        fraction,
        help: batch_that_fits(need, batch, limit)
            .unwrap_or_else(|| "a smaller model, or fewer processes on the node".to_owned()),
    })
}

/// Suggests a batch size with which a rank needs at most `limit` bytes.
pub(super) fn batch_that_fits(need: &MemoryUse, batch: u32, limit: u64) -> Option<String> {
    // Activations grow with the batch; everything else is constant.
    let fixed = need.total() - need.activations;
    let fits = limit.saturating_sub(fixed).saturating_mul(batch.into()) / need.activations.max(1);
    (fits > 0).then(|| format!("batchSizePerProcess: {fits} (with batchMerge for the same global batch)"))
}

/// Memory for the ranks of this machine or container in bytes, whichever is less. Memory in use is
/// not subtracted, because the other ranks of the node may already have allocated theirs, except
/// for the launcher's in the same cgroup.
fn capacity() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(total_in);
    let group = cgroup::memory().map(|group| group.saturating_sub(launcher().unwrap_or(0)));
    match (machine, group) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Resident memory of the parent process in bytes, if it is in the same cgroups. Without the pages
/// of its program, which the kernel can drop.
fn launcher() -> Option<u64> {
    let parent = format!("/proc/{}", getppid()?.as_raw_nonzero());
    let groups = |process: &str| fs::read_to_string(format!("{process}/cgroup")).ok();
    groups(&parent).filter(|own| Some(own) == groups("/proc/self").as_ref())?;
    let status = fs::read_to_string(format!("{parent}/status")).ok()?;
    kilobytes(&status, "RssAnon:")
}

fn total_in(meminfo: &str) -> Option<u64> {
    kilobytes(meminfo, "MemTotal:")
}

/// A value of a file in `/proc`, in bytes.
fn kilobytes(file: &str, name: &str) -> Option<u64> {
    let line = file.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns unused allocator memory to the system.
#[allow(unsafe_code)]
pub(super) fn release() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: the function takes an integer and touches only the allocator's own memory.
        unsafe { malloc_trim(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reported_need_always_exceeds_the_reported_limit() {
        let need = MemoryUse { activations: 19 << 19, ..MemoryUse::default() };
        let error = check_share(&need, 8, 0.92, 10 << 20).map_err(|error| error.to_string());
        assert!(error.is_err_and(|error| error.contains("needs 10 MiB") && error.contains("may take 9 MiB")));
    }

    #[test]
    fn machine_memory_is_detected() {
        assert_eq!(total_in("MemTotal:    2048 kB\nMemAvailable: 10 kB\n"), Some(2 << 20));
        assert_eq!(total_in("MemFree: 10 kB\n"), None);
        assert!(capacity().is_some_and(|bytes| bytes > 1 << 20));
    }
}
