//! Queries the worker before anything starts: data, static plan and memory, and how fast a GPU
//! could be.

use super::worker::Worker;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;
use std::process::Stdio;
use switchyard_plan::local::{Engine, LocalPlan, VISIBLE};
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::Inspection;
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::prediction::Prediction;
use switchyard_worker_contract::software::Software;
use tokio::io::AsyncWriteExt;

/// Why the job cannot start.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The worker rejected the configuration.
    #[error("{message}")]
    Refused {
        /// The worker's error message.
        message: String,
        /// Its exit code.
        exit: Exit,
    },
    /// The worker could not be started.
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: io::Error },
    /// The worker ended without a result.
    #[error("{program} ended with {status} and no result: {stderr}")]
    NoResult {
        program: String,
        /// Its exit status.
        status: String,
        /// Its standard error.
        stderr: String,
    },
}

impl InspectError {
    /// The exit code for this error.
    pub fn exit(&self) -> Exit {
        match self {
            InspectError::Refused { exit, .. } => *exit,
            InspectError::Start { .. } | InspectError::NoResult { .. } => Exit::Unexpected,
        }
    }
}

/// Runs `switchyard-worker inspect` with the configuration on standard input and the user's
/// environment for the ranks. Dropping the future kills the worker.
///
/// # Errors
/// The worker rejects the configuration or its data, or cannot be started.
pub async fn inspect(worker: &Worker, plan: &LocalPlan) -> Result<Inspection, InspectError> {
    let mut command = tokio::process::Command::new(&worker.path);
    command.arg("inspect");
    command.envs(plan.processes().take(1).flat_map(|process| &process.env).map(|entry| (&entry.name, &entry.value)));
    // The worker inspects the GPUs of all ranks.
    if !plan.gpus.is_empty() {
        let chosen: Vec<&str> = plan.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        command.env(VISIBLE, chosen.join(","));
    }
    run_with_config(command, worker, &plan.engine, plan.world()).await
}

/// Runs `switchyard-worker predict` in the same way, for the GPU of a device file.
///
/// # Errors
/// The worker rejects the configuration, its data or the device file, or cannot be started.
pub async fn predict(worker: &Worker, engine: &Engine, device: &Path) -> Result<Prediction, InspectError> {
    let mut command = tokio::process::Command::new(&worker.path);
    command.arg("predict").arg("--device").arg(device);
    command.envs(engine.env.iter().map(|(name, value)| (name, value)));
    run_with_config(command, worker, &engine.config, engine.world).await
}

/// Runs `switchyard-worker gpu`, which reports the GPU software of this machine. It runs in a
/// separate process because a GPU library can crash the process that loads it.
///
/// # Errors
/// The worker cannot be started, or returns no result.
pub async fn software(worker: &Worker) -> Result<Software, InspectError> {
    let mut command = tokio::process::Command::new(&worker.path);
    command.arg("gpu");
    run_worker(command, worker, &[]).await
}

/// Runs the worker on a configuration for `world` ranks.
async fn run_with_config<T: DeserializeOwned>(
    mut command: tokio::process::Command,
    worker: &Worker,
    config: &EngineConfig,
    world: u32,
) -> Result<T, InspectError> {
    command.env(env::NUM_NODES, "1").env(env::PROCS_PER_NODE, world.to_string());
    let config = serde_json::to_vec(config).expect("invariant: an engine configuration serialises to JSON");
    run_worker(command, worker, &config).await
}

/// Writes the worker's standard input and parses its output.
async fn run_worker<T: DeserializeOwned>(
    mut command: tokio::process::Command,
    worker: &Worker,
    input: &[u8],
) -> Result<T, InspectError> {
    let program = worker.path.display().to_string();
    let start = |source| InspectError::Start { program: program.clone(), source };
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    if let Some(mut stdin) = child.stdin.take() {
        // Ignore write errors: a worker that exits without reading reports the reason itself.
        let _ = stdin.write_all(input).await;
    }
    let output = child.wait_with_output().await.map_err(start)?;
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_string();
    if output.status.success() {
        return serde_json::from_slice(&output.stdout).map_err(|error| InspectError::NoResult {
            program: program.clone(),
            status: "output that this version cannot read".into(),
            stderr: error.to_string(),
        });
    }
    match output.status.code().and_then(Exit::from_code) {
        Some(exit @ (Exit::Usage | Exit::Data | Exit::OwnFailure | Exit::CheckpointRefused | Exit::NotPlaceable)) => {
            Err(InspectError::Refused { message: stderr.trim_start_matches("error: ").to_string(), exit })
        }
        _ => Err(InspectError::NoResult { program: program.clone(), status: output.status.to_string(), stderr }),
    }
}
