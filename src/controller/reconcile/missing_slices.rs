//! Jobs whose PlacementSlices are missing from the cache: either they arrive later, or they are
//! gone for good.

use super::{Context, Outcome, Pass, RECHECK};
use std::time::Instant;
use switchyard_ledger::job::Key;
use tracing::{debug, warn};

impl Context {
    /// Checks the slices of a job that waits for them; `None` if the job can be planned. It queries
    /// the server, because the watch of jobs may be ahead of the watch of slices.
    pub(super) async fn check_slices(&self, key: &Key) -> Option<Outcome> {
        let missing = self.index().missing_slice(key)?;
        if let Some(slice) = &missing.slice {
            match self.executor.has_slice(&key.namespace, slice, &missing.job.uid).await {
                Ok(true) => {
                    debug!(job = %key, slice, "the slice exists; waiting for the cache");
                    self.queue.add(key.clone(), Instant::now() + RECHECK);
                    return Some(Outcome::Behind);
                }
                Ok(false) => {}
                Err(error) => return Some(self.finish(key, Some(&missing.job), Some(error))),
            }
        }
        let slice = missing.slice.as_deref().unwrap_or("all");
        // Check again, because the slice may have arrived or the job may have changed meanwhile.
        if self.index().missing_slice(key).as_ref() == Some(&missing) {
            warn!(job = %key, slice, "lost the job's placement: its PlacementSlices are missing or belong to another job");
            self.apply_change(Instant::now(), Pass::Required, |index| index.show_without_nodes(key));
        }
        None
    }
}
