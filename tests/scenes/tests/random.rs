//! Files with random content never cause a panic, and never lose an unrelated device.
#![allow(clippy::unwrap_used)]

mod common;

use common::{stage, status};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// Device directories by path element: damage in one must not affect devices outside it.
fn devices(status: &GPUTopologyStatus) -> BTreeSet<String> {
    let gpus = status.gpus.iter().map(|gpu| gpu.uuid.clone());
    let nics = status.nics.iter().filter_map(|nic| nic.rdma_device.clone());
    let nodes = status.numa_nodes.iter().map(|node| format!("node{}", node.id));
    gpus.chain(nics).chain(nodes).collect()
}

/// All regular files below a folder, in order. Symlinks are skipped, because each file is reached
/// by its own path.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let kind = fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            files(&path, found);
        } else if kind.is_file() {
            found.push(path);
        }
    }
}

/// Random bytes, and known keywords in unexpected places.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let words =
        ["", "-1", "0", "18446744073709551616", "0-4294967295", "4: ACTIVE", "0x10de", "Unified", "0-", "NaN\0"];
    prop_oneof![
        3 => proptest::collection::vec(any::<u8>(), 0..64),
        2 => proptest::sample::select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec()),
    ]
}

#[test]
fn random_bytes_in_any_file_lose_no_other_device() {
    let stage = stage("a30-bridges");
    let mut all = Vec::new();
    files(&stage.tree.path("sys"), &mut all);
    files(&stage.tree.path("proc"), &mut all);
    // Most files belong to CPUs and are alike; a few of them represent the rest.
    let is_cpu =
        |path: &PathBuf| path.to_str().is_some_and(|path| path.contains("/cpu/cpu") && !path.contains("/cpu3/"));
    all.retain(|path| !is_cpu(path));
    assert!(all.len() > 100, "only {} files", all.len());
    let whole = devices(&status(&stage));
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() });
    let strategy = proptest::collection::vec((proptest::sample::select(all), content()), 1..4);
    let result = runner.run(&strategy, |damage| {
        let saved: Vec<(PathBuf, Vec<u8>)> =
            damage.iter().map(|(path, _)| (path.clone(), fs::read(path).unwrap())).collect();
        for (path, bytes) in &damage {
            fs::write(path, bytes).unwrap();
        }
        let found = devices(&status(&stage));
        for (path, bytes) in saved.into_iter().rev() {
            fs::write(path, bytes).unwrap();
        }
        // GPUs, RDMA devices and NUMA nodes are found by name, independent of file contents.
        prop_assert_eq!(&found, &whole);
        Ok(())
    });
    result.unwrap();
    assert_eq!(devices(&status(&stage)), whole);
}
