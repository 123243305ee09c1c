//! Limits of the process: memory and open files.

use super::{TIMEOUT, scene, start};
use rustix::process::geteuid;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use switchyard_tests::{Ended, Program, programs};

/// A cgroup (version 1) with a memory limit; removed when dropped.
struct Limited {
    group: PathBuf,
}

impl Limited {
    fn new(mebibytes: u64) -> Limited {
        assert!(geteuid().is_root(), "only root can create a cgroup: run this test as root");
        let group = PathBuf::from(format!("/sys/fs/cgroup/memory/switchyard-limited-{}", std::process::id()));
        fs::create_dir(&group).expect("a version 1 memory controller at /sys/fs/cgroup/memory");
        let limited = Limited { group };
        fs::write(limited.group.join("memory.limit_in_bytes"), (mebibytes << 20).to_string()).unwrap();
        limited
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        fs::remove_dir(&self.group).unwrap();
    }
}

#[test]
fn a_memory_limit_that_is_too_small_is_refused_with_both_figures() {
    let (scene, manifest) = scene(|manifest| manifest);
    let limited = Limited::new(24);
    let script = format!(
        "echo $$ > {}/cgroup.procs && exec {}/switchyard run {} --run-dir out",
        limited.group.display(),
        programs().display(),
        manifest.display()
    );
    let ended = Program::new("sh".as_ref(), scene.path(), ["-c", &script]).run(TIMEOUT);
    assert_eq!((ended.code, ended.signal), (Some(8), None), "{}", ended.stderr);
    for words in ["not placeable: a rank needs ", " MiB of memory (", " MiB for activations), and may take "] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    scene.assert_nothing_left();
}

/// Runs twelve ranks whose worker first runs `limit` in a shell.
fn run_with(limit: &str) -> Ended {
    let (scene, manifest) = scene(|manifest| manifest.with("trainer.numProcPerNode", 12));
    let worker = scene.join("worker");
    let script = format!("#!/bin/sh\n{limit}\nexec {}/switchyard-worker \"$@\"\n", programs().display());
    fs::write(&worker, script).unwrap();
    fs::set_permissions(&worker, fs::Permissions::from_mode(0o755)).unwrap();
    let ended = start(&scene, &manifest, &["--worker", worker.to_str().unwrap()]).wait(TIMEOUT);
    scene.assert_nothing_left();
    ended
}

#[test]
fn too_few_open_files_are_named_with_the_limit() {
    let ended = run_with("ulimit -n 14");
    assert_eq!(ended.code, Some(5), "{}", ended.stderr);
    for words in ["(os error 24)", "the limit of this process is 14 (`ulimit -Hn`"] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
}

#[test]
fn a_low_soft_limit_of_open_files_is_raised() {
    let ended = run_with("ulimit -S -n 14");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}
