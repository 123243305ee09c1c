//! Trains a small model repeatedly on the reference GPU, whose streams run late and in a different
//! order each time: no findings, and always the same bits. `cargo xtask chaos` runs 10,000 orders,
//! writes `docs/results/gpu-seeds.json` after every 100, and continues from there if it was
//! interrupted; the tests run a few.

use crate::ranks::{blueprint, free_port, group};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use switchyard_worker::train::{StepRequest, Trainer};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;

/// Enough that both kinds of segments are captured and launched as graphs.
const STEPS: u64 = 5;
/// Number of orders that a process runs in sequence.
const PER_PROCESS: usize = 100;
/// Number of orders; set in the child process.
const CHILD: &str = "CHILD_PLAYS";
const NAME: &str = "gpu_seeds::no_order_of_streams_has_a_finding_or_changes_a_bit";

fn config(folder: &std::path::Path) -> EngineConfig {
    let plain = crate::plain::gpt(folder, &[]);
    EngineConfig {
        device: Device::Cuda,
        model: Model::Mlp(Mlp { hidden_sizes: vec![6], activation: Activation::Gelu }),
        data: Data { source: Source::Synthetic(Synthetic { samples: 40, image: None, classes: 3 }), ..plain.data },
        batch_size_per_process: 3,
        batch_merge: 2,
        length: Length::Steps(STEPS),
        evaluation: Evaluation { every_steps: 0, batches: Some(1) },
        cpu_threads: 1,
        ..plain
    }
}

/// Trains this many times, and prints a digest of the weights each time.
fn run_orders(count: usize) {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    for _ in 0..count {
        let mut trainer = Trainer::join(blueprint(&config, 1).unwrap(), &group(1, 0, free_port())).unwrap();
        while trainer.steps_done() < STEPS {
            trainer.step(StepRequest::default()).unwrap();
        }
        println!("weights {}", trainer.agree_on_weights().unwrap());
        trainer.leave().unwrap();
    }
}

/// Runs orders from a seed on in a child process; returns the digests that it prints.
fn digests(seed: usize, count: usize, faults: &str) -> Result<Vec<String>, String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([NAME, "--exact", "--nocapture"]).env(CHILD, count.to_string());
    command.envs(switchyard_cuda_libraries::environment());
    command.env("SWITCHYARD_REFERENCE_SEED", seed.to_string()).env("SWITCHYARD_REFERENCE_FAULT", faults);
    command.env(env::GPU_CACHE, "none").env_remove("CUDA_VISIBLE_DEVICES");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(format!("seeds {seed} to {}: {}", seed + count - 1, String::from_utf8_lossy(&output.stderr)));
    }
    Ok(text.lines().filter_map(|line| line.split_once("weights ")).map(|(_, digest)| digest.to_owned()).collect())
}

/// The result file of an earlier run.
fn written() -> Option<Value> {
    let folder = std::env::var_os("SWITCHYARD_CHAOS")?;
    let text = std::fs::read_to_string(Path::new(&folder).join("gpu-seeds.json")).ok()?;
    serde_json::from_str(&text).ok()
}

#[test]
fn no_order_of_streams_has_a_finding_or_changes_a_bit() {
    if let Ok(count) = std::env::var(CHILD) {
        return run_orders(count.parse().unwrap());
    }
    // As late as possible.
    let expected = digests(0, 1, "").unwrap();
    assert_eq!(expected.len(), 1);
    let seeds = crate::chaos::size(12, 10_000);
    let first = crate::chaos::seed().unwrap_or(1) as usize;
    // Continues an interrupted run, unless the weights have changed since.
    let of_before =
        written().filter(|before| (&before["firstSeed"], &before["weights"]) == (&json!(first), &json!(expected[0])));
    let before = of_before.and_then(|before| before["seeds"].as_u64()).unwrap_or_default() as usize;
    let mut played = if before < seeds { before } else { 0 };
    while played < seeds {
        let count = PER_PROCESS.min(seeds - played);
        let got = digests(first + played, count, "").unwrap();
        assert_eq!(got.len(), count);
        let other = got.iter().position(|digest| *digest != expected[0]);
        assert_eq!(other.map(|at| first + played + at), None, "the seed of other weights");
        played += count;
        let result = json!({
            "firstSeed": first, "seeds": played, "findings": 0, "otherWeights": 0, "steps": STEPS,
            "model": "MLP, 6 hidden, 2 micro-batches", "weights": expected[0],
        });
        crate::chaos::report("gpu-seeds", &result).unwrap();
    }
}

#[test]
fn a_wrong_product_changes_the_weights() {
    let [right, wrong] = ["", "wrong:60"].map(|faults| digests(1, 2, faults).unwrap());
    assert_eq!(right[0], right[1]);
    assert_ne!(right[1], wrong[1]);
}
