//! Jobs whose PlacementSlices the watch has not shown: they come, or they are gone for good.

use super::{Context, Look, Outcome, SECOND};
use std::time::Instant;
use switchyard_ledger::job::Key;
use tracing::{debug, warn};

impl Context {
    /// Finds out what became of the slices of a job that waits for them; `None`: the job can be planned. The watch of jobs may be ahead of that
    /// of slices, so the server is asked before anything follows.
    pub(super) async fn look_for_slices(&self, key: &Key) -> Option<Outcome> {
        let lack = self.index().lack(key)?;
        if let Some(slice) = &lack.slice {
            match self.executor.has_slice(&key.namespace, slice, &lack.job.uid).await {
                Ok(true) => {
                    debug!(job = %key, slice, "the slice is there; the cache does not show it yet");
                    self.queue.add(key.clone(), Instant::now() + SECOND);
                    return Some(Outcome::Behind);
                }
                Ok(false) => {}
                Err(refusal) => return Some(self.ended(key, Some(&lack.job), Some(refusal))),
            }
        }
        let what = lack.slice.as_deref().unwrap_or("all");
        // Meanwhile it may have come, or the job may have changed.
        if self.index().lack(key).as_ref() == Some(&lack) {
            warn!(job = %key, slice = what, "the place of the job is not known any more: its PlacementSlices are gone, or are not its own");
            self.take_in(Instant::now(), Look::InAnyCase, |index| index.show_without_nodes(key));
        }
        None
    }
}
