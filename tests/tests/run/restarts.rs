//! Restarts: of the whole group, counted, and from the checkpoint if there is one.

use super::{condition, fault, pids, run, scene};
use serde_json::{Value, json};
use switchyard_tests::Manifest;

#[test]
fn a_restart_is_a_new_attempt_for_the_whole_group() {
    let (scene, manifest) =
        scene(|manifest| fault(manifest, "kill:12@1#1").with("failurePolicy", json!({"maxRestarts": 1})));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("restart 1 of 1: attempt 2"), "{}", ended.stderr);
    let status = scene.status("out");
    assert_eq!((&status["attempt"], &status["restarts"]["application"]), (&json!(2), &json!(1)));
    assert!(pids(&scene, 1).iter().all(|pid| !pids(&scene, 2).contains(pid)), "new processes");
    assert!(scene.entries().contains(&"out/logs/attempt-2/rank-1.log".to_string()));
    scene.assert_nothing_left();
}

/// Trains to the end. Returns the digest of the weights, the step from which each rank of
/// each attempt resumed, and standard error.
fn end(change: impl FnOnce(Manifest) -> Manifest) -> (Value, Vec<Value>, String) {
    let (scene, manifest) = scene(change);
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let events = std::fs::read_to_string(scene.join("out/events.jsonl")).unwrap();
    let events: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| events.iter().filter(|event| event["event"]["event"] == kind).collect::<Vec<_>>();
    let resumed: Vec<Value> = of("ready").iter().map(|event| event["event"]["resumedStep"].clone()).collect();
    let digest = of("finished")[0]["event"]["weightsDigest"].clone();
    scene.assert_nothing_left();
    (digest, resumed, ended.stderr)
}

/// Restarts once, after a fault, from a checkpoint of every fifth step.
fn restarting(manifest: Manifest, failing: &str) -> Manifest {
    fault(manifest, failing)
        .with("failurePolicy", json!({"maxRestarts": 1}))
        .with("checkpoint", json!({"path": "saved", "everySteps": 5, "periodSeconds": 0}))
}

#[test]
fn a_restart_resumes_from_the_checkpoint_and_ends_with_the_same_weights() {
    let (whole, ..) = end(|manifest| manifest);
    let (digest, resumed, stderr) = end(|manifest| restarting(manifest, "kill:22@1#1"));
    assert_eq!(digest, whole);
    // The checkpoint of step 20 may have been in progress.
    let step = resumed[2].as_u64();
    assert!([Some(15), Some(20)].contains(&step) && resumed[..2] == [Value::Null, Value::Null], "{resumed:?}");
    assert!(stderr.contains(&format!("resumed  from step {}, saved", step.unwrap())), "{stderr}");
}

/// The server is counted after the two ranks.
#[test]
fn a_killed_parameter_server_is_the_cause_and_no_update_is_lost_or_repeated() {
    let (whole, ..) = end(|manifest| manifest);
    let servers = json!({"mode": "ParameterServer", "parameterServer": {"servers": 1, "placement": "Dedicated"}});
    let (digest, resumed, stderr) =
        end(|manifest| restarting(manifest, "kill:22@2#1").with("engine.communication", servers));
    assert_eq!(digest, whole, "the bits of a collective run");
    let step = resumed[2].as_u64();
    assert!([Some(15), Some(20)].contains(&step) && resumed[3].as_u64() == step, "{resumed:?}");
    for expected in [
        "error[SY0503]: parameter server 0 failed first; the 2 ranks stopped because of it",
        "killed by signal 9 (SIGKILL)",
        "logs/attempt-1/server-0.log",
    ] {
        assert!(stderr.contains(expected), "{expected} is missing in:\n{stderr}");
    }
}

#[test]
fn restarts_are_counted_and_limited() {
    let (scene, manifest) =
        scene(|manifest| fault(manifest, "exit:3@0").with("failurePolicy", json!({"maxRestarts": 2})));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(5));
    assert_eq!(ended.stderr.matches("error[SY0503]").count(), 3, "{}", ended.stderr);
    let status = scene.status("out");
    assert_eq!(status["restarts"]["application"], 2);
    assert!(condition(&status, "Failed")["message"].as_str().unwrap().contains("2 of 2 restarts used"));
    let report: Value = serde_json::from_slice(&std::fs::read(scene.join("out/report.json")).unwrap()).unwrap();
    assert_eq!(report["verdict"]["result"], "failed");
    assert!(report["verdict"]["message"].as_str().unwrap().contains("2 of 2 restarts used"));
    scene.assert_nothing_left();
}
