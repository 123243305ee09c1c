//! Clean-up of deleted jobs.

use super::{Context, Outcome};
use std::time::Instant;
use switchyard_ledger::job::{JobId, Key};
use switchyard_plan::cluster::view::PodView;
use switchyard_plan::cluster::{self, Action};
use tracing::info;

impl Context {
    /// Deletes the pods of a deleted job at once. The garbage collector deletes its other objects.
    pub(super) async fn clean_up(&self, key: &Key) -> Outcome {
        let now = Instant::now();
        let orphans: Vec<(JobId, Vec<Action>)> = {
            let index = self.index();
            let families = index.job_states.iter().filter(|(_, family)| family.key.as_ref() == Some(key));
            families
                .map(|(id, family)| {
                    let pods: Vec<&PodView> =
                        family.pods.values().filter(|pod| !family.writes.was_deleted(&pod.uid, now)).collect();
                    (id.clone(), cluster::delete_pods(&pods))
                })
                .filter(|(_, actions)| !actions.is_empty())
                .collect()
        };
        let mut outcome = Outcome::Quiet;
        for (id, actions) in orphans {
            // Verify it, because the cache of jobs may be older than the cache of pods.
            match self.executor.is_gone(&key.namespace, &key.name, &id.uid).await {
                Ok(true) if self.is_leader() => {}
                Ok(true) => {
                    self.queue.add(key.clone(), Instant::now());
                    return Outcome::Behind;
                }
                Ok(false) => continue,
                Err(error) => return self.finish(key, None, Some(error)),
            }
            info!(job = %key, pods = actions.len(), "the job was deleted; deleting its pods");
            let applied = self.executor.apply(&key.namespace, &id.uid, actions).await;
            let error = self.record_applied(&id, applied);
            outcome = Outcome::Wrote;
            if self.finish(key, None, error) == Outcome::Refused {
                return Outcome::Refused;
            }
        }
        outcome
    }
}
