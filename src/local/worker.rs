//! Finds the worker program.

use std::path::{Path, PathBuf};

/// Name of the program in a plan.
const PROGRAM: &str = "switchyard-worker";

/// The worker program on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    pub path: PathBuf,
}

/// There is no worker program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerNotFound {
    /// None of these folders has it.
    #[error("the program {PROGRAM} was not found; looked in {}; build it with `cargo build --release -p switchyard-worker`", .0.join(", "))]
    Nowhere(Vec<String>),
    /// The requested program is not a file.
    #[error("the worker program: got {0}, expected an existing file")]
    Requested(String),
}

impl Worker {
    /// The requested program, which can have custom models; otherwise the one next to the running
    /// program, otherwise the one on the PATH.
    ///
    /// # Errors
    /// The requested program is not a file, or no searched folder has one.
    pub fn find(requested: Option<&Path>) -> Result<Worker, WorkerNotFound> {
        if let Some(requested) = requested {
            // The ranks start in another directory, so the path must be absolute.
            let path = std::path::absolute(requested).ok().filter(|path| path.is_file());
            return path
                .map(|path| Worker { path })
                .ok_or_else(|| WorkerNotFound::Requested(requested.display().to_string()));
        }
        let beside = std::env::current_exe().ok().and_then(|program| program.parent().map(PathBuf::from));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut looked = Vec::new();
        for folder in beside.into_iter().chain(std::env::split_paths(&path)) {
            let candidate = folder.join(PROGRAM);
            if candidate.is_file() {
                return Ok(Worker { path: candidate });
            }
            looked.push(folder.display().to_string());
        }
        Err(WorkerNotFound::Nowhere(looked))
    }
}
