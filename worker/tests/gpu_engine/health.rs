//! NVML's reports about a GPU reach the log, events and the root cause. A lost GPU ends the job,
//! and without NVML everything else works as usual.

use crate::pods::{Job, events};
use crate::support::{gpt, on, run};
use std::ffi::OsString;
use std::path::Path;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::{Event, GpuReport, GpuTrouble};
use switchyard_worker_contract::gpu::{GpuFault, PcieWidth, SlowedBy};

const STEPS: u64 = 3;
const BUS: &str = "0000:10:00.0";

/// Outcome of a run.
struct Outcome {
    codes: Vec<i32>,
    log: String,
    digest: Option<String>,
    /// The last report of each rank that sent one.
    reports: Vec<GpuReport>,
    troubles: Vec<Option<GpuTrouble>>,
    failures: Vec<String>,
}

/// Runs a GPT with a fault.
fn with(ranks: u32, fault: &str, devices: &str) -> Outcome {
    with_libraries(&environment(), ranks, fault, devices)
}

fn with_libraries(libraries: &[(&'static str, OsString)], ranks: u32, fault: &str, devices: &str) -> Outcome {
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, gpt));
    let extra = [("SWITCHYARD_REFERENCE_FAULT", fault), ("SWITCHYARD_REFERENCE_DEVICES", devices)];
    let output = run(&job, libraries, &extra);
    let mut seen = Outcome {
        codes: output.codes,
        log: output.log,
        digest: output.digest,
        reports: Vec::new(),
        troubles: Vec::new(),
        failures: Vec::new(),
    };
    for event in events(&job.read("out-0")) {
        match event {
            Event::Gpu(report) => {
                seen.reports.retain(|other| other.rank != report.rank);
                seen.reports.push(report);
            }
            Event::GpuTrouble { gpu } => seen.troubles.push(gpu),
            Event::Failed(failure) => seen.failures.push(failure.cause),
            _ => {}
        }
    }
    seen
}

/// Checks the exit code, and that the log contains these strings.
fn assert_log(seen: &Outcome, code: i32, words: &[&str]) {
    assert_eq!(seen.codes, [code], "{}", seen.log);
    words.iter().for_each(|word| assert!(seen.log.contains(word), "no `{word}` in {}", seen.log));
}

#[test]
fn a_healthy_gpu_is_reported_only_at_the_end() {
    let seen = with(2, "", "2");
    assert_log(&seen, 0, &[]);
    assert!(!seen.log.contains("warning") && !seen.log.contains("nobody watches"), "{}", seen.log);
    assert_eq!((seen.reports.len(), &seen.troubles), (2, &Vec::new()));
    let report = seen.reports.iter().find(|report| report.rank == 1).unwrap();
    let wide = Some(PcieWidth { lanes: 16, most: 16 });
    assert_eq!((report.bus.as_str(), report.pcie, report.highest_celsius), ("0000:11:00.0", wide, Some(40)));
    assert_eq!(
        (report.corrected_errors, report.uncorrected_errors),
        (Some(0), Some(0)),
        "earlier errors are not counted"
    );
    assert!(report.slowed.is_empty() && report.xids.is_empty() && report.seconds > 0.0);
    assert_eq!(report.busy_percent().map(f64::round), Some(97.0));
}

#[test]
fn a_survivable_error_is_reported_with_its_meaning() {
    let seen = with(1, "xid:0.40.31", "1");
    assert_log(&seen, 0, &["warning: rank 0: GPU 0000:10:00.0: XID 31 (GPU memory page fault)"]);
    assert_eq!(seen.reports[0].xids, [31]);
    let trouble = seen.troubles.last().copied().flatten().unwrap();
    assert_eq!((trouble.rank, trouble.node_rank, trouble.trouble), (0, 0, GpuFault::Xid { xid: 31 }));
    assert_eq!(trouble.bus.map(|bus| bus.to_string()).as_deref(), Some(BUS));
}

#[test]
fn errors_of_other_gpus_are_ignored() {
    let seen = with(1, "xid:1.40.31", "2");
    assert_log(&seen, 0, &[]);
    assert!(seen.reports[0].xids.is_empty() && seen.troubles.is_empty());
}

#[test]
fn the_root_cause_includes_the_drivers_error() {
    let words = "returned 719: unspecified launch failure; the driver reported for GPU 0000:10:00.0: XID 31 (GPU memory page fault)";
    let seen = with(1, "launch:40,xid:0.40.31", "1");
    assert_log(&seen, 5, &[words]);
    assert!(seen.failures.iter().any(|cause| cause.contains(words)), "{:?}", seen.failures);
    assert_eq!(seen.reports[0].xids, [31], "reported although the run failed");
}

#[test]
fn a_lost_gpu_ends_the_job_even_if_its_calls_never_return() {
    let words =
        ["the GPU is gone; the driver reported for GPU 0000:10:00.0: XID 79 (GPU has fallen off the bus), in step 2: "];
    let seen = with(1, "hang:40,xid:0.40.79", "1");
    assert_log(&seen, 5, &words);
    // The other rank's GPU is healthy; it ends because of the first.
    let seen = with(2, "hang:40,xid:0.40.79", "2");
    assert_log(&seen, 5, &words);
    assert!(seen.failures.iter().all(|cause| cause.contains("XID 79")), "{:?}", seen.failures);
}

#[test]
fn reduced_clocks_heat_and_a_narrow_link_are_reported() {
    let seen = with(1, "slowed:36,celsius:91,utilization:40,lanes:8", "1");
    assert_log(&seen, 0, &["warning: rank 0: GPU 0000:10:00.0: its PCIe link uses 8 of 16 lanes"]);
    let report = &seen.reports[0];
    let shares =
        [SlowedBy::Power, SlowedBy::Temperature, SlowedBy::Hardware].map(|by| report.slowed_percent(by).round());
    assert_eq!((shares, report.highest_celsius), ([100.0, 100.0, 0.0], Some(91)));
    assert_eq!(report.busy_percent().map(f64::round), Some(40.0));
    assert_eq!(report.pcie, Some(PcieWidth { lanes: 8, most: 16 }));
}

#[test]
fn memory_errors_of_this_run_are_reported() {
    let seen = with(1, "ecc:40", "1");
    assert_log(&seen, 0, &["warning: rank 0: GPU 0000:10:00.0: memory errors that ECC could not mend"]);
    assert_eq!((seen.reports[0].uncorrected_errors, seen.reports[0].corrected_errors), (Some(1), Some(0)));
}

#[test]
fn without_nvml_the_run_is_the_same() {
    let mut libraries = environment();
    let watched = with_libraries(&libraries, 1, "", "1");
    let folder = tempfile::tempdir().unwrap();
    for (name, value) in &mut libraries {
        if *name == "SWITCHYARD_CUDA_LIBRARIES" {
            for entry in std::fs::read_dir(Path::new(value)).unwrap().flatten() {
                if entry.file_name() != "libnvidia-ml.so.1" && entry.path().is_file() {
                    std::os::unix::fs::symlink(
                        entry.path().canonicalize().unwrap(),
                        folder.path().join(entry.file_name()),
                    )
                    .unwrap();
                }
            }
            *value = folder.path().into();
        }
    }
    let seen = with_libraries(&libraries, 1, "xid:0.40.79", "1");
    assert_log(&seen, 0, &["note: the GPUs are not monitored for errors and slow clocks: NVML is not on this machine"]);
    assert!(seen.reports.is_empty() && seen.troubles.is_empty());
    assert_eq!((seen.digest.is_some(), &seen.digest), (true, &watched.digest));
}
