//! The program under test, and its results.
#![allow(dead_code, reason = "each test program uses a part of it")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// All parts, in the order in which they run.
pub fn parts() -> Vec<String> {
    let help = probe_without_results().arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, list) = help.split_once("[possible values: ").unwrap();
    list.split(']').next().unwrap().split(',').map(|name| name.trim().to_owned()).collect()
}

/// The probe, with results in this folder.
pub fn probe(folder: &Path) -> Command {
    let mut command = probe_without_results();
    command.arg("--out").arg(folder);
    command
}

/// The probe, with the worker of `examples/worker.rs`.
pub fn probe_without_results() -> Command {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_gpu-probe"));
    let mut command = Command::new(&program);
    command.arg("--worker").arg(program.with_file_name("examples").join("worker"));
    command
}

/// Results written so far, in order.
pub fn results(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

pub fn part<'a>(results: &'a [Value], name: &str) -> &'a Value {
    results.iter().find(|result| result["part"] == name).unwrap()
}
