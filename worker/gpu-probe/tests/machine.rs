//! The whole program on the machine that runs the tests; most have no GPU.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

const PARTS: [&str; 14] = [
    "driver",
    "cublaslt",
    "cudnn",
    "nvrtc",
    "nccl",
    "compile",
    "adamw",
    "streams",
    "products",
    "convolutions",
    "attention-nodes",
    "attention",
    "attention-backward",
    "all-reduce",
];

fn probe() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gpu-probe"))
}

fn run(command: &mut Command, file: &Path) -> (Output, Value) {
    let output = command.arg("--json").arg(file).output().unwrap();
    let text = std::fs::read_to_string(file).unwrap();
    (output, serde_json::from_str(&text).unwrap())
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

/// The guaranteed structure of a result file.
fn check_schema(report: &Value) -> Result<(), String> {
    let parts = report["parts"].as_array().ok_or("no list of parts")?;
    let names: Vec<&str> = parts.iter().filter_map(|part| part["part"].as_str()).collect();
    if report["benchmark"] != "gpu-probe" || names != PARTS {
        return Err(format!("parts {names:?}"));
    }
    for part in parts {
        let fits = match part["status"].as_str() {
            Some("Ok") => part["figures"].is_object(),
            Some("Absent") => is_text(&part["reason"]) && part["lookedFor"].is_array(),
            Some("Failed") => is_text(&part["call"]) && part["text"].is_string(),
            _ => false,
        };
        if !fits || !is_text(&part["asks"]) || !part["seconds"].is_number() {
            return Err(part.to_string());
        }
    }
    Ok(())
}

fn part<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["parts"].as_array().unwrap().iter().find(|part| part["part"] == name).unwrap()
}

#[test]
fn every_part_has_an_answer_and_a_machine_without_gpu_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = run(&mut probe(), &folder.path().join("result.json"));
    assert!(output.status.success(), "{output:?}");
    check_schema(&report).unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    for part in report["parts"].as_array().unwrap() {
        assert!(shown.contains(part["asks"].as_str().unwrap()), "{shown}");
    }
    if part(&report, "driver")["status"] != "Absent" {
        eprintln!("a driver is here: what follows is about machines without one");
        return;
    }
    assert!(shown.contains("No GPU on this machine"), "{shown}");
    for part in report["parts"].as_array().unwrap() {
        assert!(part["status"] == "Absent" || part["status"] == "Ok", "{part}");
    }
    for name in ["adamw", "streams", "products", "convolutions", "attention", "attention-backward", "all-reduce"] {
        assert!(part(&report, name)["reason"].as_str().unwrap().starts_with("no GPU"), "{}", part(&report, name));
    }
}

#[test]
fn a_library_that_cannot_be_opened_is_told_and_the_rest_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcudnn.so.9"), "").unwrap();
    let mut command = probe();
    // Only this folder, so that no other copy is used instead.
    command.env_clear().env("SWITCHYARD_CUDA_LIBRARIES", folder.path());
    let (output, report) = run(&mut command, &folder.path().join("result.json"));
    assert!(output.status.success(), "{output:?}");
    check_schema(&report).unwrap();
    let cudnn = part(&report, "cudnn");
    if cudnn["status"] == "Ok" {
        eprintln!("the loader or the toolkit has a cuDNN: {cudnn}");
        return;
    }
    assert_eq!((&cudnn["status"], &cudnn["call"]), (&"Failed".into(), &"dlopen".into()));
    assert!(cudnn["text"].as_str().unwrap().contains("file too short"), "{cudnn}");
    assert_eq!(part(&report, "attention-nodes")["status"], "Failed");
    assert_ne!(part(&report, "cublaslt")["status"], "Failed");
}

#[test]
fn a_file_that_cannot_be_written_is_an_error() {
    let output = probe().args(["--json", "/nowhere/result.json"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("/nowhere/result.json"));
}

#[test]
fn other_shapes_of_a_result_are_noticed() {
    let good: Vec<Value> = PARTS
        .iter()
        .map(|name| serde_json::json!({"part": name, "asks": "x", "seconds": 0.1, "status": "Ok", "figures": {}}))
        .collect();
    let report = |parts: &[Value]| serde_json::json!({"benchmark": "gpu-probe", "parts": parts});
    check_schema(&report(&good)).unwrap();
    assert!(check_schema(&report(&good[1..])).is_err());
    let mut bad = good.clone();
    bad[3]["status"] = "Failed".into();
    assert!(check_schema(&report(&bad)).is_err());
}
