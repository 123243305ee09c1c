//! Trainings with the real programs: a launcher on each host.

use super::hosts::{Hosts, wait_all};
use super::{Options, Outcome, with};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};
use switchyard_worker_contract::record::{self, StepRecord};

/// A finished training.
pub struct Trained {
    /// Steps by rank.
    steps: Vec<Vec<StepRecord>>,
    /// Bytes that each host sent in the whole run, headers included.
    pub sent: Vec<u64>,
    pub validation_loss: f64,
    pub accuracy: Option<f64>,
}

impl Trained {
    /// Mean milliseconds of the steps after `from`, up to `to`, of the slowest rank.
    pub fn step_ms(&self, from: u64, to: u64) -> f64 {
        let mean = |steps: &Vec<StepRecord>| {
            let of = steps.iter().filter(|step| from < step.step && step.step <= to);
            of.map(|step| f64::from(step.total_ms)).sum::<f64>() / (to - from) as f64
        };
        self.steps.iter().map(mean).fold(0.0, f64::max)
    }

    /// Seconds from the first rank's end of step `from` to the last rank's end of the run.
    pub fn seconds_after(&self, from: u64) -> f64 {
        let first = self.steps.iter().flatten().filter(|step| step.step == from).map(|step| step.end_us).min();
        let last = self.steps.iter().flatten().map(|step| step.end_us).max();
        last.zip(first).map_or(f64::NAN, |(last, first)| (last - first) as f64 / 1e6)
    }
}

/// An MLP on synthetic samples, and SGD with momentum, which suits every remedy.
pub struct Mlp {
    pub layers: usize,
    pub width: usize,
}

impl Mlp {
    pub const FEATURES: usize = 16;
    pub const CLASSES: usize = 10;
    pub const BATCH: usize = 8;

    pub fn parameters(&self) -> usize {
        let Mlp { layers, width } = self;
        (Mlp::FEATURES + 1) * width + (layers - 1) * (width + 1) * width + (width + 1) * Mlp::CLASSES
    }

    /// The `engine` block, with the fields of `more`.
    pub fn engine(&self, steps: u64, more: &Value) -> Value {
        let engine = json!({
            "model": {"type": "MLP", "mlp": {"hiddenSizes": vec![self.width; self.layers]}},
            "data": {"format": "Synthetic"}, "batchSizePerProcess": Mlp::BATCH, "steps": steps,
            "optimizer": {"type": "SGD", "learningRate": "0.001", "momentum": "0.9"},
            "evaluation": {"everySteps": 0, "batches": 1}, "fetchEverySteps": 1000,
        });
        with(engine, more.clone())
    }
}

/// Trains with one rank on each host.
pub fn train(options: &Options, hosts: &Hosts, engine: &Value) -> Outcome<Trained> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    let manifest = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "network"},
        "spec": {
            // The ranks keep the core of their host.
            "topologyPolicy": {"mode": "Ignored"},
            "trainer": {"numNodes": hosts.len(), "numProcPerNode": 1, "cpuThreads": 1}, "engine": engine,
        },
    });
    std::fs::write(path("job.json"), manifest.to_string())?;
    let mut key = [0; 32];
    getrandom::fill(&mut key)?;
    std::fs::write(path("key"), key)?;
    std::fs::set_permissions(path("key"), std::fs::Permissions::from_mode(0o600))?;
    let names: Vec<String> = (0..hosts.len()).map(Hosts::address).collect();
    let program = options.programs.join("switchyard");
    let before = (0..hosts.len()).map(|host| hosts.sent(host)).collect::<Outcome<Vec<_>>>()?;
    let start = |host: usize| -> Outcome<Child> {
        let mut command = hosts.command(host, program.to_str().ok_or("--programs is not UTF-8")?);
        command.args(["run", "-q"]).arg(path("job.json")).arg("--run-dir").arg(path(&host.to_string()));
        command
            .args(["--hosts", &names.join(","), "--node-rank", &host.to_string()])
            .arg("--key-file")
            .arg(path("key"));
        Ok(command.stdout(Stdio::null()).spawn()?)
    };
    wait_all((0..hosts.len()).map(start).collect::<Outcome<_>>()?)?;
    let sent = (0..hosts.len()).map(|host| Ok(hosts.sent(host)? - before[host])).collect::<Outcome<_>>()?;
    let steps = (0..hosts.len()).map(|host| records(&path(&host.to_string()), host as u32)).collect::<Outcome<_>>()?;
    let events = std::fs::read_to_string(path("0/events.jsonl"))?;
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let finished = events.map(|line| line["event"].clone()).find(|event| event["event"] == "finished");
    let finished = finished.ok_or("rank 0 did not finish")?;
    let validation_loss = finished["validationLoss"].as_f64().ok_or("rank 0 did not evaluate")?;
    Ok(Trained { steps, sent, validation_loss, accuracy: finished["accuracy"].as_f64() })
}

fn records(run_dir: &Path, rank: u32) -> Outcome<Vec<StepRecord>> {
    let path = run_dir.join(record::DIR).join(record::steps_file(rank));
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}
