//! Inspection of a job by a launcher before anything starts.

use crate::pods::{Job, WORKER};
use crate::support::{amp, gpt, on};
use std::fs::File;
use std::process::Command;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Inspection, MemoryUse};

fn inspected(ranks: u32, change: impl FnOnce(&mut EngineConfig)) -> Inspection {
    let job = Job::new(1, ranks, 5).with(on(Device::Cuda, 5, |config| {
        gpt(config);
        change(config);
    }));
    let mut command = Command::new(WORKER);
    command.arg("inspect").envs(environment()).stdin(File::open(job.path("engine.json")).unwrap());
    command.env(env::PROCS_PER_NODE, ranks.to_string());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_job_is_refused_if_other_processes_use_its_gpu_memory() {
    let libraries = environment();
    let job = Job::new(1, 2, 5).with(on(Device::Cuda, 5, gpt));
    let inspect = |fault: &str| {
        let mut command = Command::new(WORKER);
        command.arg("inspect").envs(libraries.iter().map(|(name, value)| (*name, value.as_os_str())));
        command
            .env("SWITCHYARD_REFERENCE_MEMORY", (500_u64 << 20).to_string())
            .env("SWITCHYARD_REFERENCE_FAULT", fault);
        command.env("SWITCHYARD_REFERENCE_DEVICES", "2").env(env::PROCS_PER_NODE, "2");
        let output = command.stdin(File::open(job.path("engine.json")).unwrap()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = inspect("process:4242.490");
    assert_eq!(code, Some(8), "{text}");
    assert!(text.contains(", 294 MiB for NCCL), and may take 9 MiB"), "{text}");
    assert!(text.contains("is used by python3 (pid 4242, 490 MiB)"), "{text}");
    assert_eq!(inspect("process:4242.10").0, Some(0), "there is room for both");
    // Without NCCL's buffers, the ranks would fit.
    assert_eq!(inspect("process:4242.300").0, Some(8));
    assert_eq!(inspect("process:4242.490,mig").0, Some(0), "the free memory of a MIG instance is unknown");
}

#[test]
fn several_ranks_plan_buffers_for_each_communicator() {
    let planned = |ranks, communicators| {
        let inspected = inspected(ranks, |config| config.overlap.communicators = communicators);
        inspected.gpu_memory.unwrap()
    };
    let [alone, one, two] = [planned(1, 2), planned(2, 1), planned(2, 2)];
    // 32 channels with at least the 4 MiB of `NCCL_BUFFSIZE`.
    assert_eq!(alone.communication, 0);
    assert!(one.communication > 32 * (4 << 20) && two.communication == 2 * one.communication, "{one:?}, {two:?}");
    assert_eq!(two.total() - one.total(), one.communication);
}

#[test]
fn gpu_memory_is_reported_alongside_host_memory() {
    let whole = inspected(1, |config| config.precision = Precision::Fp32);
    let flat = whole.gpu_memory.unwrap().gradients;
    // There are few gaps between parameters.
    assert!((4 * whole.parameters..5 * whole.parameters).contains(&flat), "{whole:?}");
    let MemoryUse { weights, optimizer, activations, input, .. } = whole.gpu_memory.unwrap();
    assert!(weights == flat && optimizer > 2 * flat && activations > 32 << 20 && input > 0, "{whole:?}");
    assert!(whole.memory.weights == 0 && whole.memory.gradients == 0 && whole.memory.input > 0, "{whole:?}");
    assert_eq!((whole.kernel.as_str(), whole.fp32_memory_bytes), ("cuda sm_90, NVRTC 13.0", None));
    assert_eq!(whole.gpu_fp32_memory_bytes, None);
    let inspected = inspected(1, |config| config.precision = amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 }));
    assert_eq!(inspected.gpu_fp32_memory_bytes, whole.gpu_memory.map(|memory| memory.total()));
    let half = inspected.gpu_memory.unwrap();
    assert_eq!((half.weights, half.gradients), (flat + flat / 2, flat));
    assert!(half.activations < activations, "{half:?}");
}
