//! Errors of an attempt's processes.

use super::run_dir::RunDirError;
use std::io;

/// An attempt that could not be followed to its end.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// A process could not be started.
    #[error("cannot start {program} for rank {rank}: {source}")]
    Start { rank: u32, program: String, source: io::Error },
    /// A log or event could not be written.
    #[error("{0}; all ranks were stopped")]
    Log(#[from] RunDirError),
    /// Signal handlers could not be installed.
    #[error("cannot handle signals: {0}")]
    Signals(io::Error),
}
