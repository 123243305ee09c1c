//! Gradients reduced by NCCL: the same losses as through host memory, and a single root cause when
//! a reduction fails.

use crate::pods::{Job, pid_of, wait_for_step};
use crate::support::{Change, RunOutput, amp, gpt, mlp, on, run};
use rustix::process::{Signal, kill_process};
use std::ffi::OsString;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::Link;

const STEPS: u64 = 8;
const FAULT: &str = "SWITCHYARD_REFERENCE_FAULT";
const SEED: &str = "SWITCHYARD_REFERENCE_SEED";
const DEVICES: &str = "SWITCHYARD_REFERENCE_DEVICES";
/// Makes the ranks reduce through host memory.
const TOO_OLD: (&str, &str) = (FAULT, "nccl-version:21806");

/// Several reductions per step, in two communicators.
fn wide(config: &mut EngineConfig) {
    mlp(config);
    config.model = Model::Mlp(Mlp { hidden_sizes: vec![600, 600], activation: Activation::Relu });
    config.batch_merge = 2;
    config.length = Length::Steps(4);
    config.overlap.communicators = 2;
}

/// A run with a GPU for each rank of a node.
fn on_gpus((nodes, ranks): (u32, u32), extra: &[(&str, &str)], change: impl FnOnce(&mut EngineConfig)) -> RunOutput {
    let libraries = environment();
    let devices = ranks.to_string();
    let extra = [&[(DEVICES, devices.as_str())], extra].concat();
    run(&Job::new(nodes, ranks, STEPS).with(on(Device::Cuda, STEPS, change)), &libraries, &extra)
}

/// Compares NCCL, host memory and CPUs.
fn compare(name: &str, (nodes, ranks): (u32, u32), seed: &str, most: f64, change: impl Fn(&mut EngineConfig)) {
    let summed = on_gpus((nodes, ranks), &[(SEED, seed)], &change);
    assert!(summed.log.contains("note: gradients are summed by NCCL 2.28.9"), "{name}: {}", summed.log);
    assert_eq!(summed.transport, Some(Transport::Nccl), "{name}: {}", summed.log);
    let path = if ranks > 1 { "P2P/IPC" } else { "NET/Socket/0" };
    let is_expected = |link: &Link| matches!(link, Link::Nccl { rank: 1, path: found, .. } if found == path);
    assert!(summed.links.len() == 1 && is_expected(&summed.links[0]), "{name}: {:?}", summed.links);
    let staged = on_gpus((nodes, ranks), &[(SEED, seed), TOO_OLD], &change);
    assert!(staged.transport.is_some_and(|transport| transport != Transport::Nccl), "{name}: {}", staged.log);
    assert_eq!(summed.difference(&staged, most), None, "{name} and through host memory");
    let expected = run(&Job::new(nodes, ranks, STEPS).with(on(Device::Cpu, STEPS, &change)), &[], &[]);
    assert_eq!(summed.difference(&expected, most), None, "{name} and on CPUs");
}

#[test]
fn losses_match_host_reduction_and_cpus() {
    let models: [(&str, Change, u32, &str); 3] = [("mlp", mlp, 2, "0"), ("gpt", gpt, 4, "1"), ("wide", wide, 2, "2")];
    for (name, model, ranks, seed) in models {
        compare(name, (1, ranks), seed, 1e-3, model);
    }
}

#[test]
fn bf16_losses_match_host_reduction_and_cpus() {
    compare("gpt", (1, 2), "3", 1e-2, |config| {
        gpt(config);
        config.precision = amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 });
    });
}

#[test]
fn gradients_are_sent_between_hosts_in_the_jobs_format() {
    for (wire_type, seed) in [(WireType::Bf16, "0"), (WireType::Fp16, "4")] {
        compare(&format!("{wire_type:?}"), (2, 1), seed, 1e-2, |config| {
            gpt(config);
            config.overlap.wire_type = wire_type;
        });
    }
}

#[test]
fn losses_do_not_depend_on_overlap_or_devices_per_process() {
    for (name, overlap) in [("sync", (true, true)), ("after backward", (false, false))] {
        compare(name, (1, 2), "5", 1e-3, |config| {
            wide(config);
            config.overlap = Overlap { enabled: overlap.0, sync_all_reduce: overlap.1, ..config.overlap };
        });
    }
    compare("devices of a process", (1, 2), "6", 1e-3, |config| {
        gpt(config);
        config.devices_per_process = 2;
    });
}

