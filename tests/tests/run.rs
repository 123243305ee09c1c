//! `switchyard run` with real processes: the complete path, and every way to interrupt it.

mod frozen;
mod hangs;
mod limits;
mod machines;
mod pods;
mod restarts;
mod shared;
mod tune;

use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use switchyard_tests::{Ended, Manifest, Running, Scene, TIMEOUT, until};
use switchyard_worker_contract::process_stat::ProcessStat;

/// A test folder with text and a manifest; returns the manifest's path.
fn scene(change: impl FnOnce(Manifest) -> Manifest) -> (Scene, PathBuf) {
    let scene = Scene::new();
    scene.write_text("data/text.txt", 64);
    let manifest = scene.manifest("job.yaml", &change(Manifest::small("data")));
    (scene, manifest)
}

/// Makes a job practically endless.
fn endless(manifest: Manifest) -> Manifest {
    manifest.with("engine.steps", 10_000_000).with("engine.evaluation.everySteps", 0)
}

fn fault(manifest: Manifest, fault: &str) -> Manifest {
    manifest.with("trainer.env", json!([{"name": "SWITCHYARD_FAULT", "value": fault}]))
}

fn start(scene: &Scene, manifest: &Path, more: &[&str]) -> Running {
    let mut arguments = vec!["run", manifest.to_str().unwrap(), "--run-dir", "out"];
    arguments.extend(more);
    scene.switchyard(arguments).start()
}

fn run(scene: &Scene, manifest: &Path, more: &[&str]) -> Ended {
    start(scene, manifest, more).wait(TIMEOUT)
}

fn condition<'a>(status: &'a Value, kind: &str) -> &'a Value {
    let conditions = status["conditions"].as_array().unwrap();
    conditions.iter().find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

/// Process ids of an attempt's ranks in rank order, from the events.
fn pids(scene: &Scene, attempt: u64) -> Vec<i32> {
    let events = std::fs::read_to_string(scene.join("out/events.jsonl")).unwrap_or_default();
    let ranks: BTreeMap<u64, i32> = events
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|event| event["attempt"] == attempt && event["event"]["event"] == "ready")
        .map(|event| (event["rank"].as_u64().unwrap(), event["event"]["pid"].as_i64().unwrap() as i32))
        .collect();
    ranks.into_values().collect()
}

/// Waits until all ranks of an attempt train; returns their process ids.
fn training(scene: &Scene, running: &mut Running, ranks: usize) -> Vec<i32> {
    running.wait_for("step=", TIMEOUT);
    let pids = pids(scene, 1);
    assert_eq!(pids.len(), ranks);
    pids
}

