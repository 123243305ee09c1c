//! Names of checkpoints and their files.

use std::fmt;

/// Name of the manifest in the checkpoint's directory.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";

/// Identifies a checkpoint.
///
/// Ordered by attempt first: attempt 2 may have resumed from step 500 when a process left over from
/// attempt 1 writes step 1500. A checkpoint of attempt 2 at step 1000 is still newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointId {
    /// The attempt that wrote it.
    pub attempt: u32,
    /// Steps done.
    pub step: u64,
}

impl CheckpointId {
    /// Directory name, for example `step-000000500.attempt-2`.
    pub fn directory(self) -> String {
        format!("step-{:09}.attempt-{}", self.step, self.attempt)
    }

    /// Parses a directory name; `None` for any other name.
    pub fn parse(name: &str) -> Option<CheckpointId> {
        let (step, attempt) = name.strip_prefix("step-")?.split_once(".attempt-")?;
        let id = CheckpointId { attempt: attempt.parse().ok()?, step: step.parse().ok()? };
        // Reject aliases: signs, or a different number of zeros.
        (id.directory() == name).then_some(id)
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "of step {}, attempt {}", self.step, self.attempt)
    }
}

/// Name of a rank's shard.
pub(crate) fn shard_file(rank: usize) -> String {
    format!("rank-{rank}.safetensors")
}

/// Name of a file while it is being written.
pub(crate) fn temporary(file: &str) -> String {
    format!("{file}.tmp")
}

/// Whether this crate writes files of this name into a checkpoint's directory.
pub(crate) fn is_ours(name: &str) -> bool {
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let rank = name.strip_prefix("rank-").and_then(|rest| rest.strip_suffix(".safetensors"));
    name == MANIFEST_FILE || rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}
