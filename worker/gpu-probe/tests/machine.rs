//! Runs the whole program on the test machine, which usually has no GPU.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{part, parts, probe, results};

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

/// Checks the guaranteed structure of results.
fn check_schema(results: &[Value]) -> Result<(), String> {
    let names: Vec<&str> = results.iter().filter_map(|part| part["part"].as_str()).collect();
    if names != parts() {
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
fn every_part_has_an_outcome_and_a_missing_gpu_is_not_an_error() {
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
        eprintln!("skipping: this machine has a driver");
        return;
    }
    assert!(shown.contains("No GPU on this machine"), "{shown}");
    for part in &results {
        assert!(part["status"] == "Absent" || part["status"] == "Ok", "{part}");
    }
    for name in
        ["rates", "streams", "training-gpt", "resume", "steps-bert", "products", "memcheck", "attention", "all-reduce"]
    {
        assert!(part(&results, name)["reason"].as_str().unwrap().starts_with("no GPU"), "{}", part(&results, name));
    }
}

#[test]
fn a_broken_library_is_reported_and_the_other_parts_run() {
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
        eprintln!("skipping: the loader or the toolkit provides cuDNN: {cudnn}");
        return;
    }
    assert_eq!((&cudnn["status"], &cudnn["call"]), (&"Failed".into(), &"dlopen".into()));
    assert!(cudnn["text"].as_str().unwrap().contains("file too short"), "{cudnn}");
    assert_ne!(part(&results, "cublaslt")["status"], "Failed");
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("\nfailed: cudnn: dlopen: "), "{shown}");
}

#[test]
fn existing_results_are_kept_unless_requested_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let output = probe(folder.path()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        results(folder.path()).iter().map(|part| part["part"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(run(&["--only", "machine", "--only", "nvrtc"]), ["machine", "nvrtc"]);
    assert_eq!(run(&["--only", "nvrtc"]), ["machine", "nvrtc", "nvrtc"]);
    assert_eq!(run(&["--from", "memory"]), ["machine", "nvrtc", "nvrtc", "memory"]);
    let all = run(&[]);
    assert_eq!(all.len(), parts().len() + 1);
    assert_eq!(run(&[]), all);
}

#[test]
fn unknown_parts_and_unwritable_results_are_errors() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let below = file.path().join("results");
    let output = probe(&below).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains(below.to_str().unwrap()));
    let output = probe(&below).args(["--only", "weather"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("training-gpt"));
}

#[test]
fn malformed_results_are_detected() {
    let ok = |name: &String| {
        serde_json::json!({
            "part": name, "asks": "x", "seconds": 0.1, "rehearsal": false, "status": "Ok", "figures": {},
        })
    };
    let good: Vec<Value> = parts().iter().map(ok).collect();
    check_schema(&good).unwrap();
    assert!(check_schema(&good[1..]).is_err());
    let mut bad = good.clone();
    bad[3]["status"] = "Failed".into();
    assert!(check_schema(&bad).is_err());
}
