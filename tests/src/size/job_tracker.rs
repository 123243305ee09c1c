//! A watch-backed view of TrainJobs, with the times of changes.

use super::LIMIT;
use crate::{Update, follow, stage_of};
use anyhow::{Result, bail};
use kube::{Api, Client, ResourceExt};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;

/// Current state of a job.
#[derive(Debug, Clone, Default)]
pub(super) struct JobState {
    pub stage: String,
    /// Time at which its status first contained a placement.
    pub placed: Option<Instant>,
}

/// Jobs by name.
#[derive(Clone)]
pub(super) struct JobTracker(Arc<Mutex<HashMap<String, JobState>>>);

impl JobTracker {
    /// Watches a namespace until the runtime ends.
    pub fn watch(client: Client, namespace: &str) -> JobTracker {
        let tracker = JobTracker(Arc::default());
        let shared = tracker.clone();
        follow(Api::<TrainJob>::namespaced(client, namespace), move |change| match change {
            Update::Applied(job) => shared.update(job),
            Update::Deleted(job) => drop(shared.with(|jobs| jobs.remove(&job.name_any()))),
        });
        tracker
    }

    fn update(&self, job: &TrainJob) {
        let is_placed = job.status.as_ref().is_some_and(|status| status.placement.is_some());
        let stage = stage_of(job).unwrap_or_default().to_string();
        self.with(|jobs| {
            let state = jobs.entry(job.name_any()).or_default();
            state.stage = stage;
            if is_placed {
                state.placed.get_or_insert_with(Instant::now);
            }
        });
    }

    pub fn with<T>(&self, look: impl FnOnce(&mut HashMap<String, JobState>) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Number of jobs with this name prefix that satisfy a condition.
    pub fn count(&self, prefix: &str, condition: impl Fn(&JobState) -> bool) -> usize {
        self.with(|jobs| jobs.iter().filter(|(name, job)| name.starts_with(prefix) && condition(job)).count())
    }

    /// Waits until at least `count` jobs satisfy a condition.
    pub async fn until(
        &self,
        what: &str,
        prefix: &str,
        count: usize,
        condition: impl Fn(&JobState) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while self.count(prefix, &condition) < count {
            if Instant::now() > deadline {
                let stages = self.with(|jobs| {
                    let mut stages: HashMap<String, usize> = HashMap::new();
                    jobs.values().for_each(|job| *stages.entry(job.stage.clone()).or_default() += 1);
                    stages
                });
                bail!(
                    "{what}: {} of {count} after {} s; stages {stages:?}",
                    self.count(prefix, &condition),
                    LIMIT.as_secs()
                );
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
