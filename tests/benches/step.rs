//! Milliseconds per step and per phase, and the speedup of a second process: `cargo xtask bench
//! step`.
//!
//! Runs the real programs on the example's model. One process and two processes alternate in
//! rounds, with one thread per process and the same batch per process. Each round counts with its
//! median step; the result is the best round, printed with the spread of all rounds.
//!
//! With `SWITCHYARD_TORCH_PYTHON=PYTHON` (an interpreter with PyTorch, `pip install torch numpy`),
//! the same rounds also run the model in PyTorch, with DDP over gloo for two processes, and the
//! ratios are printed.

#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Alternating rounds.
const ROUNDS: usize = 4;

/// Phases of a step in display order.
const PARTS: [&str; 5] = ["forwardMs", "backwardMs", "communicationWaitMs", "inputWaitMs", "optimizerMs"];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let file =
        arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)).map(PathBuf::from);
    let programs = switchyard_tests::programs();
    let folder = tempfile::tempdir().unwrap();
    let mut runs: [Vec<Value>; 2] = [Vec::new(), Vec::new()];
    let mut peers: [Vec<Value>; 2] = [Vec::new(), Vec::new()];
    let python = std::env::var("SWITCHYARD_TORCH_PYTHON").ok();
    for round in 0..ROUNDS {
        for processes in 1..=2 {
            let result = measure(programs, folder.path(), round, processes);
            println!(
                "round {} {processes} process(es): {:.1} ms/step, {:.0} tokens/s",
                round + 1,
                number(&result, "stepMs"),
                number(&result, "itemsPerSecond")
            );
            runs[processes - 1].push(result);
            if let Some(python) = &python {
                let peer = torch(python, processes);
                println!(
                    "round {} {processes} process(es): {:.1} ms/step, PyTorch",
                    round + 1,
                    number(&peer, "stepMs")
                );
                peers[processes - 1].push(peer);
            }
        }
    }
    let best: Vec<Value> = runs
        .iter()
        .map(|rounds| rounds.iter().min_by(|a, b| number(a, "stepMs").total_cmp(&number(b, "stepMs"))).unwrap().clone())
        .collect();
    println!(
        "\n{:<12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>11}",
        "processes", "ms/step", "forward", "backward", "comm wait", "input", "optimizer", "tokens/s"
    );
    for (processes, result) in best.iter().enumerate() {
        let parts: String = PARTS.iter().map(|part| format!(" {:>9.2}", number(result, part))).collect();
        println!(
            "{:<12} {:>9.2}{parts} {:>11.0}",
            processes + 1,
            number(result, "stepMs"),
            number(result, "itemsPerSecond")
        );
    }
    let mut ratios: Vec<f64> = runs[0]
        .iter()
        .zip(&runs[1])
        .map(|(one, two)| number(two, "itemsPerSecond") / number(one, "itemsPerSecond"))
        .collect();
    ratios.sort_by(f64::total_cmp);
    let ratio = median(&ratios);
    println!(
        "\n2 processes / 1 process, tokens/s: median {ratio:.2}, from {:.2} to {:.2} over {ROUNDS} alternating rounds (wanted: at least 1.7)",
        ratios[0],
        ratios[ratios.len() - 1]
    );
    let against: Vec<Value> = (0..2)
        .filter(|_| python.is_some())
        .map(|index| {
            let mut ratios: Vec<f64> = peers[index]
                .iter()
                .zip(&runs[index])
                .map(|(peer, own)| number(peer, "stepMs") / number(own, "stepMs"))
                .collect();
            ratios.sort_by(f64::total_cmp);
            let middle = median(&ratios);
            println!(
                "{} process(es) against PyTorch {}: {middle:.2} times its speed (median; {:.2} to {:.2})",
                index + 1,
                peers[index][0]["torch"],
                ratios[0],
                ratios[ratios.len() - 1]
            );
            json!({"processes": index + 1, "speedMedian": middle, "speeds": ratios, "rounds": peers[index]})
        })
        .collect();
    let machine = json!({"cpu": cpu_model(), "cores": std::thread::available_parallelism().map_or(0, usize::from), "load": load()});
    println!("machine: {machine}; kernels: {}", best[0]["kernel"]);
    if let Some(file) = file {
        let document = json!({
            "command": "cargo xtask bench step", "machine": machine, "model": "GPT 4x128, heads 4, context 128, batch 8 per process, FP32, 1 thread per process",
            "rounds": ROUNDS, "oneProcess": runs[0], "twoProcesses": runs[1], "itemsPerSecondRatioMedian": ratio, "itemsPerSecondRatios": ratios,
            "againstPyTorch": against,
        });
        std::fs::write(&file, format!("{}\n", serde_json::to_string_pretty(&document).unwrap())).unwrap();
        println!("written: {}", file.display());
    }
}

/// Runs once. Each figure is the median over rank 0's progress reports after the first.
fn measure(programs: &Path, folder: &Path, round: usize, processes: usize) -> Value {
    let manifest = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "bench"},
        "spec": {"trainer": {"numProcPerNode": processes, "cpuThreads": 1}, "engine": {
            "model": {"type": "GPT", "gpt": {"layers": 4, "hiddenSize": 128, "heads": 4, "contextLength": 128}},
            "data": {"path": switchyard_tests::root(), "include": ["**/*.rs", "**/*.md"]},
            "batchSizePerProcess": 8, "steps": 120, "fetchEverySteps": 10, "evaluation": {"everySteps": 0, "batches": 1},
        }},
    });
    let path = folder.join("job.json");
    std::fs::write(&path, manifest.to_string()).unwrap();
    let run_dir = folder.join(format!("run-{round}-{processes}"));
    let output = Command::new(programs.join("switchyard"))
        .args(["run", "-o", "json"])
        .arg(&path)
        .arg("--run-dir")
        .arg(&run_dir)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let events = std::fs::read_to_string(run_dir.join("events.jsonl")).unwrap();
    let events: Vec<Value> =
        events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone()).collect();
    let reports: Vec<&Value> =
        events.iter().filter(|event| event["event"] == "progress" && event["rank"] == 0).skip(1).collect();
    let mut result = json!({"kernel": events.iter().find(|event| event["event"] == "ready").unwrap()["kernel"]});
    for name in PARTS.iter().chain(&["stepMs", "itemsPerSecond"]) {
        let mut values: Vec<f64> = reports.iter().map(|report| number(report, name)).collect();
        values.sort_by(f64::total_cmp);
        result[*name] = json!((median(&values) * 1000.0).round() / 1000.0);
    }
    result
}

/// Median step of the peer, as printed by its script.
fn torch(python: &str, processes: usize) -> Value {
    let script = switchyard_tests::root().join("tests/benches/torch_step.py");
    let output = Command::new(python).arg(script).args([processes.to_string(), "60".into()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Median of sorted values. For an even count, the mean of the middle two.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], sorted[middle]) } else { sorted[middle] }
}

fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap()
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        info.lines()
            .find(|line| line.starts_with(name))
            .and_then(|line| line.split(':').nth(1))
            .unwrap_or("")
            .trim()
            .to_string()
    };
    format!("{} (family {}, model {})", field("model name"), field("cpu family"), field("model\t"))
}

/// Load averages of the machine, to spot other work.
fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or_default().to_string()
}