/// Checks the reason in the log of a run that reduces through host memory.
fn assert_staged(extra: &[(&str, &str)], libraries: &[(&'static str, OsString)], words: &str) {
    let output = run(&Job::new(1, 2, 2).with(on(Device::Cuda, 2, gpt)), libraries, extra);
    assert_eq!(output.codes, [0], "{}", output.log);
    let start = "note: gradients are summed through host memory; NCCL: ";
    assert!(output.log.contains(&format!("{start}{words}")), "no `{words}` in {}", output.log);
}

#[test]
fn ranks_that_cannot_use_nccl_log_why_and_reduce_through_the_host() {
    let mut libraries = environment();
    assert_staged(&[("CUDA_VISIBLE_DEVICES", "0")], &libraries, "ranks 0 and 1 share GPU 0000:10:00.0 of host 0");
    assert_staged(&[(DEVICES, "2"), TOO_OLD], &libraries, "rank 0: ncclGetVersion: ");
    let other = (FAULT, "nccl-version:31000");
    assert_staged(&[(DEVICES, "2"), other], &libraries, "rank 0: ncclGetVersion: ");
    // All libraries but NCCL.
    let folder = tempfile::tempdir().unwrap();
    let (_, all) = &libraries[0];
    for name in ["libcuda.so.1", "libcublasLt.so.13", "libnvrtc.so.13"] {
        std::os::unix::fs::symlink(std::path::Path::new(all).join(name), folder.path().join(name)).unwrap();
    }
    libraries[0].1 = folder.path().into();
    assert_staged(&[(DEVICES, "2")], &libraries, "rank 0: NCCL is not on this machine");
}

/// A run of two ranks fails with this exit code, and its log contains these strings.
fn fails(fault: &str, code: i32, words: &[&str], extra: &[(&str, &str)], change: impl FnOnce(&mut EngineConfig)) {
    let libraries = environment();
    let job = Job::new(1, 2, STEPS).with(on(Device::Cuda, STEPS, |config| {
        gpt(config);
        change(config);
    }));
    let extra = [&[(DEVICES, "2"), (FAULT, fault)], extra].concat();
    let output = run(&job, &libraries, &extra);
    assert_eq!(output.codes, [code], "{fault}: {}", output.log);
    words.iter().for_each(|word| assert!(output.log.contains(word), "{fault}: no `{word}` in {}", output.log));
    assert_eq!(job.processes(), Vec::<String>::new(), "{fault}: no process is left");
}

#[test]
fn a_failed_reduction_is_the_root_cause_on_all_ranks() {
    let words = ["rank 1", "a sum of gradients failed: NCCL: ncclCommGetAsyncError returned 2: unhandled system error"];
    fails("nccl-error:1.9", 5, &words, &[], |_| ());
}

#[test]
fn a_rank_that_cannot_connect_is_the_root_cause_on_all_ranks() {
    fails("nccl-init:1", 5, &["rank 1", "ncclCommInitRankConfig returned 2"], &[], |_| ());
    let soon = (env::CONNECT_TIMEOUT_SECONDS, "12");
    fails("nccl-absent:1", 5, &["NCCL: a communicator has not formed within 12 s"], &[soon], |_| ());
}

#[test]
fn a_hung_reduction_ends_the_run() {
    fails("nccl-silent:1.9", 10, &["all ranks wait for each other", "all-reduce"], &[], |config| {
        config.watchdog.timeout_seconds = Some(6);
    });
}

#[test]
fn a_killed_rank_is_the_root_cause_on_all_ranks() {
    let libraries = environment();
    let job = Job::new(2, 1, 100_000).with(on(Device::Cuda, 100_000, gpt));
    let mut pods = [0, 1].map(|node| {
        let mut command = job.command(node);
        command.envs(libraries.iter().map(|(name, value)| (*name, value)));
        crate::pods::Running(command.spawn().unwrap())
    });
    assert!(wait_for_step(&job, &mut pods[0], 3));
    assert!(job.read("err-0").contains("summed by NCCL"), "{}", job.read("err-0"));
    kill_process(pid_of(&job, 1, 1), Signal::KILL).unwrap();
    let codes = pods.each_mut().map(|pod| pod.code());
    assert!(codes.iter().all(|code| *code != 0), "{codes:?}");
    let failure = job.termination(0).failure.unwrap();
    assert_eq!(failure.origin_rank, 1, "{failure:?}");
}
