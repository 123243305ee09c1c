//! Reports of synthetic runs: advice, size limits, bad input; and the page in a real browser.

mod browser;
mod hostile;
mod markup;

use serde_json::{Value, json};
use std::path::PathBuf;
use switchyard_tests::{Anomaly, Ended, Scene, SyntheticRun, TIMEOUT, root};

/// Upper bound for the size of a page.
const LARGEST: usize = 2 << 20;

fn report(scene: &Scene, more: &[&str]) -> Ended {
    scene.switchyard([&["report", "run", "-o", "json"], more].concat()).run(TIMEOUT)
}

/// Report data and page of a synthetic run.
fn summarize(run: &SyntheticRun) -> (Value, String) {
    let scene = Scene::new();
    run.write(&scene.join("run"));
    read(&scene)
}

/// Report data and page of the run directory in a test folder. Checks the invariants of every
/// report.
fn read(scene: &Scene) -> (Value, String) {
    let ended = report(scene, &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let data: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&data["apiVersion"], &data["kind"]), (&"cli.switchyard.dev/v1".into(), &"Report".into()));
    let page = std::fs::read_to_string(scene.join("run/report.html")).unwrap();
    assert!(page.len() < LARGEST, "{} bytes", page.len());
    assert_eq!(markup::faults(&page), Vec::<String>::new());
    (data, page)
}

fn rules(report: &Value) -> Vec<&str> {
    report["advice"].as_array().unwrap().iter().map(|item| item["rule"].as_str().unwrap()).collect()
}

fn failed_once() -> SyntheticRun {
    SyntheticRun { failures: vec![400], ..SyntheticRun::new(8, 800, Anomaly::Straggler) }
}

#[test]
fn each_anomaly_is_named_first_and_a_healthy_run_gets_no_advice() {
    let cases = [
        (Anomaly::None, None),
        (Anomaly::Input, Some("input-bound")),
        (Anomaly::Communication, Some("one-big-all-reduce")),
        (Anomaly::Straggler, Some("straggler")),
        (Anomaly::Overflow, Some("overflow-skips")),
        (Anomaly::Gpu, Some("gpu-errors")),
    ];
    for (anomaly, expected) in cases {
        for ranks in [2, 16] {
            let (report, page) = summarize(&SyntheticRun::new(ranks, 500, anomaly));
            let found = rules(&report);
            assert_eq!(found.first().copied(), expected, "{anomaly:?} with {ranks} ranks: {found:?}");
            assert_eq!(report["verdict"]["result"], "complete");
            assert!(!page.contains("hidden-by-the-report"), "a secret of the manifest or the environment");
        }
    }
}

#[test]
fn gpu_errors_are_shown() {
    let (report, page) = summarize(&SyntheticRun::new(4, 100, Anomaly::Gpu));
    let advice = &report["advice"][0];
    let evidence = "The driver reported errors. GPU 0000:03:00.0 of rank 3: XID 63 (row remapping event).";
    assert_eq!((&advice["evidence"], &advice["urgent"]), (&evidence.into(), &true.into()));
    let note = &report["notes"].as_array().unwrap().iter().find(|note| note["rule"] == "gpu-clocks").unwrap()["text"];
    assert!(
        note.as_str().unwrap().contains("GPU 0000:00:00.0 of rank 0: by its power limit for 40 % of the time"),
        "{note}"
    );
    let gpus = report["placement"]["gpus"].as_array().unwrap();
    assert_eq!(
        (gpus.len(), &gpus[3]["xids"], &gpus[3]["pcieLanes"]),
        (4, &serde_json::json!([63]), &serde_json::json!([16, 16]))
    );
    assert!(page.contains("its power limit 40 %") && page.contains("16 of 16"));
}

#[test]
fn single_ranks_and_many_ranks_are_shown() {
    let (report, page) = summarize(&SyntheticRun::new(1, 100, Anomaly::None));
    assert_eq!((&report["skew"], &report["allReduce"]), (&Value::Null, &Value::Null));
    for (anchor, reason) in [("skew", "one rank has no other to compare with"), ("kernels", "no kernel was timed")] {
        assert!(!page.contains(&format!("<section id=\"{anchor}\"")) && page.contains(reason), "{anchor}");
    }
    assert!(page.contains("Bigram entropy is the lowest loss of a model"), "a word that is not explained");
    let (report, _) = summarize(&SyntheticRun::new(72, 60, Anomaly::Straggler));
    assert_eq!((&report["skew"]["by"], report["skew"]["rows"].as_array().unwrap().len()), (&"node".into(), 9));
    assert_eq!(rules(&report), ["straggler"]);
}

