//! A disk that becomes full while a job runs.

use crate::case::DEADLINE;
use std::process::{Command, Stdio};
use std::time::Duration;
use switchyard_tests::{Manifest, Program, Scene, programs};

/// Runs `script` in `sh`, in the scene; `$0` is the folder of the programs.
fn shell(scene: &Scene, wrapper: &[&str], script: &str) -> switchyard_tests::Ended {
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

#[test]
fn a_full_disk_ends_the_run_with_the_name_of_the_file() {
    let scene = scene();
    let (ended, reason) = match own_mounts() {
        Some(way) => {
            let script = "mkdir small && mount -t tmpfs -o size=64k tmpfs small && exec \"$0/switchyard\" run job.yaml --run-dir small/out";
            (shell(&scene, way, script), "No space left on device")
        }
        // Where nothing can be mounted a limit on the size of files does the same to each single file.
        None => {
            let script = "trap '' XFSZ; ulimit -f 32; exec \"$0/switchyard\" run job.yaml --run-dir out";
            (shell(&scene, &["env"], script), "File too large")
        }
    };
    assert_eq!(ended.code, Some(1), "signal {:?}\n{}", ended.signal, ended.stderr);
    for words in ["error: cannot write", "/out/", reason] {
        assert!(ended.stderr.contains(words), "`{words}` is missing:\n{}", ended.stderr);
    }
    assert!(ended.time < Duration::from_secs(30), "{:?}", ended.time);
    scene.assert_nothing_left();
}
