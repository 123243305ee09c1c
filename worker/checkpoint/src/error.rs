//! Checkpoint errors. All are returned as values: training can continue without its checkpoint.

use crate::disk::is_final;
use crate::format::Fault;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be written, or must not be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system failed: no space, no permission, a read-only disk, a missing file.
    #[error("{}: cannot {action}: {source}{}", file.display(), needs(*.needed))]
    Io {
        file: PathBuf,
        /// The action, as in "cannot ...".
        action: &'static str,
        /// Size of the whole file in bytes, if it was being written.
        needed: Option<u64>,
        source: io::Error,
    },
    /// The content of a file is not as expected.
    #[error("{}: {fault}", file.display())]
    Refused { file: PathBuf, fault: Fault },
    /// Bytes have changed since they were written.
    #[error(
        "{}: damaged: chunk {chunk}, bytes {} to {}, does not have the digest in its manifest; it holds {}",
        file.display(), bytes.start, bytes.end, tensors.join(", ")
    )]
    Damaged {
        file: PathBuf,
        chunk: usize,
        /// Range of the chunk in the file.
        bytes: Range<u64>,
        /// The tensors that the chunk overlaps, and `the header` if it does.
        tensors: Vec<String>,
    },
    /// Damage that another rank has found in its share.
    #[error("{text}")]
    Reported { text: String },
    /// No manifest: a rank failed, or is still writing.
    #[error("{}: got no manifest; expected one: the checkpoint was not finished", directory.display())]
    Incomplete { directory: PathBuf },
    /// Existing checkpoints are never overwritten.
    #[error("{}: got an existing checkpoint; expected a new one", directory.display())]
    Exists { directory: PathBuf },
    /// Another run saves into the same directory.
    #[error("{}: in use by {owner}; wait until it ends, stop it, or set another path", file.display())]
    Locked {
        /// The lock.
        file: PathBuf,
        /// Job, attempt, host and process of the other run.
        owner: String,
    },
    /// This process is left over from an earlier attempt and must stop.
    #[error(
        "{}: got attempt {own}; expected at least {newest}, which has written checkpoints since: this process belongs to an earlier attempt",
        directory.display()
    )]
    Superseded {
        /// Directory of the checkpoints.
        directory: PathBuf,
        /// Attempt of this process.
        own: u32,
        /// Newest attempt that has written a checkpoint.
        newest: u32,
    },
}

impl CheckpointError {
    /// Whether the file system failed, rather than the content: a later read can succeed, so the
    /// checkpoint can be good.
    pub fn is_io(&self) -> bool {
        matches!(self, CheckpointError::Io { source, .. } if !is_final(source))
    }

    /// For `map_err`: adds the action and the file.
    pub(crate) fn io<'a>(action: &'static str, file: &'a Path) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
        move |source| CheckpointError::Io { file: file.to_path_buf(), action, needed: None, source }
    }

    /// For `map_err`: adds the file of a fault.
    pub(crate) fn refused<'a>(file: &'a Path) -> impl FnOnce(Fault) -> CheckpointError + 'a {
        move |fault| CheckpointError::Refused { file: file.to_path_buf(), fault }
    }
}

fn needs(bytes: Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| format!("; the file needs {bytes} bytes"))
}
