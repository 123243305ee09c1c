//! `switchyard checkpoint export` writes a PyTorch model: every tensor has the name and shape of
//! PyTorch's network, and the validation loss equals the run's.

use crate::frameworks::pods::{python, script};
use crate::frameworks::record;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use switchyard_tests::{Ended, Manifest, Program, Scene, TIMEOUT, programs};

/// A model, the location of its data, the equivalent PyTorch network, and the allowed loss
/// difference.
struct Case {
    name: &'static str,
    model: Value,
    data: Value,
    steps: u32,
    /// Validation batches of each of two ranks, and the batch size. Together they cover each sample
    /// of the validation part once.
    evaluation: (u32, u32),
    peer: Value,
    /// Relative.
    tolerance: f64,
}

fn ended(what: &str, ended: &Ended) -> Result<()> {
    ensure!(ended.code == Some(0), "{what}: {:?}\n{}\n{}", ended.code, ended.stdout, ended.stderr);
    Ok(())
}

fn python_output(scene: &Scene, arguments: &[&str]) -> Result<String> {
    let python = python("SWITCHYARD_TORCH_PYTHON")?.join("python3");
    let output = Command::new(python).arg(script("exported.py")).args(arguments).current_dir(scene.path()).output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The loss of the last evaluation, from a rank's events.
fn validation_loss(run: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(run.join("events.jsonl")).context("events of the run")?;
    let events = text.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut losses = events
        .map(|line| line["event"].clone())
        .filter(|event| event["event"] == "evaluation")
        .filter_map(|event| event["loss"].as_f64());
    losses.next().with_context(|| format!("no evaluation in {}", run.display()))
}

fn check(case: &Case) -> Result<()> {
    let scene = Scene::new();
    let data = scene.path().display().to_string();
    python_output(&scene, &["make", &data])?;
    let (batches, size) = case.evaluation;
    let manifest = Manifest::small("unused")
        .named(case.name)
        .with("engine.model", case.model.clone())
        .with("engine.data", case.data.clone())
        .with("engine.steps", case.steps)
        .with("engine.batchSizePerProcess", size)
        .with("engine.optimizer", json!({"type": "AdamW", "learningRate": "0.003"}))
        .with("engine.evaluation", json!({"everySteps": 0, "batches": batches}))
        .with("checkpoint", json!({"path": "saved", "everySteps": case.steps, "periodSeconds": 0}));
    scene.write("job.yaml", manifest.yaml());
    let switchyard = programs().join("switchyard");
    let run = |arguments: &[&str]| Program::new(&switchyard, scene.path(), arguments).run(TIMEOUT);
    ended("run", &run(&["run", "job.yaml", "--run-dir", "run"]))?;
    ended("export", &run(&["checkpoint", "export", "saved", "--to", "model.safetensors"]))?;
    let ours = validation_loss(&scene.join("run"))?;
    let file = scene.join("model.safetensors").display().to_string();
    let theirs: f64 = python_output(&scene, &["loss", &data, &file, &case.peer.to_string()])?.trim().parse()?;
    let apart = (ours - theirs).abs() / ours;
    ensure!(apart < case.tolerance, "{}: ours {ours}, PyTorch's {theirs}", case.name);
    let result = json!({"steps": case.steps, "loss": ours, "lossInPyTorch": theirs, "mostApart": case.tolerance, "passed": true});
    record(&format!("export-{}", case.name), result)
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --frameworks"]
fn a_gpt_is_loaded_by_pytorch() -> Result<()> {
    check(&Case {
        name: "gpt",
        model: json!({"type": "GPT", "gpt": {"layers": 2, "hiddenSize": 32, "heads": 2, "contextLength": 32}}),
        data: json!({"format": "Tokens", "path": "."}),
        steps: 60,
        evaluation: (8, 16),
        peer: json!({"kind": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 32, "vocabulary": 256}),
        tolerance: 1e-4,
    })
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --frameworks"]
fn a_bert_is_loaded_by_pytorch() -> Result<()> {
    check(&Case {
        name: "bert",
        model: json!({"type": "BERT", "bert": {"layers": 2, "hiddenSize": 32, "heads": 2, "contextLength": 32}}),
        data: json!({"format": "Tokens", "path": "masked"}),
        steps: 120,
        evaluation: (8, 16),
        peer: json!({"kind": "bert", "layers": 2, "hidden": 32, "heads": 2, "context": 32, "vocabulary": 256, "rows": 264}),
        // Both sides mask other tokens: about 1,300 here, and twenty times as many in the peer. A
        // wrongly wired network has a loss of 5.6.
        tolerance: 0.1,
    })
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --frameworks"]
fn a_resnet_is_loaded_by_pytorch() -> Result<()> {
    check(&Case {
        name: "resnet",
        model: json!({"type": "ResNet", "resnet": {"depth": 18, "stem": "Small", "width": 8}}),
        data: json!({"format": "SafeTensors", "path": "images"}),
        steps: 20,
        evaluation: (2, 16),
        peer: json!({"kind": "resnet", "depth": 18, "width": 8, "small": true, "channels": 3, "classes": 4}),
        tolerance: 1e-3,
    })
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --frameworks"]
fn an_mlp_is_loaded_by_pytorch() -> Result<()> {
    check(&Case {
        name: "mlp",
        model: json!({"type": "MLP", "mlp": {"hiddenSizes": [24, 16], "activation": "ReLU"}}),
        data: json!({"format": "SafeTensors", "path": "features"}),
        steps: 150,
        evaluation: (2, 16),
        peer: json!({"kind": "mlp", "sizes": [12, 24, 16, 4]}),
        tolerance: 1e-4,
    })
}
