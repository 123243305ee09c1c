//! One run on several machines: each has its own launcher, here on different loopback names.

use super::{TIMEOUT, condition, endless, kill, pids, scene, training};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use switchyard_tests::{Ended, Manifest, Running, Scene, until};

/// Writes a key with a mode.
fn write_key(scene: &Scene, name: &str, bytes: &[u8], mode: u32) {
    let path = scene.join(name);
    std::fs::write(&path, bytes).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A port that is free now, and outside the range from which the kernel takes ports for others.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 8_000) as u16;
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    (0..1000).map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed)).find(is_free).unwrap()
}

fn on_two_nodes(manifest: Manifest) -> Manifest {
    manifest.with("trainer.numNodes", 2).with("trainer.numProcPerNode", 1)
}

/// Starts a machine's part of the run.
fn start(scene: &Scene, manifest: &Path, port: u16, node_rank: usize, key: &str) -> Running {
    let (hosts, rank) = (format!("127.0.0.1:{port},localhost"), node_rank.to_string());
    let run_dir = ["out", "second"][node_rank];
    let manifest = manifest.to_str().unwrap();
    let arguments = ["run", manifest, "--run-dir", run_dir, "--hosts", &hosts, "--node-rank", &rank, "--key-file", key];
    scene.switchyard(arguments).start()
}

/// Digests of the weights at the end, by the ranks that a launcher started.
fn digests(scene: &Scene, run_dir: &str) -> Vec<(u64, String)> {
    let events = std::fs::read_to_string(scene.join(run_dir).join("events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let finished = events.filter(|event| event["event"]["event"] == "finished");
    finished
        .map(|event| (event["rank"].as_u64().unwrap(), event["event"]["weightsDigest"].as_str().unwrap().to_owned()))
        .collect()
}

#[test]
fn two_machines_train_the_model_of_one() {
    let (alone, manifest) = scene(|manifest| manifest);
    assert_eq!(super::run(&alone, &manifest, &[]).code, Some(0));
    let whole = digests(&alone, "out")[0].1.clone();

    let (scene, manifest) = scene(on_two_nodes);
    write_key(&scene, "key", &[7; 32], 0o600);
    let port = port();
    let machines = [0, 1].map(|rank| start(&scene, &manifest, port, rank, "key"));
    let ended = machines.map(|machine| machine.wait(TIMEOUT));
    assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(0); 2], "{ended:?}");
    assert_eq!(digests(&scene, "out"), [(0, whole.clone())]);
    assert_eq!(digests(&scene, "second"), [(1, whole)]);
    for (run_dir, ended) in ["out", "second"].into_iter().zip(&ended) {
        assert!(ended.stderr.contains("step=30/30"), "{}", ended.stderr);
        assert_eq!(condition(&scene.status(run_dir), "Complete")["status"], "True");
        let is_trained = scene.entries().contains(&format!("{run_dir}/model.safetensors"));
        assert_eq!(is_trained, run_dir == "out", "rank 0 writes the model");
    }
    scene.assert_nothing_left();
}

#[test]
fn a_failure_restarts_the_run_on_all_machines_and_a_stop_ends_it_there() {
    let (scene, manifest) = scene(|manifest| {
        on_two_nodes(endless(manifest))
            .with("failurePolicy", json!({"maxRestarts": 1}))
            .with("checkpoint", json!({"path": "saved", "everySteps": 5, "periodSeconds": 0}))
    });
    write_key(&scene, "key", &[7; 32], 0o600);
    let port = port();
    let [mut first, mut second] = [0, 1].map(|rank| start(&scene, &manifest, port, rank, "key"));
    training(&scene, &mut first, 1);
    second.wait_for("step=", TIMEOUT);
    let events = std::fs::read_to_string(scene.join("second/events.jsonl")).unwrap();
    let ready = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let pid = ready.map(|event| event["event"]["pid"].clone()).find_map(|pid| pid.as_i64()).unwrap();
    kill(pid as i32, Signal::KILL);
    for machine in [&mut first, &mut second] {
        machine.wait_for("restart 1 of 1: attempt 2", TIMEOUT);
    }
    until("training again", TIMEOUT, || Ok(pids(&scene, 2).len() == 1)).unwrap();
    second.signal(Signal::TERM);
    let [first, second] = [first, second].map(|machine| machine.wait(TIMEOUT));
    assert_eq!((first.code, second.code), (Some(143), Some(143)), "{}\n{}", first.stderr, second.stderr);
    assert!(first.stderr.contains("rank 1, on another machine, attempt 1"), "{}", first.stderr);
    assert!(second.stderr.contains(&format!("rank 1, pid {pid}, attempt 1")), "{}", second.stderr);
    assert_eq!(condition(&scene.status("out"), "Failed"), &Value::Null);
    scene.assert_nothing_left();
}

