//! Jobs of other frameworks, whose pods are processes of this machine.

use super::condition;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::PathBuf;
use switchyard_tests::{Ended, Program, Running, Scene, TIMEOUT, programs, root};

/// A role that runs a shell script.
fn role(name: &str, replicas: u32, script: &str) -> Value {
    json!({"name": name, "replicas": replicas, "command": ["sh", "-c", script]})
}

/// Ends on SIGTERM, with its child.
const FOREVER: &str = "echo started; sleep 100000 & wait";

fn scene(framework: &str, roles: &Value, more: &Value) -> (Scene, PathBuf) {
    let mut spec = json!({"trainer": {"framework": framework, "image": "image"}, "roles": roles});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "pods"}, "spec": spec,
    });
    let scene = Scene::new();
    let manifest = scene.write("job.yaml", document.to_string());
    (scene, manifest)
}

fn start((scene, manifest): &(Scene, PathBuf)) -> Running {
    scene.switchyard(["run", manifest.to_str().unwrap(), "--run-dir", "out"]).start()
}

fn run(scene: &(Scene, PathBuf)) -> Ended {
    start(scene).wait(TIMEOUT)
}

/// Pods of a role that succeeded and failed.
fn ends(status: &Value, role: &str) -> [Value; 2] {
    let roles = status["roles"].as_array().unwrap();
    let own = roles.iter().find(|own| own["name"] == role).unwrap();
    ["succeeded", "failed"].map(|count| own[count].clone())
}

#[test]
fn the_example_trains_with_parameter_servers() {
    let scene = Scene::new();
    let run_dir = scene.join("out");
    let arguments = ["run", "examples/roles/plain-ps.yaml", "--run-dir", run_dir.to_str().unwrap()];
    let ended = Program::new(&programs().join("switchyard"), root(), arguments).run(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
    for worker in 0..3 {
        assert!(ended.stdout.contains(&format!("worker-{worker} | step=100 loss=")), "{}", ended.stdout);
    }
    assert!(ended.stdout.contains("ps-1     | 16 weights on "), "{}", ended.stdout);
    assert!(
        ended.stderr.contains("warning: commands run with the programs and files of this machine, not in python:3.13")
    );
    assert!(ended.stderr.ends_with("done        3 awaited pods succeeded\n"), "{}", ended.stderr);
    let status = scene.status("out");
    assert_eq!(condition(&status, "Complete")["status"], "True", "{status:#}");
    assert_eq!(ends(&status, "worker"), [3, 0]);
    assert!(std::fs::read_to_string(run_dir.join("logs/attempt-1/ps-0.log")).unwrap().contains("16 weights on "));
}

#[test]
fn the_awaited_role_ends_the_job_and_a_role_can_fail() {
    let mut eval = role("eval", 1, "exit 3");
    eval["onFailure"] = json!("Ignore");
    // The learner waits for an actor.
    let learner = "until grep -q started out/logs/attempt-1/actor-1.log; do sleep 0.05; done
        echo $SWITCHYARD_ROLE-$SWITCHYARD_ROLE_INDEX of $SWITCHYARD_NUM_NODES";
    let scene = scene(
        "Plain",
        &json!([role("learner", 1, learner), role("actor", 2, FOREVER), eval]),
        &json!({"successPolicy": {"role": "learner"}}),
    );
    let ended = run(&scene);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("learner-0 | learner-0 of 4"), "{}", ended.stdout);
    let status = scene.0.status("out");
    assert_eq!(
        [ends(&status, "learner"), ends(&status, "actor")],
        [[1, 0], [0, 0]].map(|counts| counts.map(Value::from))
    );
    scene.0.assert_nothing_left();
}

#[test]
fn a_failure_restarts_all_pods_until_the_budget_is_used() {
    let peers = "echo attempt $SWITCHYARD_ATTEMPT of $SWITCHYARD_HOSTS_B; sleep 100000";
    let scene = scene(
        "Plain",
        &json!([role("a", 1, peers), role("b", 1, "echo last words; exit 7")]),
        &json!({"failurePolicy": {"maxRestarts": 1}}),
    );
    let ended = run(&scene);
    assert_eq!(ended.code, Some(5), "{}\n{}", ended.stdout, ended.stderr);
    for words in
        ["error[SY0503]: pod b-0 failed", "cause    exit code 7", "| last words", "restart 1 of 1: attempt 2 starts\n"]
    {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert_eq!(ended.stderr.matches("SY0503").count(), 2, "{}", ended.stderr);
    let status = scene.0.status("out");
    let message = condition(&status, "Failed")["message"].as_str().unwrap();
    assert!(message.contains("exit code 7; 1 of 1 restarts used"), "{message}");
    scene.0.assert_nothing_left();
}

#[test]
fn a_stop_ends_all_pods_with_their_children() {
    let scene = scene("Plain", &json!([role("a", 2, FOREVER)]), &json!({}));
    let mut running = start(&scene);
    running.wait_for("a-0 | started", TIMEOUT);
    running.wait_for("a-1 | started", TIMEOUT);
    running.signal(Signal::INT);
    let ended = running.wait(TIMEOUT);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(ended.stderr.contains("SIGINT: stopping all processes"), "{}", ended.stderr);
    assert_eq!(condition(&scene.0.status("out"), "Succeeded")["reason"], "Suspended");
    scene.0.assert_nothing_left();
}

#[test]
fn pods_die_with_their_launcher() {
    let scene = scene("Plain", &json!([role("a", 2, "echo started; exec sleep 100000")]), &json!({}));
    let mut running = start(&scene);
    running.wait_for("a-0 | started", TIMEOUT);
    running.wait_for("a-1 | started", TIMEOUT);
    running.signal(Signal::KILL);
    running.wait(TIMEOUT);
    scene.0.assert_nothing_left();
}

#[test]
fn a_program_that_is_not_there_is_refused_before_the_start() {
    let mut missing = role("b", 1, "");
    missing["command"] = json!(["/workspace/train.py"]);
    let scene = scene("Torch", &json!([role("a", 1, "true"), missing]), &json!({}));
    let ended = run(&scene);
    assert_eq!(ended.code, Some(2));
    let expected = "spec.roles[b].command: got `/workspace/train.py`; expected a program of this machine";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    assert!(!scene.0.join("out").exists());
}
