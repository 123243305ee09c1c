//! Time to plan and preflight a job on 128 nodes: `cargo xtask bench preflight`.
//!
//! Measures the controller's work once the pods of a job exist: it chooses nodes and GPUs, derives
//! the fabric settings, and checks the nodes. Runs once on healthy nodes, and once with different
//! faults on each node, so that no findings fold together.
#![allow(missing_docs, clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../tests/fabric/scenes.rs"]
mod scenes;
#[allow(dead_code)]
#[path = "../tests/preflight/stage.rs"]
mod stage;

use serde_json::{Value, json};
use stage::{NOW, Stage};
use std::hint::black_box;
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;
use switchyard_ledger::offline::{Cluster, PreviousPlacement};
use switchyard_ledger::queue::QueueSettings;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::objects::Defaults;

const NODES: usize = 128;
const REPEATS: usize = 200;

fn main() {
    let mut healthy = Stage::new("hgx-h100-infiniband", "torch");
    healthy.grow(NODES);
    let mut faulty = Stage::new("hgx-h100-infiniband", "torch");
    faulty.grow(NODES);
    for node in 0..NODES {
        faulty.node(node, |status| {
            let host = status.host.as_mut().unwrap();
            host.locked_memory_limit = Some((65_536 + node).to_string());
            host.driver = Some(format!("570.124.{node:02}"));
            status.gpus[node % 8].pcie_link.as_mut().unwrap().width = Some(8);
            status.nics[node % 8].mtu_bytes = Some(2044 + node as u32);
        });
    }
    let mut rows = Vec::new();
    println!("{:<58} {:>8} {:>8} {:>9}", "128 nodes x 8 GPUs", "p50 ms", "p99 ms", "findings");
    for (what, stage, mode) in [
        ("plan and preflight, nothing wrong", &healthy, "Report"),
        ("the same without preflight", &healthy, "None"),
        ("plan and preflight, every node with faults of its own", &faulty, "Report"),
    ] {
        rows.push(timed(what, stage, mode));
    }
    println!("goal: at most 20 ms");
    let arguments: Vec<String> = std::env::args().collect();
    let Some(path) = arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)) else {
        return;
    };
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let result = json!({
        "command": "cargo xtask bench preflight", "machine": model.trim_start_matches(['\t', ' ', ':']),
        "goalMilliseconds": 20, "nodes": NODES, "repeats": REPEATS, "rows": rows,
    });
    std::fs::write(path, format!("{}\n", serde_json::to_string_pretty(&result).unwrap())).unwrap();
}

fn timed(what: &str, stage: &Stage, mode: &str) -> Value {
    let mut job: TrainJob = serde_json::from_value(stage.job.clone()).unwrap();
    job.spec.fabric = serde_json::from_value(json!({"preflight": {"mode": mode}})).unwrap();
    let mut cluster =
        Cluster::of(&stage.items, Defaults::default(), Levels::default(), QueueSettings::default(), NOW).unwrap();
    let mut findings = 0;
    let mut times: Vec<Duration> = (0..REPEATS)
        .map(|_| {
            let start = Instant::now();
            let verdict = black_box(cluster.explain(&job, PreviousPlacement::Ignored).unwrap());
            let time = start.elapsed();
            let preflight = verdict.fabric.unwrap().unwrap().status.preflight;
            findings = preflight.map_or(0, |preflight| preflight.findings.len());
            time
        })
        .collect();
    times.sort();
    let milliseconds = |at: usize| (times[at * (REPEATS - 1) / 100].as_secs_f64() * 1e6).round() / 1e3;
    let (p50, p99) = (milliseconds(50), milliseconds(99));
    println!("{what:<58} {p50:>8.2} {p99:>8.2} {findings:>9}");
    json!({"what": what, "p50Milliseconds": p50, "p99Milliseconds": p99, "findings": findings})
}
