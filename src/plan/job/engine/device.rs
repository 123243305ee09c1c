//! What the ranks compute with.

use super::Check;
use switchyard_crds as api;
use switchyard_worker_contract::config::Device;

/// Processes and GPUs are those of a node. A run on one machine may find GPUs that no trainer asked for.
pub(super) fn device(engine: &api::Engine, (processes, gpus): (u32, u32), check: &mut Check<'_>) -> Device {
    let device = match engine.device {
        api::Device::Cuda => Device::Cuda,
        api::Device::Auto if gpus > 0 => Device::Cuda,
        api::Device::Auto | api::Device::Cpu => Device::Cpu,
    };
    if device == Device::Cpu {
        return device;
    }
    if gpus > 0 && processes > gpus {
        let expected = format!("a GPU for each: trainer.numProcPerNode {gpus}, or nvidia.com/gpu {processes}");
        check.fault("device", format!("{processes} processes on a node with {gpus} GPUs"), expected);
    }
    if engine.reader.pinned_memory == api::PinnedMemory::Disabled {
        check.fault("reader.pinnedMemory", "Disabled on GPUs", "Auto: GPUs take batches from pinned memory");
    }
    device
}
