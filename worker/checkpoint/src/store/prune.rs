//! Removes checkpoints that are no longer needed.

use super::{State, Store, StoreEntry};
use crate::error::CheckpointError;
use crate::format::{CheckpointId, MANIFEST_FILE, is_ours};

impl Store<'_> {
    /// Removes all but the newest `keep` (at least one) complete checkpoints of a job, damaged ones
    /// older than these, and unfinished ones older than the newest complete one, which their ranks
    /// must have abandoned because each rank writes in order. Returns the removed IDs. Never
    /// removes anything of another job or a newer attempt, nor a file that this crate did not
    /// write.
    ///
    /// # Errors
    /// A newer attempt exists; the directory cannot be read; a file cannot be removed, in which
    /// case everything after it stays too.
    pub fn prune(&self, job: &str, own_attempt: u32, keep: usize) -> Result<Vec<CheckpointId>, CheckpointError> {
        self.check_attempt(own_attempt)?;
        let found = self.list()?;
        let complete =
            |found: &&StoreEntry| matches!(&found.state, State::Complete(it) if it.manifest().info().job == job);
        let mut kept = found.iter().filter(complete).take(keep.max(1)).map(|found| found.id);
        let Some(newest) = kept.next() else { return Ok(Vec::new()) };
        let oldest = kept.last().unwrap_or(newest);
        let mut removed = Vec::new();
        for StoreEntry { id, state } in &found {
            let goes = match state {
                State::Complete(it) => it.manifest().info().job == job && *id < oldest,
                State::Damaged(_) => *id < oldest && self.may_belong_to(job, *id),
                State::Incomplete => *id < newest && self.may_belong_to(job, *id),
            };
            if goes {
                self.remove(*id)?;
                removed.push(*id);
            }
        }
        Ok(removed)
    }

    /// Removes an unfinished checkpoint to free its space. Rank 0 calls this once all ranks have
    /// abandoned it.
    ///
    /// # Errors
    /// The checkpoint exists, or a file cannot be removed.
    pub fn discard(&self, id: CheckpointId) -> Result<(), CheckpointError> {
        self.check_unpublished(id)?;
        self.remove(id)
    }

    fn may_belong_to(&self, job: &str, id: CheckpointId) -> bool {
        self.job_of_shards(id).is_none_or(|other| other == job)
    }

    fn remove(&self, id: CheckpointId) -> Result<(), CheckpointError> {
        let directory = self.path(id);
        let mut names = self.vfs.list(&directory).map_err(CheckpointError::io("list it", &directory))?;
        names.retain(|name| is_ours(name));
        // The manifest first, and durably, so that the remains count as unfinished rather than
        // damaged.
        names.sort_unstable_by_key(|name| name != MANIFEST_FILE);
        for name in names {
            let file = directory.join(&name);
            self.vfs.remove_file(&file).map_err(CheckpointError::io("remove it", &file))?;
            if name == MANIFEST_FILE {
                super::write::sync_directory(self.vfs, &directory)?;
            }
        }
        self.vfs.remove_directory(&directory).map_err(CheckpointError::io("remove it", &directory))
    }
}
