//! Jobs whose PlacementSlices are missing from the cache: either they arrive later, or they are
//! gone for good.

use super::{Context, Look, Outcome, SECOND};
use std::time::Instant;
use switchyard_ledger::job::Key;
use tracing::{debug, warn};

impl Context {
    /// Checks the slices of a job that waits for them; `None` if the job can be planned. It queries
    /// the server, because the watch of jobs may be ahead of the watch of slices.
    pub(super) async fn look_for_slices(&self, key: &Key) -> Option<Outcome> {
        let missing_slice = self.index().missing_slice(key)?;
        if let Some(slice) = &missing_slice.slice {
            match self.executor.has_slice(&key.namespace, slice, &missing_slice.job.uid).await {
                Ok(true) => {
                    debug!(job = %key, slice, "the slice is there; the cache does not show it yet");
                    self.queue.add(key.clone(), Instant::now() + SECOND);
                    return Some(Outcome::Behind);
                }
                Ok(false) => {}
                Err(refusal) => return Some(self.ended(key, Some(&missing_slice.job), Some(refusal))),
            }
        }
        let what = missing_slice.slice.as_deref().unwrap_or("all");
        // Check again, because the slice may have arrived or the job may have changed meanwhile.
        if self.index().missing_slice(key).as_ref() == Some(&missing_slice) {
            warn!(job = %key, slice = what, "the place of the job is not known any more: its PlacementSlices are gone, or are not its own");
            self.take_in(Instant::now(), Look::InAnyCase, |index| index.show_without_nodes(key));
        }
        None
    }
}
