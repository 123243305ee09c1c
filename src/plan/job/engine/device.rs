//! Compute device of the ranks.

use super::Check;
use switchyard_crds as api;
use switchyard_worker_contract::config::{Device, Gpu, Matmul};

/// Translates the device. `processes` and `gpus` are per node. A run on one machine may find GPUs
/// that no trainer requested.
pub(super) fn device(engine: &api::Engine, (processes, gpus): (u32, u32), check: &mut Check<'_>) -> Device {
    let device = match engine.device {
        api::Device::Cuda => Device::Cuda,
        api::Device::Auto if gpus > 0 => Device::Cuda,
        api::Device::Auto | api::Device::Cpu => Device::Cpu,
    };
    let precision = &engine.precision;
    if device == Device::Cpu {
        match precision.matmul {
            api::Matmul::IEEE => {}
            api::Matmul::TF32 => {
                let expected = "IEEE: CPUs multiply in full FP32; or mode AMP, which is faster";
                check.fault("precision.matmul", "TF32 on CPUs", expected);
            }
            api::Matmul::FP8 => check.fault("precision.matmul", "FP8 on CPUs", "IEEE: only GPUs multiply in FP8"),
        }
        return device;
    }
    let is_bf16 = precision.mode == api::PrecisionMode::AMP && precision.compute_type != Some(api::ComputeType::FP16);
    if precision.matmul == api::Matmul::FP8 && !is_bf16 {
        let got = match precision.mode {
            api::PrecisionMode::FP32 => "FP8 with mode FP32",
            api::PrecisionMode::AMP => "FP8 with computeType FP16",
        };
        check.fault("precision.matmul", got, "mode AMP with computeType BF16, the default: FP8 is rounded from BF16");
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

/// Compute settings for GPUs.
pub(super) fn gpu(engine: &api::Engine) -> Gpu {
    let matmul = match engine.precision.matmul {
        api::Matmul::IEEE => Matmul::Ieee,
        api::Matmul::TF32 => Matmul::Tf32,
        api::Matmul::FP8 => Matmul::Fp8,
    };
    Gpu { graphs: engine.cuda_graphs.is_on(), matmul, deterministic: engine.deterministic.is_on() }
}
