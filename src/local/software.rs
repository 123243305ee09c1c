//! Asks the worker what this machine has for training on GPUs.

use super::worker::Worker;
use std::process::Command;
use switchyard_worker_contract::software::Software;

/// The worker gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum SoftwareError {
    /// It could not be started.
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: std::io::Error },
    /// It ended without a result that this version can read.
    #[error("{program} gpu ended with {status}: {text}")]
    NoAnswer {
        program: String,
        /// How it ended.
        status: String,
        /// What it printed on standard error, or what is wrong with its answer.
        text: String,
    },
}

/// Runs `switchyard-worker gpu`. What a library of a GPU does to its process, it does not do to this one.
///
/// # Errors
/// The worker cannot be started, or has no answer.
pub fn software(worker: &Worker) -> Result<Software, SoftwareError> {
    let program = worker.path.display().to_string();
    let output = Command::new(&worker.path).arg("gpu").output();
    let output = output.map_err(|source| SoftwareError::Start { program: program.clone(), source })?;
    let no_answer = |text: String| SoftwareError::NoAnswer { program, status: output.status.to_string(), text };
    if !output.status.success() {
        return Err(no_answer(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| no_answer(error.to_string()))
}
