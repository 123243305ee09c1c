//! `switchyard tune` with real processes.

use super::scene;
use serde_json::Value;
use std::path::Path;
use switchyard_tests::TIMEOUT;

const STEPS: u64 = 3;

/// The weights of a trial's rank 0 at the end.
fn weights(run_dir: &Path) -> String {
    let events = std::fs::read_to_string(run_dir.join("events.jsonl")).unwrap();
    let mut events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone());
    let finished = events.find(|event| event["event"] == "finished").unwrap();
    assert_eq!(finished["step"], STEPS + 10, "ten steps are a warm-up");
    finished["weightsDigest"].as_str().unwrap().to_owned()
}

#[test]
fn every_setting_is_tried_and_none_changes_the_weights() {
    let (scene, manifest) = scene(|manifest| manifest);
    let manifest = manifest.to_str().unwrap();
    let arguments = ["tune", manifest, "--steps", "3", "--run-dir", "out", "--out", "tuned.yaml", "-o", "json"];
    let ended = scene.switchyard(arguments).run(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let tuned: Value = serde_json::from_str(&ended.stdout).unwrap();
    let trials = tuned["trials"].as_array().unwrap();
    assert_eq!(
        ended.stderr.lines().filter(|line| line.starts_with("trial ")).count(),
        trials.len(),
        "{}",
        ended.stderr
    );
    for (field, values) in [("communicators", vec![2, 4]), ("bucketSizeMiB", vec![4, 25])] {
        for value in values {
            assert!(trials.iter().any(|trial| trial[field] == value), "{field} {value}: {trials:?}");
        }
    }
    let positive = |trial: &Value, field: &str| trial[field].as_f64().is_some_and(|ms| ms > 0.0);
    assert!(trials.iter().all(|trial| trial["steps"] == STEPS && positive(trial, "stepMs")), "{trials:?}");
    let runs: Vec<_> = (1..=trials.len()).map(|number| scene.join(&format!("out/trial-{number}"))).collect();
    assert!(runs.iter().all(|run| weights(run) == weights(&runs[0])));
    assert!(!scene.entries().iter().any(|entry| entry.ends_with("model.safetensors")), "{:?}", scene.entries());

    let changed = tuned["patch"]["spec"].as_object().map_or(0, serde_json::Map::len);
    assert_eq!(tuned["isBetter"], changed > 0, "{tuned}");
    let text = std::fs::read_to_string(scene.join("tuned.yaml")).unwrap();
    let reason = tuned["reasons"][0].as_str().unwrap();
    assert!(text.starts_with("# Made by `switchyard tune`.\n") && text.contains(&format!("# {reason}\n")), "{text}");
    let plan = scene.switchyard(["plan", "tuned.yaml", "-o", "json"]).run(TIMEOUT);
    assert_eq!(plan.code, Some(0), "{}", plan.stderr);
    scene.assert_nothing_left();
}

#[test]
fn a_trial_that_fails_ends_the_search_with_its_cause() {
    let (scene, manifest) = scene(|manifest| super::fault(manifest, "panic:5@1"));
    let ended = scene.switchyard(["tune", manifest.to_str().unwrap(), "--steps", "3", "--run-dir", "out"]).run(TIMEOUT);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(5), ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("trial-1") && ended.stderr.contains("panicked"), "{}", ended.stderr);
    scene.assert_nothing_left();
}

#[test]
fn a_job_of_another_framework_is_refused() {
    let (scene, _) = scene(|manifest| manifest);
    let text = "apiVersion: training.switchyard.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: other}\n\
                spec: {trainer: {framework: Torch, image: other, command: [train]}}\n";
    std::fs::write(scene.join("other.yaml"), text).unwrap();
    let ended = scene.switchyard(["tune", "other.yaml"]).run(TIMEOUT);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("spec.engine: got nothing"), "{}", ended.stderr);
}
