//! Prepares the directory of checkpoints before the first step, on rank 0: locks it against other
//! runs.

use super::TrainError;
use super::disk::CountedDisk;
use std::io;
use std::path::Path;
use switchyard_checkpoint::CheckpointError;
use switchyard_checkpoint::lock::Lock;

/// Locks the directory for an attempt of a job. `None`, with a warning, if nothing can be written
/// there at all: a run that resumes trains on without new checkpoints.
///
/// # Errors
/// Another run saves there, or the file system fails.
pub(super) fn lock(disk: &CountedDisk, directory: &Path, job: &str, attempt: u32) -> Result<Option<Lock>, TrainError> {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let mut is_noted = false;
    let waiting = |text: &str| {
        // The watchdog must not take this wait for a stuck file system.
        disk.count();
        if !std::mem::replace(&mut is_noted, true) {
            eprintln!("note: {text}");
        }
    };
    match Lock::acquire(directory, job, attempt, waiting) {
        Ok(lock) => Ok(Some(lock)),
        Err(error @ CheckpointError::Locked { .. }) => Err(TrainError::Directory(error.to_string())),
        Err(CheckpointError::Io { source, .. })
            if matches!(source.kind(), QuotaExceeded | ReadOnlyFilesystem | StorageFull) =>
        {
            eprintln!("warning: spec.checkpoint.path: {}: cannot lock it: {source}", directory.display());
            Ok(None)
        }
        Err(error) => Err(TrainError::DirectoryIo(error.to_string())),
    }
}
