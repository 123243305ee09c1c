//! Folder of a control plane that nobody gave a folder. The one that a test binary shares lives in a `static`, which is never
//! dropped, and a killed process drops nothing: so each new folder removes those whose process has ended.

use anyhow::Result;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const PREFIX: &str = "switchyard-control-plane-";
/// Locked as long as the process lives that made the folder.
const LOCK: &str = "in-use";

/// Removed on drop, or by the next one.
#[derive(Debug)]
pub struct Temporary {
    folder: TempDir,
    _lock: File,
}

impl Temporary {
    /// A new folder in this one.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(parent: &Path) -> Result<Temporary> {
        remove_ended(parent)?;
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // Locked before it has its name: a lock that can be taken is then always one whose process has ended.
        let nameless = folder.path().join("starting");
        let lock = File::create(&nameless)?;
        lock.lock()?;
        fs::rename(nameless, folder.path().join(LOCK))?;
        Ok(Temporary { folder, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Keeps it for good.
    pub fn keep(self) -> PathBuf {
        // Without a lock the next one lets it be.
        let _ = fs::remove_file(self.path().join(LOCK));
        self.folder.keep()
    }
}

fn remove_ended(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        if File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok()) {
            // Another process may be about to do the same.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_ended_processes_are_removed_and_no_others() -> Result<()> {
        let parent = tempfile::tempdir()?;
        let used = Temporary::new(parent.path())?;
        let ended = Temporary::new(parent.path())?;
        // As at the end of a process: the lock is gone, the folder is not.
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
