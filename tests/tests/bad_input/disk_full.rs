//! The disk fills up while a job runs: its event log and its checkpoints.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use switchyard_tests::{Ended, Manifest, Program, Scene, TIMEOUT, programs};

/// Runs `script` with `sh` in the test folder. `$0` is the folder of the programs.
fn shell(scene: &Scene, wrapper: &[&str], script: &str) -> Ended {
    let programs = programs().display().to_string();
    let words: Vec<&str> = wrapper.iter().copied().chain(["sh", "-c", script, &programs]).collect();
    Program::new(words[0].as_ref(), scene.path(), &words[1..]).run(TIMEOUT)
}

/// A job that writes more events than there is room for.
fn scene() -> Scene {
    let scene = Scene::new();
    scene.write_text("data/text.txt", 32);
    let manifest = Manifest::small("data").with("engine.steps", 600).with("engine.fetchEverySteps", 1);
    scene.manifest("job.yaml", &manifest);
    scene
}

/// Command prefix for a private mount namespace, so that mounts are invisible to other processes
/// and disappear on exit.
fn mount_namespace() -> &'static [&'static str] {
    let wrappers: [&'static [&'static str]; 2] = [&["unshare", "-m"], &["unshare", "-r", "-m"]];
    let wrapper = wrappers.into_iter().find(|wrapper| {
        let mut probe = Command::new(wrapper[0]);
        probe
            .args(&wrapper[1..])
            .args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    wrapper.expect("a small disk needs a mount: run this test as root, or where users have namespaces")
}

/// The run ends with this code, and reports once that it is no longer recorded, and why.
fn check_failure(scene: &Scene, ended: &Ended, code: i32, reason: &str) {
    assert_eq!(ended.code, Some(code), "signal {:?}\n{}", ended.signal, ended.stderr);
    for words in ["warning: cannot write", "/out/", reason] {
        assert!(ended.stderr.contains(words), "`{words}` is missing:\n{}", ended.stderr);
    }
    let reports = ended.stderr.matches("the training continues, but the run directory is incomplete").count();
    assert_eq!(reports, 1, "{}", ended.stderr);
    scene.assert_nothing_left();
}

/// Limits the size of every file, so that the log is the first file that cannot grow. The limit
/// also covers the gradients, so it must exceed their size.
const WITH_LIMIT: &str = "trap '' XFSZ; ulimit -f 512; exec \"$0/switchyard\" run job.yaml --run-dir out";

#[test]
fn a_full_disk_stops_the_log_but_not_the_training() {
    let scene = scene();
    let ended = shell(&scene, &["env"], WITH_LIMIT);
    check_failure(&scene, &ended, 0, "events.jsonl: File too large");
    assert!(scene.join("out/model.safetensors").is_file(), "the model is written");
}

#[test]
fn a_full_run_directory_sends_the_model_elsewhere() {
    let scene = scene();
    let mount = "mkdir small && mount -t tmpfs -o size=64k tmpfs small && export TMPDIR=$PWD";
    let run = "exec \"$0/switchyard\" run job.yaml --run-dir small/out";
    let ended = shell(&scene, mount_namespace(), &format!("{mount} && {run}"));
    check_failure(&scene, &ended, 0, "No space left on device");
    let name = |entry: &&String| entry.starts_with("switchyard-") && entry.ends_with("-model.safetensors");
    let entries = scene.entries();
    let model = entries.iter().find(name).unwrap_or_else(|| panic!("no model in {entries:?}"));
    let shown = scene.join(model).display().to_string();
    assert!(ended.stdout.contains(&shown), "{shown}: {}", ended.stdout);
}

#[test]
fn a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step() {
    let scene = Scene::new();
    scene.write_text("data/text.txt", 32);
    let checkpoint = json!({"path": "small/saved", "everySteps": 5, "periodSeconds": 0});
    scene.manifest("job.yaml", &Manifest::small("data").with("checkpoint", checkpoint));
    let mount = "mkdir small && mount -t tmpfs -o size=64k tmpfs small";
    let ended =
        shell(&scene, mount_namespace(), &format!("{mount} && exec \"$0/switchyard\" run job.yaml --run-dir out"));
    assert_eq!(ended.code, Some(5), "{}", ended.stderr);
    for words in
        ["spec.checkpoint.path: ", "small/saved: got ", " bytes of free space; expected ", " for 2 checkpoints of "]
    {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert!(!ended.stderr.contains("step="), "{}", ended.stderr);
    scene.assert_nothing_left();
}

/// Events of one kind in a run directory.
fn events(scene: &Scene, run_dir: &str, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(scene.join(run_dir).join("events.jsonl")).expect("a run writes its events");
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line is an event"));
    all.map(|mut line| line["event"].take()).filter(|event| event["event"] == kind).collect()
}

/// The file system has room for two checkpoints of 5 steps and part of a third. Then the script
/// frees space and runs the job once more.
const FULL: &str = "mkdir small && mount -t tmpfs -o size=640k tmpfs small \
    && \"$0/switchyard\" run job.yaml --run-dir full && ls small/saved && \"$0/switchyard\" checkpoint verify small/saved \
    && mount -o remount,size=64m small && \"$0/switchyard\" run job.yaml --run-dir roomy";

#[test]
fn a_full_checkpoint_disk_loses_only_checkpoints() {
    let wrapper = mount_namespace();
    let scene = Scene::new();
    scene.write_text("data/text.txt", 32);
    scene.manifest("plain.yaml", &Manifest::small("data"));
    let checkpoint = json!({"path": "small/saved", "everySteps": 5, "periodSeconds": 0});
    scene.manifest("job.yaml", &Manifest::small("data").with("checkpoint", checkpoint));
    let plain = shell(&scene, &["env"], "exec \"$0/switchyard\" run plain.yaml --run-dir plain");
    assert_eq!(plain.code, Some(0), "{}", plain.stderr);
    let ended = shell(&scene, wrapper, FULL);
    assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
    let digest = |run_dir| events(&scene, run_dir, "finished")[0]["weightsDigest"].clone();
    assert_eq!([digest("full"), digest("roomy")], [digest("plain"), digest("plain")]);
    // The ranks that hit a failure report it, each with its own file.
    let mut causes = BTreeSet::new();
    let mut steps = BTreeSet::new();
    for event in events(&scene, "full", "checkpoint") {
        let Some(cause) = event["failure"].as_str() else { continue };
        let step = event["step"].as_u64().expect("a checkpoint has a step");
        steps.insert(step);
        assert!(causes.insert((step, cause.to_owned())), "reported twice: {cause}");
        for words in [&format!("small/saved/step-{step:09}.attempt-1"), "No space left on device", "bytes"] {
            assert!(cause.contains(words), "`{words}` is missing: {cause}");
        }
        let warning = format!("warning: the checkpoint of step {step} is not saved: {cause}");
        assert_eq!(ended.stderr.matches(&warning).count(), 1, "{warning}\n{}", ended.stderr);
    }
    assert_eq!(steps, [15, 20, 25, 30].into(), "{}", ended.stderr);
    // `ls` lists both complete checkpoints, and `verify` confirms each of them.
    assert!(ended.stdout.contains("\nstep-000000005.attempt-1\nstep-000000010.attempt-1\nSTEP "), "{}", ended.stdout);
    assert_eq!(ended.stdout.matches(" verified\n").count(), 2, "{}", ended.stdout);
    let again = events(&scene, "roomy", "ready");
    assert!(again.iter().all(|ready| ready["resumedStep"] == 10), "{again:?}");
    let failed: Vec<Value> = events(&scene, "roomy", "checkpoint");
    assert!(!failed.is_empty() && failed.iter().all(|event| event.get("failure").is_none()), "{failed:?}");
    scene.assert_nothing_left();
}
