//! Cost of a scan. The result is printed but not checked, because machines differ. Runs alone in
//! its process, whose memory it prints.
#![allow(clippy::unwrap_used)]

mod common;

use common::{stage, status};
use std::time::{Duration, Instant};
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// Number of scans, as an agent performs over a longer time.
const ROUNDS: usize = 100;

/// Reads a number from `/proc/self/status`.
fn own(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches([':', '\t', ' ']).split(' ').next().unwrap().parse().unwrap()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn scans_are_cheap_and_leave_nothing() {
    let start = Instant::now();
    let stage = stage("hgx-h100");
    println!("the files of hgx-h100: {:?}", start.elapsed());
    let timed = || -> (Duration, GPUTopologyStatus) {
        let start = Instant::now();
        let status = status(&stage);
        (start.elapsed(), status)
    };
    let (first, described) = timed();
    let (memory, files) = (own("VmRSS"), open_files());
    let mut times: Vec<Duration> = (0..ROUNDS).map(|_| timed().0).collect();
    times.sort();
    println!(
        "8 GPUs, {} NICs, {} CPUs: first {first:?}, median {:?}, slowest {:?} of {ROUNDS}",
        described.nics.len(),
        described.cpus.as_ref().and_then(|cpus| cpus.threads).unwrap(),
        times[ROUNDS / 2],
        times[ROUNDS - 1]
    );
    println!("resident {memory} KiB after the first, {} KiB after the last", own("VmRSS"));
    assert_eq!(open_files(), files, "files are left open");
    assert!(own("VmRSS") < memory + 2048, "it grows: from {memory} to {} KiB", own("VmRSS"));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libnvidia-ml.so.1"), "the library is left open");
}
