//! The controller with one job of 1,000 workers and with 1,000 jobs: `cargo xtask bench
//! controller`.
//!
//! Uses a real API server, scheduler and controller manager, and 1,000 emulated nodes on this
//! machine. Times are measured through a watch. Writes are counted in the API server's audit log,
//! both for us and for the peer. The peer is training-operator v1.8.1 (PyTorchJob). It runs on its
//! own control plane within the same run, once with its default limits and once with raised limits.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "controller/ours.rs"]
mod ours;
#[path = "controller/peer.rs"]
mod peer;

use anyhow::Result;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Workers of the large job, and number of small jobs.
pub(crate) const COUNT: usize = 1000;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
    let file = after("--json").map(PathBuf::from);
    let without_peer = arguments.iter().any(|word| word == "--without-peer");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let machine = json!({"cpu": cpu_model(), "cores": std::thread::available_parallelism()?.get(), "load": load()});
    println!("machine: {machine}");
    let (ours, peers) = runtime.block_on(async {
        let ours = ours::measure().await?;
        let mut peers = Vec::new();
        if !without_peer {
            for raised in [false, true] {
                peers.push(peer::measure(raised).await?);
            }
        }
        anyhow::Ok((ours, peers))
    })?;
    table(&ours, &peers);
    if let Some(file) = file {
        let document = json!({
            "command": "cargo xtask bench controller", "machine": machine, "kubernetes": "v1.34.4", "workers": COUNT, "jobs": COUNT,
            "switchyard": ours, "trainingOperator": peers,
        });
        std::fs::write(&file, format!("{}\n", serde_json::to_string_pretty(&document)?))?;
        println!("written: {}", file.display());
    }
    Ok(())
}

/// Goals: name, JSON pointer, upper bound, unit.
const GOALS: [(&str, &str, f64, &str); 17] = [
    ("A 1 job x 1,000: pods created", "/a/created", 4.0, "s"),
    ("A gates lifted", "/a/lifted", 8.0, "s"),
    ("A status says Running after the last pod runs", "/a/statusAfterLast", 10.0, "s"),
    ("A writes per pod", "/a/writesPerPod", 2.1, ""),
    ("B 1,000 jobs x 1: pods created", "/b/created", 20.0, "s"),
    ("B writes per job up to Running", "/b/writesPerJob", 9.0, ""),
    ("D one of 1,000 dies: next gang complete", "/d/created", 8.0, "s"),
    ("E suspend: pods gone", "/e/suspended", 8.0, "s"),
    ("E resume: pods created", "/e/resumed", 8.0, "s"),
    ("F delete: pods gone", "/f/gone", 8.0, "s"),
    ("G restart with 1,000 jobs: first right action", "/g/firstAction", 5.0, "s"),
    ("G wrong writes", "/g/wrongWrites", 0.0, ""),
    ("H idle 60 s: writes", "/h/writes", 0.0, ""),
    ("H CPU", "/h/cpuPercent", 1.0, "% of a core"),
    ("H RSS", "/h/rssMiB", 200.0, "MiB"),
    ("CPU of the controller, A to F", "/cpuSeconds", f64::NAN, "s"),
    ("CPU of the API server, A to F", "/apiServerCpuSeconds", f64::NAN, "s"),
];

fn table(ours: &Value, peers: &[Value]) {
    println!("\n{:<50} {:>9} {:>8} {:>11} {:>11}", "", "ours", "goal", "peer", "peer raised");
    for (name, path, goal, unit) in GOALS {
        let number = |value: &Value| value.pointer(path).and_then(Value::as_f64);
        let text = |value: Option<f64>| value.map_or_else(|| "-".to_string(), |value| format!("{value:.2}"));
        let goal_text = if goal.is_nan() { "-".to_string() } else { format!("{goal:.1}") };
        let miss = number(ours).is_some_and(|value| value > goal);
        let peer = |index: usize| text(peers.get(index).and_then(&number));
        let mark = if miss { "  missed" } else { "" };
        println!("{name:<50} {:>9} {goal_text:>8} {:>11} {:>11} {unit}{mark}", text(number(ours)), peer(0), peer(1));
    }
    let created = |value: &Value| value.pointer("/a/created").and_then(Value::as_f64);
    if let (Some(own), Some(peer)) = (created(ours), peers.first().and_then(created)) {
        println!("\nA, pods created: {:.1} times as fast as the peer with its defaults", peer / own);
    }
}

/// Seconds since `start`, rounded to milliseconds.
pub(crate) fn since(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 1000.0).round() / 1000.0
}

/// Timeout for a milestone.
pub(crate) const LIMIT: Duration = Duration::from_secs(400);

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split(':').nth(1)).unwrap_or_default().trim().to_string()
}

fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or_default().to_string()
}
