//! `switchyard-worker gpu`: the libraries and GPUs available for training on this machine.

use crate::train::{GpuUsage, gpu_usage};
use std::path::Path;
use switchyard_cuda::driver::Device;
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, NCCL, NVML, NVRTC, Places};
use switchyard_cuda::inventory::{Item, detect};
use switchyard_cuda::nvml;
use switchyard_worker_contract::software::{Gpu, Library, Process, Software};

/// Inspects the machine in the same way as the GPU engine.
pub(super) fn software() -> Software {
    let (items, devices) = detect(&Places::new(|name| std::env::var_os(name), Path::new("/"), None));
    Software { libraries: items.into_iter().map(library).collect(), gpus: devices.into_iter().map(gpu).collect() }
}

fn library(Item { name, place, version }: Item) -> Library {
    let (without, remedy) = consequence(name);
    let problem = version.as_ref().err().map(ToString::to_string);
    Library {
        name: name.to_owned(),
        file: place.as_ref().map(|(file, _)| file.display().to_string()),
        found_by: place.map(|(_, origin)| origin.name().to_owned()),
        version: version.ok(),
        remedy: problem.as_ref().and(remedy).map(str::to_owned),
        problem,
        without: without.to_owned(),
    }
}

/// What happens without a library, and how to install it.
fn consequence(name: &str) -> (&'static str, Option<&'static str>) {
    const NONE: &str = "no job runs on GPUs";
    match name {
        name if name == DRIVER.name => {
            (NONE, Some("install NVIDIA's driver 550 or newer on the host; start a container with --gpus all"))
        }
        name if name == NVRTC.name => (NONE, Some("pip install nvidia-cuda-nvrtc")),
        name if name == CUBLASLT.name => (NONE, Some("pip install nvidia-cublas")),
        name if name == NCCL.name => {
            ("gradients are reduced through host memory", Some("pip install nvidia-nccl-cu13"))
        }
        name if name == NVML.name => (
            "GPUs are not monitored for errors and slow clocks",
            Some("it is part of the driver: containers need `utility` in NVIDIA_DRIVER_CAPABILITIES"),
        ),
        name if name == CUDNN.name => {
            ("networks with convolutions do not run on GPUs", Some("pip install nvidia-cudnn-cu13"))
        }
        _ => ("nothing is missing", None),
    }
}

fn gpu(Device { name, bus, memory_bytes, .. }: Device) -> Gpu {
    let GpuUsage { free_bytes, processes, is_divided } = gpu_usage(&bus);
    let process = |found: nvml::Process| Process { pid: found.pid, name: found.name, memory_bytes: found.bytes };
    let processes = processes.into_iter().map(process).collect();
    Gpu { name, bus, memory_bytes: memory_bytes as u64, free_bytes, processes, is_divided }
}
