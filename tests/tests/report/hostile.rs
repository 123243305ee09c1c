//! Run directories with arbitrary content.

use super::{markup, read, report, summarize};
use std::fs;
use switchyard_tests::{Anomaly, Random, Scene, SyntheticRun};

/// Replacement values.
const VALUES: [&str; 14] = [
    "null",
    "-1",
    "1e308",
    "-1e308",
    "NaN",
    "\"x\"",
    "18446744073709551615",
    "1e-300",
    "0",
    "[]",
    "{}",
    "1e9",
    "\"<script>alert(1)</script>&amp;\\u0000\\ud83d\\ude00\"",
    "340282350000000000000000000000000000000",
];

/// Randomly replaces values, and truncates, duplicates and drops lines.
fn spoil(text: &str, random: &Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in text.lines() {
        let mut line = line.to_string();
        match random.below(12) {
            0 => line.truncate((0..=random.below(line.len())).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0)),
            1..=3 => {
                let places: Vec<usize> = line.match_indices("\":").map(|(at, _)| at + 2).collect();
                let at = if places.is_empty() { 0 } else { *random.pick(&places) };
                let end = line[at..].find([',', '}', ']']).map_or(line.len(), |length| at + length);
                let value: &str = random.pick::<&str>(&VALUES);
                line.replace_range(at..end, value);
            }
            4 => line.clear(),
            _ => {}
        }
        bytes.extend(line.as_bytes());
        if random.below(40) > 0 {
            bytes.push(b'\n');
        }
        if random.below(60) == 0 {
            bytes.extend([0xff, 0xfe, 0, b'\n']);
        }
    }
    bytes
}

#[test]
fn any_input_files_give_a_page() {
    for seed in 0..60 {
        let random = Random::new(seed);
        let scene = Scene::new();
        let run = SyntheticRun {
            seed,
            failures: vec![20; random.below(3)],
            ..SyntheticRun::new(1 + random.below(6) as u32, 60, *random.pick(&Anomaly::ALL))
        };
        run.write(&scene.join("run"));
        for entry in scene.entries().into_iter().filter(|entry| scene.join(entry).is_file()) {
            let path = scene.join(&entry);
            match random.below(5) {
                0 => fs::remove_file(&path).unwrap(),
                1 => fs::write(&path, "").unwrap(),
                _ => fs::write(&path, spoil(&fs::read_to_string(&path).unwrap(), &random)).unwrap(),
            }
        }
        if ["plan.yaml", "events.jsonl", "engine.json"].iter().any(|file| scene.join("run").join(file).exists()) {
            read(&scene);
        }
    }
}

#[test]
fn names_are_escaped_and_long_texts_are_truncated() {
    let scene = Scene::new();
    SyntheticRun::new(2, 40, Anomaly::None).write(&scene.join("run"));
    let path = scene.join("run/plan.yaml");
    let long = "x<script>".repeat(1 << 18);
    let plan = fs::read_to_string(&path).unwrap().replace("\"one core per rank", &format!("\"{long}"));
    fs::write(&path, plan.replace("node-0", "<b onclick=x>")).unwrap();
    let (_, page) = read(&scene);
    assert!(page.contains("&lt;b onclick=x&gt;"));
}

#[test]
fn missing_files_are_named_and_progress_events_replace_records() {
    let scene = Scene::new();
    SyntheticRun::new(2, 300, Anomaly::None).write(&scene.join("run"));
    fs::remove_file(scene.join("run/record/rank-1.steps.jsonl")).unwrap();
    fs::remove_file(scene.join("run/inspection.json")).unwrap();
    let (data, page) = read(&scene);
    let gaps = data["gaps"].to_string();
    assert!(
        gaps.contains("no record of the steps of ranks 1") && gaps.contains("there is no inspection.json"),
        "{gaps}"
    );
    assert!(page.contains("Memory: it is not recorded"));
    // A torn last line costs only that line.
    let file = scene.join("run/record/rank-0.steps.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, &text[..text.len() - 30]).unwrap();
    let (data, _) = read(&scene);
    assert!(data["gaps"].to_string().contains("steps of rank 0: 1 lines cannot be read"), "{}", data["gaps"]);
    assert_eq!(data["verdict"]["steps"], 299);
    fs::remove_dir_all(scene.join("run/record")).unwrap();
    let progress = r#"{"time":"2026-11-20T14:00:05Z","attempt":1,"rank":0,"event":{"event":"progress","rank":0,"step":300,"totalSteps":300,"intervalSteps":30,"loss":2.5,"learningRate":0.001,"gradientNorm":1.0,"itemsPerSecond":1000.0,"item":"tokens","stepMs":100.0,"maxStepMs":120.0,"forwardMs":30.0,"backwardMs":50.0,"communicationWaitMs":2.0,"inputWaitMs":9.0,"optimizerMs":5.0}}"#;
    let events = scene.join("run/events.jsonl");
    let before = fs::read_to_string(&events).unwrap();
    fs::write(&events, format!("{progress}\n{before}")).unwrap();
    let (data, _) = read(&scene);
    assert_eq!((&data["verdict"]["stepMs"], &data["advice"][0]["rule"]), (&100.0.into(), &"input-bound".into()));
    assert!(data["gaps"].to_string().contains("means of the intervals of progress events"));
    // Only events are left.
    for entry in ["plan.yaml", "engine.json", "machine.json", "status.yaml"] {
        fs::remove_file(scene.join("run").join(entry)).unwrap();
    }
    fs::write(&events, "").unwrap();
    let (data, page) = read(&scene);
    assert_eq!((&data["verdict"]["result"], &data["stepTime"]), (&"unfinished".into(), &serde_json::Value::Null));
    assert!(page.contains("no step is known"));
}

/// 64 ranks and 240 windows with an anomaly: the largest possible page, except for long texts.
#[test]
fn the_page_for_a_large_job_is_small() {
    let (_, page) =
        summarize(&SyntheticRun { failures: vec![100, 200, 300], ..SyntheticRun::new(64, 480, Anomaly::Straggler) });
    assert!(page.len() < 600 << 10, "{} bytes", page.len());
    assert_eq!(markup::faults(&page), Vec::<String>::new());
    let scene = Scene::new();
    assert_eq!(report(&scene, &[]).code, Some(2));
}