fn kill(pid: i32, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn a_manifest_becomes_a_trained_model_and_a_truthful_status() {
    let (scene, manifest) =
        scene(|manifest| manifest.with("engine.steps", 150).with("engine.optimizer", json!({"learningRate": "0.01"})));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for expected in
        ["RANK", "TRANSPORT", "shm", "gradient tensors -> 1 all-reduce", "unigram", "bigram", "step=150/150"]
    {
        assert!(ended.stderr.contains(expected), "{expected} is missing in:\n{}", ended.stderr);
    }
    for expected in ["150 steps", "on every rank", "model.safetensors", "out/report.html"] {
        assert!(ended.stdout.contains(expected), "{expected} is missing in:\n{}", ended.stdout);
    }
    assert!(!ended.stdout.contains('\u{1b}') && !ended.stderr.contains('\u{1b}'), "no escape codes in a pipe");
    let status = scene.status("out");
    assert_eq!(condition(&status, "Succeeded")["reason"], "Complete");
    assert_eq!(condition(&status, "Complete")["status"], "True");
    assert_eq!(condition(&status, "Placed")["status"], "True");
    let trainer = &status["trainerStatus"];
    assert_eq!((&trainer["step"], &trainer["progressPercentage"]), (&json!(150), &json!(100)));
    let loss: f64 = trainer["loss"].as_str().unwrap().parse().unwrap();
    assert!(loss < 4.0, "the loss has not fallen: {loss}");
    let entries = scene.entries();
    for expected in [
        "engine.json",
        "events.jsonl",
        "plan.yaml",
        "logs/attempt-1/rank-0.log",
        "logs/attempt-1/rank-1.log",
        "model.safetensors",
        "inspection.json",
        "machine.json",
        "report.html",
        "report.json",
    ] {
        assert!(entries.contains(&format!("out/{expected}")), "{expected} is missing in {entries:?}");
    }
    assert!(!entries.iter().any(|entry| entry.ends_with(".key") || entry.ends_with(".new")), "{entries:?}");
    scene.assert_nothing_left();
}

#[test]
fn the_same_seed_gives_the_same_weights_twice() {
    let digest = || {
        let (scene, manifest) = scene(|manifest| manifest);
        let ended = run(&scene, &manifest, &["--output", "json"]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let events = std::fs::read_to_string(scene.join("out/events.jsonl")).unwrap();
        let digests: Vec<String> = events
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone())
            .filter(|event| event["event"] == "finished")
            .map(|event| event["weightsDigest"].as_str().unwrap().to_string())
            .collect();
        assert_eq!((digests.len(), &digests[0]), (2, &digests[1]), "both ranks have the same weights");
        digests[0].clone()
    };
    assert_eq!(digest(), digest());
}

#[test]
fn json_output_is_one_object_per_line_on_standard_output() {
    let (scene, manifest) = scene(|manifest| manifest);
    let ended = run(&scene, &manifest, &["-o", "json"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let objects: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(objects.iter().all(|object| object["apiVersion"] == "cli.switchyard.dev/v1"));
    let kinds: Vec<&str> = objects.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds[1]), ("RunStarting", "RunReady"));
    assert!(kinds.contains(&"RunProgress") && kinds.contains(&"RunEvaluation"));
    let last = objects.last().unwrap();
    assert_eq!((&last["kind"], &last["exitCode"]), (&json!("RunResult"), &json!(0)));
    assert_eq!(condition(&last["trainJob"]["status"], "Succeeded")["reason"], "Complete");
}

#[test]
fn layers_are_timed_in_profiled_steps() {
    let (scene, manifest) = scene(|manifest| manifest.with("engine.profile", json!({"fromStep": 3, "steps": 4})));
    assert_eq!(run(&scene, &manifest, &[]).code, Some(0));
    let report: Value = serde_json::from_slice(&std::fs::read(scene.join("out/report.json")).unwrap()).unwrap();
    let layers = &report["layers"];
    assert_eq!(layers["profiledSteps"], 4, "{layers}");
    for rows in ["kinds", "rows"] {
        let rows = layers[rows].as_array().unwrap();
        let sum: u64 = rows.iter().map(|row| row["parameters"].as_u64().unwrap()).sum();
        assert_eq!(sum, report["verdict"]["parameters"], "each parameter belongs to one layer: {rows:?}");
        for row in rows {
            assert!(row["computeMs"].as_f64().unwrap() > 0.0, "{row}");
            assert_eq!(row["ratio"].is_null(), row["parameters"] == 0, "{row}");
        }
    }
    let kinds: Vec<&str> =
        layers["kinds"].as_array().unwrap().iter().map(|row| row["kind"].as_str().unwrap()).collect();
    assert!(kinds.len() < layers["rows"].as_array().unwrap().len(), "{kinds:?}");
}

#[test]
fn a_step_is_predicted_for_an_absent_gpu() {
    let (scene, manifest) = scene(|manifest| manifest);
    let device = switchyard_tests::root().join("examples/devices/h200.json");
    let plan = |device: &Path, more: &[&str]| {
        let arguments = ["plan", manifest.to_str().unwrap(), "--device", device.to_str().unwrap()];
        scene.switchyard(arguments.iter().chain(more).copied()).run(TIMEOUT)
    };
    let ended = plan(&device, &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for expected in ["NVIDIA H200", "product", "attention_keys", "update", "tokens/s and GPU"] {
        assert!(ended.stdout.contains(expected), "{expected} is missing in:\n{}", ended.stdout);
    }
    let prediction: Value = serde_json::from_str(&plan(&device, &["-o", "json"]).stdout).unwrap();
    assert_eq!(prediction["kind"], "Prediction");
    let seconds: f64 =
        prediction["operations"].as_array().unwrap().iter().map(|row| row["seconds"].as_f64().unwrap()).sum();
    assert!((seconds / prediction["seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{prediction}");
    let exchange = |rate: &str| {
        let ended = plan(&device, &["--bus-bandwidth", rate, "-o", "json"]);
        serde_json::from_str::<Value>(&ended.stdout).unwrap()["exchange"].clone()
    };
    let (slow, fast) = (exchange("0.12"), exchange("120"));
    let sent = 4.0 * prediction["parameters"].as_f64().unwrap();
    assert_eq!((&slow["sentBytes"], &fast["sentBytes"]), (&json!(sent), &json!(sent)), "of two ranks");
    let share = |exchange: &Value| exchange["exposedSeconds"].as_f64().unwrap() / exchange["seconds"].as_f64().unwrap();
    assert!((slow["seconds"].as_f64().unwrap() / (sent / 0.12e9) - 1.0).abs() < 1e-9, "{slow}");
    assert!(share(&fast) <= share(&slow) && share(&slow) <= 1.0, "{fast} {slow}");
    let ended = plan(&device, &["--bus-bandwidth", "0"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("expected a number above 0"), "{ended:?}");
    let mut gpu: Value = serde_json::from_str(&std::fs::read_to_string(&device).unwrap()).unwrap();
    for (field, value, code, words) in [
        ("memoryBytes", json!(20 << 20), 8, "not placeable: a rank needs"),
        ("bytesPerSecond", json!(0), 2, "bytesPerSecond: got 0, expected a number greater than 0"),
        ("speed", json!(1), 2, "unknown field `speed`"),
    ] {
        let right = gpu[field].take();
        gpu[field] = value;
        std::fs::write(scene.join("other.json"), gpu.to_string()).unwrap();
        let ended = plan(&scene.join("other.json"), &[]);
        assert!(ended.code == Some(code) && ended.stderr.contains(words), "{ended:?}");
        gpu[field] = right;
    }
    let ended = plan(&scene.join("gone.json"), &[]);
    assert!(ended.code == Some(2) && ended.stderr.contains("gone.json: No such file"), "{ended:?}");
    scene.assert_nothing_left();
}

/// Regression: `--color` and `NO_COLOR` had no effect on the excerpts of errors, which checked the
/// terminal themselves.
#[test]
fn color_settings_apply_to_error_excerpts() {
    let (scene, manifest) = scene(|manifest| manifest.with("engine.steps", -1));
    let stderr = |arguments: &[&str]| {
        let mut all = vec!["plan", manifest.to_str().unwrap()];
        all.extend(arguments);
        scene.switchyard(all).run(TIMEOUT).stderr
    };
    assert!(!stderr(&[]).contains('\u{1b}'), "no escape codes in a pipe");
    assert!(stderr(&["--color", "always"]).contains('\u{1b}'));
    assert!(!stderr(&["--color", "never"]).contains('\u{1b}'));
}

#[test]
fn quiet_prints_only_the_result() {
    let (scene, manifest) = scene(|manifest| manifest);
    let ended = run(&scene, &manifest, &["-q"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert!(ended.stdout.starts_with("done "));
}

#[test]
fn a_stop_ends_all_ranks_and_leaves_nothing() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (scene, manifest) = scene(endless);
        let mut running = start(&scene, &manifest, &[]);
        training(&scene, &mut running, 2);
        running.signal(signal);
        let ended = running.wait(TIMEOUT);
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        let status = scene.status("out");
        assert_eq!(condition(&status, "Succeeded")["reason"], "Suspended");
        scene.assert_nothing_left();
    }
}

#[test]
fn a_stop_before_the_rendezvous_ends_all_ranks() {
    let (scene, manifest) = scene(endless);
    let mut running = start(&scene, &manifest, &[]);
    running.wait_for("entropy", TIMEOUT);
    running.signal(Signal::TERM);
    assert_eq!(running.wait(TIMEOUT).code, Some(143));
    scene.assert_nothing_left();
}

#[test]
fn a_dead_rank_stops_the_others_and_is_named_first() {
    let (scene, manifest) = scene(|manifest| endless(manifest).with("trainer.numProcPerNode", 3));
    let mut running = start(&scene, &manifest, &[]);
    let pids = training(&scene, &mut running, 3);
    kill(pids[1], Signal::KILL);
    let ended = running.wait(TIMEOUT);
    assert_eq!(ended.code, Some(5), "{}", ended.stderr);
    // The events map ranks to processes.
    let event = std::fs::read_to_string(scene.join("out/events.jsonl")).unwrap();
    let rank = event
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|event| event["event"]["pid"] == pids[1])
        .map(|event| event["rank"].as_u64().unwrap())
        .unwrap();
    for expected in [
        format!("error[SY0503]: rank {rank} failed first; the 2 other ranks stopped because of it"),
        format!("pid {}", pids[1]),
        "killed by signal 9 (SIGKILL)".into(),
        format!("rank-{rank}.log"),
    ] {
        assert!(ended.stderr.contains(&expected), "{expected} is missing in:\n{}", ended.stderr);
    }
    let status = scene.status("out");
    assert_eq!(condition(&status, "Succeeded")["reason"], "Failed");
    assert!(condition(&status, "Failed")["message"].as_str().unwrap().contains("killed by signal 9"));
    scene.assert_nothing_left();
}

#[test]
fn survivors_end_after_a_death() {
    let (scene, manifest) = scene(|manifest| endless(manifest).with("trainer.numProcPerNode", 4));
    let mut running = start(&scene, &manifest, &[]);
    let pids = training(&scene, &mut running, 4);
    let alive = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        ProcessStat::parse(&stat).is_some_and(|stat| !stat.has_ended())
    };
    kill(pids[0], Signal::KILL);
    until("ended", TIMEOUT, || Ok(!pids.iter().any(alive))).unwrap();
    assert_eq!(running.wait(TIMEOUT).code, Some(5));
}

#[test]
fn a_panic_is_the_root_cause_with_its_message() {
    let (scene, manifest) = scene(|manifest| fault(manifest, "panic:4@1"));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(5));
    assert!(
        ended.stderr.contains("rank 1 failed first") && ended.stderr.contains("panicked: a fault was asked for"),
        "{}",
        ended.stderr
    );
    scene.assert_nothing_left();
}

#[test]
fn a_silent_rank_is_found_and_named() {
    let hang = json!([{"name": "SWITCHYARD_FAULT", "value": "hang:4@1"}, {"name": "SWITCHYARD_PEER_TIMEOUT_SECONDS", "value": "1.5"}]);
    let (scene, manifest) = scene(|manifest| manifest.with("trainer.env", hang));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(5));
    assert!(
        ended.stderr.contains("rank 1 failed first") && ended.stderr.contains("no sign of life"),
        "{}",
        ended.stderr
    );
    scene.assert_nothing_left();
}

#[test]
fn nothing_survives_the_launcher() {
    let (scene, manifest) = scene(|manifest| endless(manifest).with("trainer.numProcPerNode", 3));
    let mut running = start(&scene, &manifest, &[]);
    training(&scene, &mut running, 3);
    running.signal(Signal::KILL);
    assert_eq!(running.wait(TIMEOUT).code, None);
    scene.assert_nothing_left();
}

#[test]
fn tcp_can_be_forced_and_trains_the_same() {
    let losses = |transport: &str| {
        let set = json!([{"name": "SWITCHYARD_TRANSPORT", "value": transport}]);
        let (scene, manifest) = scene(|manifest| manifest.with("trainer.env", set));
        let ended = run(&scene, &manifest, &[]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stderr.contains(transport), "{}", ended.stderr);
        scene.status("out")["trainerStatus"]["loss"].as_str().unwrap().to_string()
    };
    assert_eq!(losses("shm"), losses("tcp"));
}

#[test]
fn an_epoch_has_one_step_per_batch() {
    let (scene, _) = scene(|manifest| manifest);
    let mut document: Value = serde_saphyr::from_str(&Manifest::small("data").yaml()).unwrap();
    document["spec"]["engine"].as_object_mut().unwrap().remove("steps");
    document["spec"]["engine"]["epochs"] = json!(2);
    document["spec"]["engine"]["batchMerge"] = json!(3);
    document["spec"]["engine"]["batchSizePerProcess"] = json!(8);
    let manifest = scene.write("epochs.yaml", document.to_string());
    let ended = run(&scene, &manifest, &["-o", "json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let starting: Value = serde_json::from_str(ended.stdout.lines().next().unwrap()).unwrap();
    let inspection = &starting["inspection"];
    // 2 ranks x 8 sequences x 3 micro-batches x 32 tokens.
    assert_eq!(inspection["itemsPerStep"], 2 * 8 * 3 * 32);
    let windows = (inspection["trainItems"].as_u64().unwrap() - 1) / 32;
    let steps = windows / (2 * 8 * 3);
    assert_eq!((&inspection["stepsPerEpoch"], &inspection["totalSteps"]), (&json!(steps), &json!(2 * steps)));
    assert_eq!(scene.status("out")["trainerStatus"]["step"], json!(2 * steps));
}

#[test]
fn two_copies_run_side_by_side() {
    let (scene, manifest) = scene(|manifest| manifest);
    let other = scene.switchyard(["run", manifest.to_str().unwrap(), "--run-dir", "other"]).start();
    let first = run(&scene, &manifest, &[]);
    assert_eq!((first.code, other.wait(TIMEOUT).code), (Some(0), Some(0)));
    scene.assert_nothing_left();
}

#[test]
fn unknown_transports_are_refused_by_name() {
    let set = json!([{"name": "SWITCHYARD_TRANSPORT", "value": "pigeon"}]);
    let (scene, manifest) =
        scene(|manifest| manifest.with("trainer.env", set).with("failurePolicy", json!({"maxRestarts": 5})));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("SWITCHYARD_TRANSPORT") && ended.stderr.contains("pigeon"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("restart 1"), "an invalid setting was retried: {}", ended.stderr);
}

#[test]
fn oversubscription_is_allowed_and_reported() {
    let (scene, manifest) = scene(|manifest| manifest.with("trainer.numProcPerNode", 4).with("trainer.cpuThreads", 64));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("warning: oversubscribed: 4 processes with 64 threads each want 256 cores"),
        "{}",
        ended.stderr
    );
    scene.assert_nothing_left();
}
