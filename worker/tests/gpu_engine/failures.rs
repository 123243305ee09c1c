//! Jobs that cannot run on a GPU are refused with the reason, and a failing GPU ends the rank with
//! the driver's message.

use crate::pods::Job;
use crate::support::{gpt, on, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;

const STEPS: u64 = 3;

/// Runs a GPT and expects this exit code and these strings in the log.
fn fails(ranks: u32, extra: &[(&str, &str)], code: i32, words: &[&str], change: impl FnOnce(&mut EngineConfig)) {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, |config| {
        gpt(config);
        change(config);
    }));
    let output = run(&job, &libraries, extra);
    assert_eq!(output.codes, [code], "{extra:?}: {}", output.log);
    words.iter().for_each(|word| assert!(output.log.contains(word), "no `{word}` in {}", output.log));
}

#[test]
fn a_machine_without_the_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let none = folder.path().to_str().unwrap();
    let words = ["spec.engine.device: got Cuda; driver is not on this machine; looked for", "libcuda.so.1"];
    fails(1, &[("SWITCHYARD_CUDA_LIBRARIES", none)], 2, &words, |_| ());
}

#[test]
fn a_machine_with_fewer_gpus_than_ranks() {
    let words = ["rank 8 of this node has no GPU, the driver shows 7; expected one", "lower trainer.numProcPerNode"];
    fails(8, &[("SWITCHYARD_REFERENCE_DEVICES", "7")], 2, &words, |_| ());
    fails(1, &[("SWITCHYARD_REFERENCE_DEVICES", "0")], 2, &["there is no device"], |_| ());
    // No rank of the process waits for the one without a GPU.
    let words = ["rank 2 of this node has no GPU, the driver shows 1; expected one"];
    fails(2, &[("SWITCHYARD_REFERENCE_DEVICES", "1")], 2, &words, |config| config.devices_per_process = 2);
}

#[test]
fn selecting_nonexistent_gpus() {
    for names in ["7", "GPU-7", ""] {
        let words = format!("there is no device (CUDA_VISIBLE_DEVICES={names})");
        fails(1, &[("CUDA_VISIBLE_DEVICES", names)], 2, &[&words], |_| ());
    }
    // GPUs after an invalid name are hidden too.
    let devices = [("SWITCHYARD_REFERENCE_DEVICES", "2"), ("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-9,GPU-1")];
    let words =
        ["rank 2 of this node has no GPU, the driver shows 1 (CUDA_VISIBLE_DEVICES=GPU-0,GPU-9,GPU-1); expected one"];
    fails(2, &devices, 2, &words, |_| ());
}

#[test]
fn gpus_with_mig() {
    // A named instance is used like any GPU.
    let named = [("SWITCHYARD_REFERENCE_FAULT", "mig"), ("CUDA_VISIBLE_DEVICES", "MIG-0")];
    fails(1, &named, 0, &[], |_| ());
    let two = [("SWITCHYARD_REFERENCE_FAULT", "mig"), ("SWITCHYARD_REFERENCE_DEVICES", "2")];
    let words = [
        "rank 2 of this node has no GPU, the driver shows 1",
        "MIG divides GPU 0000:10:00.0: a process sees one instance of it",
    ];
    fails(2, &two, 2, &words, |_| ());
}

#[test]
fn a_driver_that_is_too_old_or_older_than_the_libraries() {
    let words = ["is of a driver for CUDA 12.2; expected 12.4 or newer, which NVIDIA's driver 550"];
    fails(1, &[("SWITCHYARD_REFERENCE_FAULT", "driver-version:12020")], 2, &words, |_| ());
    let words = ["is of CUDA 13, and the driver supports CUDA 12: expected a newer driver, or libraries of CUDA 12"];
    fails(1, &[("SWITCHYARD_REFERENCE_FAULT", "driver-version:12080")], 2, &words, |_| ());
}

#[test]
fn a_gpu_in_use_by_another_process() {
    let python = "; GPU 0000:10:00.0 is used by python3 (pid 4242, 190 MiB)";
    let words = ["returned 46: CUDA-capable device(s) is/are busy or unavailable", python];
    fails(1, &[("SWITCHYARD_REFERENCE_FAULT", "busy,process:4242.190")], 5, &words, |_| ());
    let memory = (200_u64 << 20).to_string();
    let small = ("SWITCHYARD_REFERENCE_MEMORY", memory.as_str());
    fails(1, &[small], 0, &[], |_| ());
    let words = ["of the memory of its GPU", "and may take 9 MiB", python];
    fails(1, &[small, ("SWITCHYARD_REFERENCE_FAULT", "process:4242.190")], 8, &words, |_| ());
}

#[test]
fn cpu_kernels_on_a_gpu() {
    let words = ["SWITCHYARD_KERNEL: got avx2 for ranks on GPUs; expected auto"];
    fails(1, &[(env::KERNEL, "avx2")], 2, &words, |_| ());
}

#[test]
fn layers_without_a_kernel() {
    let words = ["spec.engine.device: got Cuda; layer `transformer.h.0.attn` (Attention) does not fit a kernel"];
    fails(1, &[], 2, &words, |config| {
        if let Model::Gpt(gpt) = &mut config.model {
            gpt.hidden_size = 12;
        }
    });
}

#[test]
fn too_little_memory() {
    let words =
        ["of the memory of its GPU", "(spec.engine.memory.fraction 0.9 of what is free)", "batchSizePerProcess: "];
    // Another process takes the memory in the meantime.
    fails(1, &[("SWITCHYARD_REFERENCE_FAULT", "out-of-memory:4")], 8, &words[..1], |_| ());
    let enough = 40u64 << 20;
    fails(1, &[("SWITCHYARD_REFERENCE_MEMORY", &enough.to_string())], 8, &words, |config| {
        config.batch_size_per_process = 512;
    });
}

#[test]
fn a_gpu_that_hangs() {
    let words = ["stands still for 6 s", "in step 2: forward pass of micro-batch 0"];
    // The driver may also hang when the process exits.
    for fault in ["hang:30", "hang:30,exit"] {
        fails(1, &[("SWITCHYARD_REFERENCE_FAULT", fault)], 10, &words, |config| {
            config.watchdog.timeout_seconds = Some(6);
        });
    }
}

#[test]
fn a_gpu_that_fails_in_a_step() {
    for (fault, word) in [
        ("launch:40", "returned 719: unspecified launch failure"),
        ("lost:40", "returned 214: uncorrectable ECC error encountered"),
        ("busy", "returned 46: CUDA-capable device(s) is/are busy or unavailable"),
    ] {
        fails(1, &[("SWITCHYARD_REFERENCE_FAULT", fault)], 5, &["the GPU failed: driver: ", word], |_| ());
    }
}
