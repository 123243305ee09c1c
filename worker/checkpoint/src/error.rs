//! What can go wrong with a checkpoint. All of it is a value: a training run can go on without its checkpoint.

use crate::format::Fault;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be written, or must not be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused: no space, no permission, a read-only disk, a file that is not there.
    #[error("{}: cannot {action}: {source}{}", file.display(), needs(*.needed))]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Bytes that the whole file needs, where it was being written.
        needed: Option<u64>,
        /// The answer.
        source: io::Error,
    },
    /// A file is not what it has to be.
    #[error("{}: {fault}", file.display())]
    Refused {
        /// The file or directory.
        file: PathBuf,
        /// What of it.
        fault: Fault,
    },
    /// Bytes have changed since they were written.
    #[error(
        "{}: damaged: chunk {chunk}, bytes {} to {}, has another digest than its manifest says; it holds {}",
        file.display(), bytes.start, bytes.end, tensors.join(", ")
    )]
    Damaged {
        /// The shard.
        file: PathBuf,
        /// Index of the chunk.
        chunk: usize,
        /// Its place in the file.
        bytes: Range<u64>,
        /// The tensors that have a part in it; `the header` for that.
        tensors: Vec<String>,
    },
    /// Its manifest was not written: a rank failed, or is still at it.
    #[error("{}: got no manifest; expected one: the checkpoint was not finished", directory.display())]
    Incomplete {
        /// Its directory.
        directory: PathBuf,
    },
    /// A checkpoint that exists is never written again.
    #[error("{}: got a checkpoint that exists already; expected a new one", directory.display())]
    Exists {
        /// Its directory.
        directory: PathBuf,
    },
    /// This process is left over from an earlier attempt. It must not go on.
    #[error(
        "{}: got attempt {own}; expected at least {newest}, which has written checkpoints since: this process is of an earlier attempt",
        directory.display()
    )]
    Superseded {
        /// Where the checkpoints are.
        directory: PathBuf,
        /// The attempt of this process.
        own: u32,
        /// The newest that has written.
        newest: u32,
    },
}

impl CheckpointError {
    /// What was tried with a file, for `map_err`.
    pub(crate) fn io<'a>(action: &'static str, file: &'a Path) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
        move |source| CheckpointError::Io { file: file.to_path_buf(), action, needed: None, source }
    }

    /// The file of a fault, for `map_err`.
    pub(crate) fn refused<'a>(file: &'a Path) -> impl FnOnce(Fault) -> CheckpointError + 'a {
        move |fault| CheckpointError::Refused { file: file.to_path_buf(), fault }
    }
}

fn needs(bytes: Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| format!("; the file needs {bytes} bytes"))
}
