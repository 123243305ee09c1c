//! A rank that SIGKILL does not end, as when a thread reads from a dead NFS mount: the cause is
//! shown, and `switchyard run` ends.

use super::{TIMEOUT, condition, endless, kill, scene, start, training};
use rustix::process::{Signal, geteuid};
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use switchyard_tests::{Scene, until};

/// A frozen process. Unlike version 2, the version 1 freezer also holds back SIGKILL.
struct Frozen {
    group: PathBuf,
}

impl Frozen {
    fn new(pid: i32) -> Frozen {
        assert!(geteuid().is_root(), "only root can freeze a cgroup: run this test as root");
        let group = PathBuf::from(format!("/sys/fs/cgroup/freezer/switchyard-frozen-{pid}"));
        fs::create_dir(&group).expect("a version 1 freezer at /sys/fs/cgroup/freezer");
        let frozen = Frozen { group };
        frozen.write("cgroup.procs", &pid.to_string());
        frozen.write("freezer.state", "FROZEN");
        until("frozen", TIMEOUT, || Ok(frozen.read("freezer.state").trim() == "FROZEN")).unwrap();
        frozen
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.group.join(file), text).unwrap();
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.group.join(file)).unwrap()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.write("freezer.state", "THAWED");
        until("without its process", TIMEOUT, || Ok(self.read("cgroup.procs").is_empty())).unwrap();
        fs::remove_dir(&self.group).unwrap();
    }
}

/// The words that name a frozen rank.
fn named(rank: u32, pid: i32) -> String {
    format!("warning: SIGKILL has not ended rank {rank} (pid {pid}): thread `")
}

#[test]
fn a_rank_that_sigkill_does_not_end_is_named_and_the_run_ends_without_it() {
    let policy = json!({"maxRestarts": 3});
    let (scene, manifest) = scene(|manifest| endless(manifest).with("failurePolicy", policy));
    let mut running = start(&scene, &manifest, &[]);
    let pid = training(&scene, &mut running, 2)[1];
    let frozen = Frozen::new(pid);
    let ended = running.wait(TIMEOUT);
    assert_eq!(ended.code, Some(5), "{}", ended.stderr);
    for words in
        [named(1, pid).as_str(), "is frozen with its cgroup (state D in ", "error[SY0503]: rank 1 failed first"]
    {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    let status = scene.status("out");
    let message = condition(&status, "Failed")["message"].as_str().unwrap_or_default();
    assert!(message.contains("its processes are still there, so it is not restarted"), "{status}");
    drop(frozen);
    scene.assert_nothing_left();
}

/// Starts a run, freezes rank 0, and sends signals until it ends; returns the scene.
fn stopped_by(signals: &[Signal], code: i32) -> Scene {
    let (scene, manifest) = scene(endless);
    let mut running = start(&scene, &manifest, &[]);
    let pid = training(&scene, &mut running, 2)[0];
    let frozen = Frozen::new(pid);
    let launcher = i32::try_from(running.pid()).unwrap();
    kill(launcher, signals[0]);
    running.wait_for("stopping all processes", TIMEOUT);
    for signal in &signals[1..] {
        kill(launcher, *signal);
        running.wait_for(&named(0, pid), TIMEOUT);
    }
    let ended = running.wait(TIMEOUT);
    assert_eq!(ended.code, Some(code), "{}", ended.stderr);
    assert!(ended.stderr.contains(&named(0, pid)), "{}", ended.stderr);
    drop(frozen);
    scene
}

#[test]
fn stop_signals_end_the_launcher_of_a_rank_that_cannot_die() {
    stopped_by(&[Signal::TERM], 143).assert_nothing_left();
    stopped_by(&[Signal::INT, Signal::INT, Signal::INT], 130).assert_nothing_left();
}
