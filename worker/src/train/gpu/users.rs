//! What NVML says of a GPU before this process takes it: who else uses it, how much memory is free, whether MIG divides it. Without NVML
//! nothing is known, and nothing is refused.

use super::health::nvml;
use crate::train::TrainError;
use switchyard_cuda::nvml::{Gpu, Process};

impl TrainError {
    /// The same, with the processes that use a GPU.
    pub(super) fn with_users_of(mut self, bus: &str) -> TrainError {
        match &mut self {
            TrainError::GpuMemory { others: text, .. } | TrainError::Cuda { seen: text, .. } => {
                text.push_str(&others(bus))
            }
            _ => {}
        }
        self
    }
}

/// How a GPU is used now.
#[derive(Debug, Default)]
pub struct Use {
    /// Bytes of its memory that nobody has.
    pub free_bytes: Option<u64>,
    pub processes: Vec<Process>,
    /// MIG divides it.
    pub is_divided: bool,
}

/// How the GPU at an address is used; nothing is known without NVML.
pub fn in_use(bus: &str) -> Use {
    let Some(gpu) = gpu(bus) else { return Use::default() };
    Use {
        free_bytes: gpu.memory().ok().map(|memory| memory.free),
        processes: gpu.processes().unwrap_or_default(),
        is_divided: gpu.is_divided(),
    }
}

fn gpu(bus: &str) -> Option<Gpu> {
    nvml().and_then(|nvml| nvml.gpu(bus)).ok()
}

/// Bytes of its memory that nobody has; `None`: not known. Of a GPU that MIG divides, a process has a part, of which this says nothing.
pub(super) fn free_bytes(bus: &str) -> Option<u64> {
    let Use { free_bytes, is_divided, .. } = in_use(bus);
    free_bytes.filter(|_| !is_divided)
}

/// Other processes on it, to be appended to an error; empty if NVML shows none.
fn others(bus: &str) -> String {
    words(bus, &in_use(bus).processes, std::process::id())
}

fn words(bus: &str, processes: &[Process], own: u32) -> String {
    let others = processes.iter().filter(|process| process.pid != own);
    let one = |Process { pid, name, bytes }: &Process| {
        let name = name.as_deref().unwrap_or("a process");
        let memory = bytes.map_or_else(String::new, |bytes| format!(", {} MiB", bytes >> 20));
        format!("{name} (pid {pid}{memory})")
    };
    let named: Vec<String> = others.map(one).collect();
    if named.is_empty() { String::new() } else { format!("; GPU {bus} is used by {}", named.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_named_as_far_as_they_are_known() {
        let process = |pid, name: Option<&str>, bytes| Process { pid, name: name.map(str::to_owned), bytes };
        let all =
            [process(7, Some("worker"), Some(9)), process(8, Some("python3"), Some(3 << 20)), process(9, None, None)];
        assert_eq!(
            words("0000:17:00.0", &all, 7),
            "; GPU 0000:17:00.0 is used by python3 (pid 8, 3 MiB), a process (pid 9)"
        );
        assert_eq!(words("0000:17:00.0", &all[..1], 7), "");
    }
}
