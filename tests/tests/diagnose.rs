//! `switchyard lint` and `switchyard doctor` as users run them: exit codes, streams, text and JSON
//! output, and progress messages of slow commands.

use serde_json::Value;
use switchyard_tests::{Ended, Scene, TIMEOUT, root};

const JOB: &str = "kind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n    - env: [{name: NAME, value: \"VALUE\"}]\n";

fn job(name: &str, value: &str) -> String {
    JOB.replace("NAME", name).replace("VALUE", value)
}

/// No command may panic or print colour codes to a pipe.
fn run(scene: &Scene, line: &str) -> Ended {
    let ended = scene.switchyard(line.split(' ')).run(TIMEOUT);
    for text in [&ended.stdout, &ended.stderr] {
        assert!(!text.contains('\u{1b}') && !text.contains("panicked"), "{line}: {text}");
    }
    ended
}

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

#[test]
fn lint_exits_by_the_most_severe_finding() {
    let scene = Scene::new();
    scene.write("good.yaml", job("NCCL_DEBUG", "WARN"));
    scene.write("warning.yaml", job("NCCL_IB_HCA", "mlx5_1"));
    scene.write("error.yaml", job("NCCL_NTHREADS", "many"));
    for (line, code, expected) in [
        ("lint good.yaml", 0, "nothing found in 1 object of 1 file"),
        ("lint warning.yaml", 0, "warning[prefix-match]: NCCL_IB_HCA=mlx5_1"),
        ("lint good.yaml error.yaml", 1, "error[value]: NCCL_NTHREADS=many"),
        ("lint good.yaml error.yaml", 1, "--> error.yaml:5:"),
        ("lint --nccl 2.18 warning.yaml", 0, "1 warning in 1 object of 1 file"),
    ] {
        let ended = run(&scene, line);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(code), ""), "{line}");
        assert!(ended.stdout.contains(expected), "{line}: {}", ended.stdout);
    }
    let ended = run(&scene, "lint -o json error.yaml warning.yaml");
    let report = json(&ended);
    assert_eq!(
        (report["kind"].as_str(), report["apiVersion"].as_str()),
        (Some("LintReport"), Some("cli.switchyard.dev/v1"))
    );
    assert_eq!((&report["errors"], &report["warnings"], ended.code), (&1.into(), &1.into(), Some(1)));
    let first = &report["findings"][0];
    assert_eq!(
        (&first["file"], &first["line"], &first["field"]),
        (&"error.yaml".into(), &5.into(), &"spec.containers[0].env[0].value".into())
    );
}

#[test]
fn lint_refuses_what_it_cannot_read() {
    let scene = Scene::new();
    scene.write("broken.yaml", "a: [1,\nb: {");
    scene.write("service.yaml", "kind: Service\nspec: {}\n");
    scene.write("bytes.yaml", [0xff, 0xfe, 0x00]);
    for (line, expected) in [
        ("lint", "required"),
        ("lint gone.yaml", "cannot read gone.yaml"),
        ("lint .", "got a directory"),
        ("lint broken.yaml", "error[SY0001]: broken.yaml is not valid YAML"),
        ("lint service.yaml", "error[SY0002]: service.yaml: got nothing that starts pods"),
        ("lint bytes.yaml", "not UTF-8"),
        ("lint --nccl two service.yaml", "expected a version of NCCL"),
        ("doctor", "required"),
        ("doctor gone", "cannot read gone"),
    ] {
        let ended = run(&scene, line);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{line}: {}", ended.stderr);
        assert!(ended.stderr.contains(expected), "{line}: {}", ended.stderr);
    }
}

#[test]
fn the_example_with_mistakes_has_them() {
    let scene = Scene::new();
    let example = root().join("examples/other/pytorchjob-with-mistakes.yaml");
    let ended = run(&scene, &format!("lint {}", example.display()));
    assert_eq!(ended.code, Some(1));
    for rule in ["process-count", "launcher-owned", "interface", "prefix-match", "unknown-key", "visible-devices"] {
        assert!(ended.stdout.contains(&format!("[{rule}]")), "{rule}: {}", ended.stdout);
    }
}

#[test]
fn doctor_finds_the_first_error_in_a_folder() {
    let scene = Scene::new();
    for rank in [0, 1, 3] {
        let noise = "2026-11-20T14:00:01Z step=1\n".repeat(500);
        let loud = format!("{noise}2026-11-20T14:07:3{}Z ncclRemoteError: x\n", rank + 1);
        scene.write(&format!("run/logs/attempt-1/rank-{rank}.log"), loud);
    }
    let mut quiet = b"2026-11-20T14:07:30Z \xff\xfe\n".to_vec();
    quiet.extend_from_slice(b"NVRM: Xid (PCI:0000:ab:00): 79, pid=1, GPU has fallen off the bus.\n");
    scene.write("run/logs/attempt-1/rank-2.log", &quiet);
    scene.write("run/model.safetensors", b"CUDA out of memory");
    let ended = run(&scene, "doctor run");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for expected in [
        "first error of attempt 1: gpu-lost on rank 2",
        "rank-2.log:2",
        "nccl-remote-error on ranks 0-1, 3, 1.0s later",
        "4 logs",
    ] {
        assert!(ended.stdout.contains(expected), "{expected}: {}", ended.stdout);
    }
    let diagnosis = json(&run(&scene, "doctor -o json run"));
    assert_eq!((&diagnosis["kind"], &diagnosis["attempts"][0]["first"]["rank"]), (&"Diagnosis".into(), &2.into()));
    assert_eq!((&diagnosis["read"]["notUtf8"], &diagnosis["read"]["lines"]), (&1.into(), &1505.into()));
    scene.write("fine.log", "step=1\n");
    let fine = run(&scene, "doctor fine.log");
    assert!(fine.code == Some(0) && fine.stdout.contains("no known error"), "{}", fine.stdout);
}

/// Regression: with a server that accepts connections and never replies, `status` was silent for 8
/// s.
#[test]
fn status_names_the_server_it_waits_for() {
    let scene = Scene::new();
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", server.local_addr().unwrap());
    let cluster = serde_json::json!({"name": "away", "cluster": {"server": address}});
    let context =
        serde_json::json!({"name": "away", "context": {"cluster": "away", "user": "away", "namespace": "team"}});
    let config = serde_json::json!({"apiVersion": "v1", "kind": "Config", "current-context": "away", "clusters": [cluster],
        "contexts": [context], "users": [{"name": "away", "user": {}}]});
    scene.write("config", config.to_string());
    for line in ["status a --kubeconfig config", "status --kubeconfig config", "explain a --kubeconfig config"] {
        let mut running = scene.switchyard(line.split(' ')).start();
        running.wait_for(&format!("waiting for the API server at {address}"), TIMEOUT);
        running.signal(rustix::process::Signal::KILL);
        running.wait(TIMEOUT);
    }
}
