//! GPU usage by other processes, from NVML: processes, free memory, MIG. Without NVML nothing is
//! known, and nothing is rejected.

use super::health::nvml;
use crate::train::TrainError;
use switchyard_cuda::nvml::{Gpu, Process};

impl TrainError {
    /// Adds the processes that use a GPU to the error.
    pub(super) fn with_users_of(mut self, bus: &str) -> TrainError {
        match &mut self {
            TrainError::GpuMemory { others: text, .. } | TrainError::Cuda { details: text, .. } => {
                text.push_str(&others(bus))
            }
            _ => {}
        }
        self
    }
}

/// Current usage of a GPU.
#[derive(Debug, Default)]
pub struct GpuUsage {
    /// Free memory in bytes.
    pub free_bytes: Option<u64>,
    pub processes: Vec<Process>,
    /// MIG divides it.
    pub is_divided: bool,
}

/// The usage of the GPU at a bus address; unknown without NVML.
pub fn gpu_usage(bus: &str) -> GpuUsage {
    let Some(gpu) = gpu(bus) else { return GpuUsage::default() };
    GpuUsage {
        free_bytes: gpu.memory().ok().map(|memory| memory.free),
        processes: gpu.processes().unwrap_or_default(),
        is_divided: gpu.is_divided(),
    }
}

fn gpu(bus: &str) -> Option<Gpu> {
    nvml().and_then(|nvml| nvml.gpu(bus)).ok()
}

/// Free memory in bytes; `None` if unknown. Also `None` with MIG, because a process has only a part
/// of the GPU.
pub(super) fn free_bytes(bus: &str) -> Option<u64> {
    let GpuUsage { free_bytes, is_divided, .. } = gpu_usage(bus);
    free_bytes.filter(|_| !is_divided)
}

/// Other processes on the GPU, as a suffix for error messages; empty if NVML shows none.
fn others(bus: &str) -> String {
    describe_others(bus, &gpu_usage(bus).processes, std::process::id())
}

fn describe_others(bus: &str, processes: &[Process], own: u32) -> String {
    let others = processes.iter().filter(|process| process.pid != own);
    let describe = |Process { pid, name, bytes }: &Process| {
        let name = name.as_deref().unwrap_or("a process");
        let memory = bytes.map_or_else(String::new, |bytes| format!(", {} MiB", bytes >> 20));
        format!("{name} (pid {pid}{memory})")
    };
    let named: Vec<String> = others.map(describe).collect();
    if named.is_empty() { String::new() } else { format!("; GPU {bus} is used by {}", named.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_processes_are_named_if_known() {
        let process = |pid, name: Option<&str>, bytes| Process { pid, name: name.map(str::to_owned), bytes };
        let all =
            [process(7, Some("worker"), Some(9)), process(8, Some("python3"), Some(3 << 20)), process(9, None, None)];
        assert_eq!(
            describe_others("0000:17:00.0", &all, 7),
            "; GPU 0000:17:00.0 is used by python3 (pid 8, 3 MiB), a process (pid 9)"
        );
        assert_eq!(describe_others("0000:17:00.0", &all[..1], 7), "");
    }
}
