//! A disk that becomes full while a job runs.

use crate::case::DEADLINE;
use std::process::{Command, Stdio};
use std::time::Duration;
use switchyard_tests::{Ended, Manifest, Program, Scene, programs};

/// Runs `script` in `sh`, in the scene; `$0` is the folder of the programs.
fn shell(scene: &Scene, wrapper: &[&str], script: &str) -> Ended {
    let programs = programs().display().to_string();
    let words: Vec<&str> = wrapper.iter().copied().chain(["sh", "-c", script, &programs]).collect();
    Program::new(words[0].as_ref(), scene.path(), &words[1..]).run(DEADLINE)
}

/// A job that would write events for a long time.
fn scene() -> Scene {
    let scene = Scene::new();
    scene.write_text("data/text.txt", 32);
    let manifest = Manifest::small("data").with("engine.steps", 1_000_000).with("engine.fetchEverySteps", 1);
    scene.manifest("job.yaml", &manifest);
    scene
}

/// In a mount namespace of its own, so that nothing is mounted for anybody else and nothing stays mounted.
fn own_mounts() -> Option<&'static [&'static str]> {
    let ways: [&'static [&'static str]; 2] = [&["unshare", "-m"], &["unshare", "-r", "-m"]];
    ways.into_iter().find(|way| {
        let mut probe = Command::new(way[0]);
        probe
            .args(&way[1..])
            .args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    })
}

fn judge(scene: &Scene, ended: &Ended, reason: &str) {
    assert_eq!(ended.code, Some(1), "signal {:?}\n{}", ended.signal, ended.stderr);
    for words in ["error: cannot write", "/out/", reason, "all ranks were stopped"] {
        assert!(ended.stderr.contains(words), "`{words}` is missing:\n{}", ended.stderr);
    }
    assert!(ended.time < Duration::from_secs(30), "{:?}", ended.time);
    scene.assert_nothing_left();
}

/// Limits every single file, so that the log is the first that cannot grow. Larger than the gradients, which the limit is for too.
const WITH_LIMIT: &str = "trap '' XFSZ; ulimit -f 2048; exec \"$0/switchyard\" run job.yaml --run-dir out";

#[test]
fn a_log_that_cannot_grow_ends_the_run_with_its_name() {
    let scene = scene();
    let ended = shell(&scene, &["env"], WITH_LIMIT);
    judge(&scene, &ended, "events.jsonl: File too large");
    assert_eq!(scene.status("out")["conditions"][0]["type"], "Succeeded", "the status is still written");
}

#[test]
fn a_full_disk_ends_the_run_with_the_name_of_the_file() {
    let scene = scene();
    let Some(way) = own_mounts() else {
        // Nothing can be mounted here, for example in a container without privileges.
        return judge(&scene, &shell(&scene, &["env"], WITH_LIMIT), "File too large");
    };
    let mount = "mkdir small && mount -t tmpfs -o size=64k tmpfs small";
    let ended = shell(&scene, way, &format!("{mount} && exec \"$0/switchyard\" run job.yaml --run-dir small/out"));
    judge(&scene, &ended, "No space left on device");
}
