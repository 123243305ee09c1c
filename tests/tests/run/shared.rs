//! Two runs in one checkpoint directory: the second is refused, and takes over once the first is
//! gone.

use super::{Running, TIMEOUT, endless, kill, scene, training};
use rustix::process::Signal;
use serde_json::json;
use std::path::Path;
use switchyard_tests::{Manifest, Scene};

fn start(scene: &Scene, manifest: &Path, run_dir: &str) -> Running {
    scene.switchyard(["run", manifest.to_str().unwrap(), "--run-dir", run_dir]).start()
}

fn saving(manifest: Manifest) -> Manifest {
    manifest.with("checkpoint", json!({"path": "saved", "everySteps": 5, "periodSeconds": 0}))
}

#[test]
fn a_second_run_in_a_checkpoint_directory_is_refused_until_the_first_is_gone() {
    let (scene, manifest) = scene(|manifest| saving(endless(manifest)));
    let mut first = start(&scene, &manifest, "out");
    let owner = training(&scene, &mut first, 2)[0];
    let refused = start(&scene, &manifest, "second").wait(TIMEOUT);
    assert_eq!(refused.code, Some(6), "{}", refused.stderr);
    for words in
        ["saved/.lock: in use by attempt 1 of job `small` (host ", &format!(", pid {owner}, for "), "set another path"]
    {
        assert!(refused.stderr.contains(words), "{words}: {}", refused.stderr);
    }
    assert!(!refused.stderr.contains("is not saved"), "{}", refused.stderr);
    // Killed, so that it leaves its lock.
    kill(i32::try_from(first.pid()).unwrap(), Signal::KILL);
    first.wait(TIMEOUT);
    let short = scene.manifest("short.yaml", &saving(Manifest::small("data")));
    let ended = start(&scene, &short, "third").wait(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!scene.join("saved/.lock").exists(), "the lock is released");
    scene.assert_nothing_left();
}
