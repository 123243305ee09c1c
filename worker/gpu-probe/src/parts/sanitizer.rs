//! Runs NVIDIA's `compute-sanitizer` on a few steps of the worker: memory, races, barriers,
//! uninitialised reads.

use super::Probe;
use crate::jobs::{job, text};
use crate::outcome::Outcome;
use crate::worker::last_lines;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use switchyard_worker_contract::config::{EngineConfig, Gpt, Length, Model};

const PROGRAM: &str = "compute-sanitizer";
/// Exit code if it found an error.
const FOUND: i32 = 99;

/// Runs one of its tools.
pub(super) fn run(probe: &Probe, tool: &str) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let (program, worker) = (program(PROGRAM)?, probe.worker()?);
    let gpt = Gpt { layers: 1, hidden_size: 64, heads: 2, context_length: 40, vocabulary_size: 256, tied_head: true };
    let config = EngineConfig { length: Length::Steps(2), ..job(Model::Gpt(gpt), text()?, 2) };
    let code = FOUND.to_string();
    let arguments = ["--tool", tool, "--error-exitcode", &code, "--print-limit", "10"];
    let prepared = worker.command(tool, &config, 1, Some((&program, &arguments)));
    let output = prepared.and_then(|mut prepared| Ok((prepared.command.output()?, prepared.log)));
    let (output, log) = output.map_err(|error| Outcome::failed(PROGRAM, error.to_string()))?;
    // Its messages are interleaved with the worker's events, which are JSON.
    let messages = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = messages.lines().filter(|line| line.starts_with("=========")).collect();
    if output.status.success() {
        return Ok(json!({"device": device.name, "said": lines.last()}));
    }
    let log = std::fs::read_to_string(log).unwrap_or_default();
    Err(Outcome::Failed {
        call: format!("{PROGRAM} --tool {tool}"),
        code: output.status.code().map(i64::from),
        text: if lines.is_empty() { last_lines(&log) } else { last_lines(&lines.join("\n")) },
        figures: None,
    })
}

/// Finds a program in PATH or in the CUDA toolkit.
pub(super) fn program(name: &str) -> Result<PathBuf, Outcome> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([Path::new("/usr/local/cuda/bin").to_path_buf()]);
    let candidates: Vec<PathBuf> = folders.map(|folder| folder.join(name)).collect();
    candidates.iter().find(|file| file.is_file()).cloned().ok_or_else(|| Outcome::Absent {
        reason: format!("no {name}"),
        looked_for: candidates.iter().map(|file| file.display().to_string()).collect(),
    })
}
