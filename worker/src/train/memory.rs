//! Whether a rank has enough memory, checked before the first step.

use super::TrainError;
use crate::cgroup;
use crate::process::variable;
use std::fs;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::MemoryUse;

/// Refuses a plan that takes more than its share of the memory.
///
/// # Errors
/// The plan is too large; the error says what would fit.
pub(super) fn check(need: &MemoryUse, config: &EngineConfig) -> Result<(), TrainError> {
    let Some(capacity) = capacity() else { return Ok(()) };
    let ranks = variable(env::PROCS_PER_NODE).and_then(|text| text.parse().ok()).unwrap_or(1u64).max(1);
    judge(need, config.batch_size_per_process, config.memory.fraction, capacity / ranks)
}

/// `share`: bytes of the node for this rank, of which it may take this fraction.
fn judge(need: &MemoryUse, batch: u32, fraction: f64, share: u64) -> Result<(), TrainError> {
    let limit = (share as f64 * fraction) as u64;
    if need.total() <= limit {
        return Ok(());
    }
    Err(TrainError::Memory {
        // Rounded up, and the limit down: the two figures differ whatever the amounts are.
        need: need.total().div_ceil(1 << 20),
        activations: need.activations >> 20,
        limit: limit >> 20,
        fraction,
        help: batch_that_fits(need, batch, limit)
            .unwrap_or_else(|| "a smaller model, or fewer processes on the node".to_owned()),
    })
}

/// A smaller batch with which a rank takes at most `limit` bytes.
pub(super) fn batch_that_fits(need: &MemoryUse, batch: u32, limit: u64) -> Option<String> {
    // Activations grow with the batch, everything else stays the same.
    let fixed = need.total() - need.activations;
    let fits = limit.saturating_sub(fixed).saturating_mul(batch.into()) / need.activations.max(1);
    (fits > 0).then(|| format!("batchSizePerProcess: {fits} (with batchMerge for the same global batch)"))
}

/// Memory in bytes of this machine, or of the container if that is less. Memory in use is not subtracted: the other
/// ranks of the node may already have taken it.
fn capacity() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(total_in);
    match (machine, cgroup::memory()) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

fn total_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns memory that the allocator keeps to the system.
#[allow(unsafe_code)]
pub(super) fn release() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: the function takes a number and touches only the allocator's own memory.
        unsafe { malloc_trim(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_is_never_said_to_be_what_there_is() {
        let need = MemoryUse { activations: 19 << 19, ..MemoryUse::default() };
        let error = judge(&need, 8, 0.92, 10 << 20).map_err(|error| error.to_string());
        assert!(error.is_err_and(|error| error.contains("needs 10 MiB") && error.contains("may take 9 MiB")));
    }

    #[test]
    fn the_memory_of_the_machine_is_found() {
        assert_eq!(total_in("MemTotal:    2048 kB\nMemAvailable: 10 kB\n"), Some(2 << 20));
        assert_eq!(total_in("MemFree: 10 kB\n"), None);
        assert!(capacity().is_some_and(|bytes| bytes > 1 << 20));
    }
}