#[test]
fn gpu_kernels_are_shown_and_compared_with_a_device_file() {
    let scene = Scene::new();
    SyntheticRun::new(2, 100, Anomaly::None).write(&scene.join("run"));
    let kernel = |part: &str, name: &str, cost: Value| json!({"part": part, "name": name, "launches": 4, "cost": cost, "half": true, "aligned": true, "seconds": 0.004});
    let times = json!({
        "attempt": 1, "steps": 2, "gpu": "A GPU", "tf32": false,
        "kernels": [
            kernel("forward", "product", json!({"bytes": 1e6, "flops": 7.8e10, "neededFlops": 7.8e10, "arithmetic": "bf16"})),
            kernel("update", "optimizer_step", json!({"bytes": 4.3e9, "flops": 0.0, "neededFlops": 0.0, "arithmetic": "scalar"})),
        ],
        "gaps": {"count": 2, "seconds": 0.001, "longestSeconds": 0.0005}, "copies": {"count": 2, "bytes": 4096, "seconds": 0.0001},
    });
    let file = scene.join("run/record/rank-0.kernels.json");
    std::fs::write(&file, times.to_string()).unwrap();
    let (data, page) = read(&scene);
    assert_eq!((&data["kernels"]["gpu"], &data["kernels"]["kernelMs"]), (&"A GPU".into(), &4.0.into()));
    assert_eq!((&data["kernels"]["floorMs"], &data["kernels"]["utilizationPercent"]), (&Value::Null, &Value::Null));
    assert!(page.contains("optimizer_step") && !page.contains("least ms"), "a table without floors");
    let device = root().join("examples/devices/h200.json");
    let ended = report(&scene, &["--device", device.to_str().unwrap()]);
    let data: Value = serde_json::from_str(&ended.stdout).unwrap();
    let rows = data["kernels"]["rows"].as_array().unwrap();
    let floors: Vec<_> = rows.iter().map(|row| (&row["name"], &row["floorMs"], &row["bound"])).collect();
    let expected = [("product", 0.2, "arithmetic"), ("optimizer_step", 2.0, "memory")]
        .map(|(name, ms, bound)| (json!(name), json!(ms), json!(bound)));
    assert!(expected.iter().all(|(name, ms, bound)| floors.contains(&(name, ms, bound))), "{floors:?}");
    assert_eq!(data["kernels"]["device"], "NVIDIA H200");
    let bad = report(&scene, &["--device", file.to_str().unwrap()]);
    assert_eq!(bad.code, Some(2));
    assert!(bad.stderr.contains("rank-0.kernels.json: unknown field `attempt`"), "{}", bad.stderr);
    std::fs::write(&file, "{").unwrap();
    let (data, _) = read(&scene);
    assert_eq!(data["kernels"], Value::Null);
    let gaps = data["gaps"].to_string();
    assert!(gaps.contains("the kernels of rank 0 cannot be read"), "{gaps}");
}

#[test]
fn repeated_steps_are_shown_once() {
    let (report, _) = summarize(&failed_once());
    assert_eq!((&report["verdict"]["attempts"], &report["verdict"]["repeatedSteps"]), (&2.into(), &50.into()));
    assert_eq!(report["loss"]["restarts"][0]["step"], 351);
    let events: Vec<&str> =
        report["events"].as_array().unwrap().iter().map(|event| event["text"].as_str().unwrap()).collect();
    assert!(
        events.contains(&"rank 0: killed by signal 9 (SIGKILL) during all_reduce of bucket 0 (reported by ranks 0-7)"),
        "{events:?}"
    );
}

#[test]
fn the_same_run_gives_the_same_bytes() {
    let run = SyntheticRun { failures: vec![60], ..SyntheticRun::new(2, 70, Anomaly::Straggler) };
    let (first, second) = (summarize(&run), summarize(&run));
    assert!(first == second);
    // One line per section: short, but still comparable by eye.
    let sections: Vec<String> =
        first.0.as_object().unwrap().iter().map(|(name, section)| format!("\"{name}\": {section}")).collect();
    let text = format!("{{\n{}\n}}\n", sections.join(",\n"));
    let golden = root().join("tests/fixtures/report/straggler.json");
    let expected = std::fs::read_to_string(&golden).unwrap_or_default();
    if text != expected {
        let new = output().join("straggler.json");
        std::fs::write(&new, &text).unwrap();
        panic!(
            "{} differs from {}: compare them, and copy the new one if the change is intended",
            new.display(),
            golden.display()
        );
    }
}

#[test]
fn synthetic_data_makes_the_gain_measurable() {
    let scene = Scene::new();
    SyntheticRun::new(2, 300, Anomaly::Input).write(&scene.join("run"));
    SyntheticRun::new(2, 300, Anomaly::None).write(&scene.join("synthetic"));
    let ended = report(&scene, &["--synthetic", "synthetic"]);
    let data: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&data["advice"][0]["rule"], &data["advice"][0]["basis"]), (&"input-bound".into(), &"measured".into()));
    // Compare the same run with itself: it is just as slow with synthetic data, so input is not the
    // bottleneck.
    let ended = report(&scene, &["--synthetic", "run"]);
    let data: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(rules(&data).is_empty() && data["notes"][0]["rule"] == "input-bound", "{}", data["notes"]);
}

#[test]
fn the_text_output_has_verdict_and_advice() {
    let scene = Scene::new();
    SyntheticRun::new(2, 300, Anomaly::Input).write(&scene.join("run"));
    let ended = scene.switchyard(["report", "run", "--out", "page.html"]).run(TIMEOUT);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for expected in [
        "made-up  complete: 300 steps done",
        "report  page.html",
        "advice (by ms saved per step)",
        "  1  ~2",
        "reader.workers: 1 -> 2",
    ] {
        assert!(ended.stdout.contains(expected), "`{expected}` is not in:\n{}", ended.stdout);
    }
    assert!(ended.stdout.lines().all(|line| line.chars().count() <= 100) && !ended.stdout.contains('\u{1b}'));
    assert!(scene.join("page.html").is_file() && !scene.join("run/report.html").exists());
    for (arguments, words) in [
        (["report", "none"], "none: expected the directory of a run"),
        (["report", "."], ".: expected the directory of a run, with plan.yaml or events.jsonl"),
    ] {
        let ended = scene.switchyard(arguments).run(TIMEOUT);
        assert!(ended.code == Some(2) && ended.stderr.contains(words), "{}", ended.stderr);
    }
}

/// Folder for test output that people may want to inspect.
fn output() -> PathBuf {
    let folder = root().join("target/report");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