#[test]
fn a_machine_with_another_key_is_refused() {
    let (scene, manifest) = scene(|manifest| {
        on_two_nodes(manifest)
            .with("failurePolicy", json!({"maxRestarts": 0}))
            .with("trainer.env", json!([{"name": "SWITCHYARD_CONNECT_TIMEOUT_SECONDS", "value": "5"}]))
    });
    write_key(&scene, "key", &[7; 32], 0o600);
    write_key(&scene, "other", &[8; 32], 0o600);
    let port = port();
    let machines = [(0, "key"), (1, "other")].map(|(rank, key)| start(&scene, &manifest, port, rank, key));
    let ended = machines.map(|machine| machine.wait(TIMEOUT));
    assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(5); 2], "{ended:?}");
    assert!(ended[0].stderr.contains("1 of 2 ranks did not arrive within 5 s: rank 1"), "{}", ended[0].stderr);
    assert!(ended[1].stderr.contains("both sides must have the same job token"), "{}", ended[1].stderr);
    scene.assert_nothing_left();
}

#[test]
fn invalid_machines_are_refused_before_the_start() {
    let (scene, manifest) = scene(on_two_nodes);
    for (name, bytes, mode) in [("key", 32, 0o600), ("short", 31, 0o600), ("long", 40, 0o600), ("open", 32, 0o644)] {
        write_key(&scene, name, &vec![7; bytes], mode);
    }
    let refused = |hosts: &str, node_rank: &str, key: &str| -> Ended {
        let manifest = manifest.to_str().unwrap();
        let arguments = ["run", manifest, "--hosts", hosts, "--node-rank", node_rank, "--key-file", key];
        let ended = scene.switchyard(arguments).start().wait(TIMEOUT);
        assert_eq!(ended.code, Some(2), "{hosts} {node_rank} {key}: {}", ended.stderr);
        ended
    };
    for (hosts, node_rank, key, words) in [
        ("a", "0", "key", "--hosts: got 1; expected 2, one for each node of spec.trainer.numNodes"),
        ("a,a", "0", "key", "--hosts: got a twice; expected each machine once"),
        ("a,b", "2", "key", "--node-rank: got 2; expected a number below 2"),
        ("a:0,b", "0", "key", "--hosts: got \"a:0\"; expected a port from 1 to 65535 after the colon"),
        ("a,b:1", "0", "key", "--hosts: got \"b:1\"; expected no port: only the first machine has one"),
        ("a,::1", "0", "key", "--hosts: got \"::1\"; expected a name or an address, an IPv6 one in brackets"),
        ("a,b", "0", "short", "--key-file short: got 31 bytes; expected 32"),
        ("a,b", "0", "long", "--key-file long: got more than 32 bytes; expected 32"),
        ("a,b", "0", "open", "--key-file open: got mode 644; expected 600: others must not read it"),
        ("a,b", "0", "none", "--key-file none: No such file or directory"),
        ("localhost,192.0.2.1", "0", "key", "is 127.0.0.1 on this machine, where 192.0.2.1 cannot connect to it"),
    ] {
        let ended = refused(hosts, node_rank, key);
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert_eq!(scene.entries().iter().filter(|entry| entry.starts_with("runs")).count(), 0);
}
