//! The controller in a cluster of 10,000 nodes and 100,000 pods: `cargo xtask bench cluster-size`.
//! `switchyard_tests::size` describes the measurements and the cluster.
//!
//! Smaller: `cargo bench -p switchyard-tests --bench cluster_size -- --nodes 300 --others 1000
//! --running 50 --waiting 20 --gang 130`. `--controller PROGRAM` uses another controller, for
//! example one built from another commit.
#![allow(missing_docs, clippy::unwrap_used)]

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use switchyard_tests::size::{Scale, day, measure};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
    let number = |name: &str, default: usize| {
        after(name)
            .map_or(Ok(default), |text| text.parse().with_context(|| format!("{name} {text}: expected a number")))
    };
    let scale = Scale {
        nodes: number("--nodes", 10_000)?,
        others: number("--others", 100_000)?,
        running: number("--running", 1000)?,
        waiting: number("--waiting", 500)?,
        gang: number("--gang", 4096)?,
        probes: number("--probes", 100)?,
        seconds: number("--seconds", 60)? as u64,
        program: after("--controller").map(PathBuf::from),
    };
    let machine = json!({"cpu": cpu_model(), "cores": std::thread::available_parallelism()?.get(), "load": load()});
    println!("machine: {machine}");
    let day = if arguments.iter().any(|word| word == "--without-day") { Value::Null } else { day()? };
    println!("day: {day}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let measured = runtime.block_on(measure(&scale))?;
    let result = json!({
        "command": "cargo xtask bench cluster-size", "machine": machine, "kubernetes": "v1.34.4", "cluster": measured, "day": day,
    });
    table(&result);
    if let Some(file) = after("--json") {
        ensure!(!file.is_empty(), "--json: expected a file");
        std::fs::write(file, format!("{}\n", serde_json::to_string_pretty(&result)?))?;
        println!("written: {file}");
    }
    Ok(())
}

/// Measured figures: name, JSON pointer, upper bound, unit.
const GOALS: [(&str, &str, f64, &str); 16] = [
    ("apply to placed, free cluster, p50", "/cluster/free/p50Seconds", f64::NAN, "s"),
    ("apply to placed, free cluster, p99", "/cluster/free/p99Seconds", 1.0, "s"),
    ("apply to placed, with the queue, p50", "/cluster/withQueue/p50Seconds", f64::NAN, "s"),
    ("apply to placed, with the queue, p99", "/cluster/withQueue/p99Seconds", 3.0, "s"),
    ("writes of waiting jobs per second, nothing happens", "/cluster/quiet/writesPerSecond", 1.0, ""),
    ("writes of waiting jobs per second, churn", "/cluster/churn/writesOfWaitingPerSecond", 1.0, ""),
    ("failover, kill to first right action", "/cluster/failover/firstActionSeconds", 15.0, "s"),
    ("gang: all gates lifted", "/cluster/gang/liftedSeconds", 30.0, "s"),
    ("gang: TrainJob", "/cluster/gang/trainJobKiB", 256.0, "KiB"),
    ("RSS at start", "/cluster/sync/rssMiBAtStart", f64::NAN, "MiB"),
    ("RSS after sync", "/cluster/sync/rssMiBAfterSync", 512.0, "MiB"),
    ("RSS after churn", "/cluster/churn/rssMiB", 512.0, "MiB"),
    ("CPU during churn", "/cluster/churn/cpuPercent", f64::NAN, "% of a core"),
    ("mean pass under the lock", "/cluster/passes/plan/meanMilliseconds", f64::NAN, "ms"),
    ("24 hours of 500 waiting jobs: writes per second", "/day/writesPerSecond", 1.0, ""),
    ("24 hours of 500 waiting jobs: growth", "/day/growthPercent", 5.0, "%"),
];

fn table(result: &Value) {
    println!("\n{:<52} {:>9} {:>8}", "", "measured", "goal");
    for (name, path, goal, unit) in GOALS {
        let value = result.pointer(path).and_then(Value::as_f64);
        let text = value.map_or_else(|| "-".to_string(), |value| format!("{value:.2}"));
        let goal_text = if goal.is_nan() { "-".to_string() } else { format!("{goal:.1}") };
        let mark = if value.is_some_and(|value| value > goal) { "  missed" } else { "" };
        println!("{name:<52} {text:>9} {goal_text:>8} {unit}{mark}");
    }
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split(':').nth(1)).unwrap_or_default().trim().to_string()
}

fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or_default().to_string()
}
