//! Finds the worker program.

use std::path::PathBuf;

/// The program a plan names.
const PROGRAM: &str = "switchyard-worker";

/// The worker program on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Its path.
    pub path: PathBuf,
}

/// There is no worker program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the program {PROGRAM} was not found; looked in {}; build it with `cargo build --release -p switchyard-worker`", .looked.join(", "))]
pub struct WorkerNotFound {
    looked: Vec<String>,
}

impl Worker {
    /// Looks beside the running program, then on the PATH.
    ///
    /// # Errors
    /// All places that were looked at.
    pub fn find() -> Result<Worker, WorkerNotFound> {
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
        Err(WorkerNotFound { looked })
    }
}
