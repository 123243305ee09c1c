//! Temporary folder of a control plane. The shared plane of a test binary is a `static` that is
//! never dropped, and a killed process drops nothing, so creating a folder first removes those of
//! processes that have ended.

use anyhow::Result;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const PREFIX: &str = "switchyard-control-plane-";
/// Lock file, held while the process that created the folder is alive.
const LOCK: &str = "in-use";

/// A folder that is removed on drop, or when a later process creates one.
#[derive(Debug)]
pub struct Temporary {
    folder: TempDir,
    _lock: File,
}

impl Temporary {
    /// Creates a folder inside `parent`.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn new(parent: &Path) -> Result<Temporary> {
        remove_stale(parent)?;
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // Lock before the rename, so that an unlocked file with this name always means that its
        // process has ended.
        let unlocked = folder.path().join("starting");
        let lock = File::create(&unlocked)?;
        lock.lock()?;
        fs::rename(unlocked, folder.path().join(LOCK))?;
        Ok(Temporary { folder, _lock: lock })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Keeps the folder permanently.
    pub fn keep(self) -> PathBuf {
        // Folders without a lock file are never cleaned up.
        let _ = fs::remove_file(self.path().join(LOCK));
        self.folder.keep()
    }
}

fn remove_stale(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        if File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok()) {
            // Ignore errors: another process may be removing the same folder.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_processes_are_removed() -> Result<()> {
        let parent = tempfile::tempdir()?;
        let used = Temporary::new(parent.path())?;
        let ended = Temporary::new(parent.path())?;
        // Like the end of a process: the lock is released, but the folder remains.
        let Temporary { folder, _lock: lock } = ended;
        let left = folder.keep();
        drop(lock);
        let kept = Temporary::new(parent.path())?.keep();
        let other = parent.path().join("of-somebody-else");
        fs::create_dir(&other)?;
        File::create(other.join(LOCK))?;
        let third = Temporary::new(parent.path())?;
        assert!(!left.exists());
        assert!(used.path().exists() && third.path().exists() && kept.exists() && other.exists());
        Ok(())
    }
}
