//! Prepares the directory of checkpoints before the first step. Rank 0 locks it against other runs,
//! and tries whether checkpoints can be written there; the others look for that lock.

use super::TrainError;
use super::disk::CountedDisk;
use crate::comm::{Group, format_ranks};
use crate::retry::retry;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use switchyard_checkpoint::lock::Lock;
use switchyard_checkpoint::{CheckpointError, Store};

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

/// Compares rank 0's lock on all ranks: each writes its part of a checkpoint to the directory, so a
/// host with a directory of its own would fail every save.
///
/// # Errors
/// A rank does not see the lock, or the group failed. The same on all ranks.
pub(super) fn compare(
    group: &mut Group,
    (disk, directory): (&CountedDisk, &Path),
    lock: Option<&Lock>,
) -> Result<(), TrainError> {
    const WHAT: &str = "the directory of checkpoints";
    let text = group.broadcast(WHAT, lock.map_or("", Lock::text).as_bytes())?;
    let text = String::from_utf8_lossy(&text);
    if text.is_empty() {
        return Ok(());
    }
    let look = || {
        disk.count();
        if Lock::is_in(directory, &text) { Ok(()) } else { Err(()) }
    };
    let note = |_: &()| Some(format!("{}: rank 0's lock is not there", directory.display()));
    let is_shared = group.rank() == 0 || retry(note, look).is_ok();
    let report = serde_json::to_vec(&(!is_shared, group.host())).expect("invariant: a name is JSON");
    let reports = group.all_gather(WHAT, &report)?;
    let reports: Vec<(bool, String)> =
        reports.iter().map(|bytes| serde_json::from_slice(bytes).unwrap_or_default()).collect();
    match not_shared(directory, &reports) {
        Some(text) => Err(TrainError::Directory(text)),
        None => Ok(()),
    }
}

/// Names the ranks and hosts that do not see rank 0's lock, from whether each lacks it and its
/// host.
fn not_shared(directory: &Path, reports: &[(bool, String)]) -> Option<String> {
    let (mut ranks, mut hosts) = (Vec::new(), BTreeSet::new());
    for (rank, (_, host)) in (0..).zip(reports).filter(|(_, (lacks, _))| *lacks) {
        ranks.push(rank);
        hosts.insert(host.as_str());
    }
    let zero = reports.first().map_or("", |(_, host)| host.as_str());
    (!ranks.is_empty()).then(|| {
        format!(
            "{}: got another directory on {} ({}) than on rank 0 ({zero}): rank 0's lock is not there; expected one \
             directory on storage that all hosts share",
            directory.display(),
            format_ranks(&ranks),
            hosts.into_iter().collect::<Vec<_>>().join(", ")
        )
    })
}

/// Tries the calls that a checkpoint needs, and whether there is room. A new run needs `bytes` for
/// two checkpoints, because one is complete while the next is written. A run that resumes has the
/// first, so for it problems are only warnings.
///
/// # Errors
/// A new run could not write a single checkpoint.
pub(super) fn probe((disk, directory): (&CountedDisk, &Path), bytes: u64, resumes: bool) -> Result<(), TrainError> {
    let probed = Store::new(disk, directory).probe();
    let copies = if resumes { 1 } else { 2 };
    let is_usable = probed.as_ref().is_ok_and(|available| available.is_none_or(|available| available >= bytes));
    let problem = match probed {
        Err(error) => error.to_string(),
        Ok(available) => match shortage(directory, copies, bytes, available) {
            None => return Ok(()),
            Some(text) => text,
        },
    };
    if !is_usable && !resumes {
        return Err(TrainError::DirectoryIo(problem));
    }
    eprintln!("warning: spec.checkpoint.path: {problem}");
    Ok(())
}

/// Describes missing space; `None` if this many checkpoints fit.
fn shortage(directory: &Path, copies: u64, bytes: u64, available: Option<u64>) -> Option<String> {
    let (needed, available) = (bytes.saturating_mul(copies), available?);
    (available < needed).then(|| {
        format!(
            "{}: got {available} bytes of free space; expected {needed} bytes for {copies} checkpoints of {bytes} bytes",
            directory.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_a_new_run_needs_room_for_two_checkpoints() {
        let at = Path::new("/saved");
        assert_eq!(shortage(at, 2, 10, Some(20)), None);
        assert_eq!(shortage(at, 1, 10, Some(19)), None);
        assert_eq!(shortage(at, 2, 10, None), None, "a file system that reports no size");
        let text = shortage(at, 2, 10, Some(19)).unwrap_or_default();
        assert_eq!(text, "/saved: got 19 bytes of free space; expected 20 bytes for 2 checkpoints of 10 bytes");
    }

    #[test]
    fn a_directory_without_room_ends_a_new_run_and_warns_one_that_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("saved");
        let probe = |bytes, resumes| probe((&CountedDisk::default(), directory.as_path()), bytes, resumes);
        probe(1 << 10, false).unwrap();
        let refused = probe(u64::MAX / 4, false).unwrap_err();
        assert!(matches!(&refused, TrainError::DirectoryIo(text) if text.contains("bytes of free space")), "{refused}");
        probe(u64::MAX / 4, true).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "nothing is left behind");
        // A file in its place: no call succeeds.
        fs::remove_dir(&directory).unwrap();
        fs::write(&directory, "").unwrap();
        assert!(probe(1, false).is_err());
        probe(1, true).unwrap();
    }
}
