//! GPU counters and events, from a mock NVML compiled for the test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use switchyard_node_agent::counters::{self, GpuCounters};
use switchyard_node_agent::events;

/// Compiles the mock.
fn mock(directory: &Path) -> PathBuf {
    let library = directory.join("libnvidia-ml-reports.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nvml_reports/library.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let arguments = ["--edition", "2024", "-C", "panic=abort", "-o"];
    let output = Command::new(compiler).args(arguments).arg(&library).arg(source).output();
    let output = output.expect("the compiler of Rust, which builds the mock of NVML");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

#[test]
fn counters_and_events() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let library = mock(directory.path());
    let errors =
        |counts: [u64; 4]| BTreeMap::from_iter(["replay", "recovery", "crc_flit", "crc_data"].into_iter().zip(counts));
    let first = GpuCounters {
        bus_id: "0000:1b:00.0".into(),
        corrected_ecc_errors: Some(3),
        uncorrected_ecc_errors: Some(4),
        pcie_replays: Some(1),
        // Sums of link 0 and link 1.
        nvlink_errors: errors([1, 21, 41, 61]),
        nvlinks: BTreeMap::from([("0000:43:00.0".into(), 2)]),
    };
    let second = GpuCounters {
        bus_id: "0000:43:00.0".into(),
        pcie_replays: Some(2),
        nvlink_errors: errors([0, 10, 20, 30]),
        nvlinks: BTreeMap::from([("0000:1b:00.0".into(), 1)]),
        ..GpuCounters::default()
    };
    assert_eq!(counters::read(Some(&library)), [first, second]);

    let mut seen = Vec::new();
    let why = events::watch(Some(&library), |xid| seen.push(xid));
    assert_eq!(seen, [Some(79), None]);
    assert!(why.contains("fell off the bus"), "{why}");
}

#[test]
fn without_nvml_there_are_no_counters_and_no_events() {
    let none = Path::new("no-such-library.so");
    assert_eq!(counters::read(Some(none)), []);
    let why = events::watch(Some(none), |_| panic!("an unexpected event"));
    assert!(why.contains("no-such-library.so"), "{why}");
}
