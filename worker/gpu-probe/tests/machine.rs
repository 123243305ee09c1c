//! The whole program on the machine that runs the tests; most have no GPU.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{PARTS, part, probe, results};

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

/// The guaranteed structure of results.
fn check_schema(results: &[Value]) -> Result<(), String> {
    let names: Vec<&str> = results.iter().filter_map(|part| part["part"].as_str()).collect();
    if names != PARTS {
        return Err(format!("parts {names:?}"));
    }
    for part in results {
        let fits = match part["status"].as_str() {
            Some("Ok") => part["figures"].is_object(),
            Some("Absent") => is_text(&part["reason"]) && part["lookedFor"].is_array(),
            Some("Failed") => is_text(&part["call"]) && part["text"].is_string(),
            _ => false,
        };
        if !fits || !is_text(&part["asks"]) || !part["seconds"].is_number() || part["rehearsal"] != false {
            return Err(part.to_string());
        }
    }
    Ok(())
}

#[test]
fn every_part_has_an_answer_and_a_machine_without_gpu_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let output = probe(folder.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let results = results(folder.path());
    check_schema(&results).unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    for part in &results {
        assert!(shown.contains(part["asks"].as_str().unwrap()), "{shown}");
    }
    if part(&results, "driver")["status"] != "Absent" {
        eprintln!("a driver is here: what follows is about machines without one");
        return;
    }
    assert!(shown.contains("No GPU on this machine"), "{shown}");
    for part in &results {
        assert!(part["status"] == "Absent" || part["status"] == "Ok", "{part}");
    }
    for name in
        ["adamw", "streams", "training-gpt", "resume", "steps-bert", "products", "memcheck", "attention", "all-reduce"]
    {
        assert!(part(&results, name)["reason"].as_str().unwrap().starts_with("no GPU"), "{}", part(&results, name));
    }
}

#[test]
fn a_library_that_cannot_be_opened_is_told_and_the_rest_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcudnn.so.9"), "").unwrap();
    let mut command = probe(folder.path());
    // Only this folder, so that no other copy is used instead.
    command.env_clear().env("SWITCHYARD_CUDA_LIBRARIES", folder.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let results = results(folder.path());
    check_schema(&results).unwrap();
    let cudnn = part(&results, "cudnn");
    if cudnn["status"] == "Ok" {
        eprintln!("the loader or the toolkit has a cuDNN: {cudnn}");
        return;
    }
    assert_eq!((&cudnn["status"], &cudnn["call"]), (&"Failed".into(), &"dlopen".into()));
    assert!(cudnn["text"].as_str().unwrap().contains("file too short"), "{cudnn}");
    assert_ne!(part(&results, "cublaslt")["status"], "Failed");
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("\nfailed: cudnn: dlopen: "), "{shown}");
}

#[test]
fn results_that_are_there_are_not_made_again_unless_they_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let output = probe(folder.path()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        results(folder.path()).iter().map(|part| part["part"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(run(&["--only", "machine", "--only", "nvrtc"]), ["machine", "nvrtc"]);
    assert_eq!(run(&["--only", "nvrtc"]), ["machine", "nvrtc", "nvrtc"]);
    assert_eq!(run(&["--from", "convolutions"]), ["machine", "nvrtc", "nvrtc", "convolutions"]);
    let all = run(&[]);
    assert_eq!(all.len(), PARTS.len() + 1);
    assert_eq!(run(&[]), all);
}

#[test]
fn a_part_that_does_not_exist_and_results_that_cannot_be_written_are_errors() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let below = file.path().join("results");
    let output = probe(&below).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains(below.to_str().unwrap()));
    let output = probe(&below).args(["--only", "weather"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("training-gpt"));
}

#[test]
fn other_shapes_of_results_are_noticed() {
    let ok = |name: &&str| {
        serde_json::json!({
            "part": name, "asks": "x", "seconds": 0.1, "rehearsal": false, "status": "Ok", "figures": {},
        })
    };
    let good: Vec<Value> = PARTS.iter().map(ok).collect();
    check_schema(&good).unwrap();
    assert!(check_schema(&good[1..]).is_err());
    let mut bad = good.clone();
    bad[3]["status"] = "Failed".into();
    assert!(check_schema(&bad).is_err());
}
