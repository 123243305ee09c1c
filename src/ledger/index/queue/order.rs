//! Order of the queue. It changes with time, because queued jobs become late and the shares of
//! namespaces change.

use crate::index::Index;
use crate::job::{JobId, Key, is_live, placement_of};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeSet;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::queue_order::QueuePosition;
use switchyard_plan::cluster::waiting_period;

impl Index {
    pub fn queue_position(&self, job: &TrainJob) -> QueuePosition {
        let position = self.position_without_reservation(job);
        let holds = self.queue.reservation.as_ref().is_some_and(|held| held.job == JobId::of(&job.metadata));
        if holds { position.with_reservation() } else { position }
    }

    /// The position of a job as if it held no reservation.
    pub(super) fn position_without_reservation(&self, job: &TrainJob) -> QueuePosition {
        let state = self.job_states.get(&JobId::of(&job.metadata));
        let priority = state.and_then(|state| state.pods.values().map(|pod| pod.priority).max()).unwrap_or(0);
        let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
        let share = self.queue.fairness.as_ref().map_or(0, |fairness| fairness.share(namespace));
        let level = self.queue.settings.policy.level(job, self.queue.slowdown.at);
        let position = QueuePosition::of(job, priority, share, self.queue.slowdown).at_level(level);
        if self.refusals.is_demoted(namespace, self.queue.slowdown.at) { position.demoted() } else { position }
    }

    /// Sorts jobs to reconcile: first those that are not queued, then in queue order. The order
    /// matters because the first job reconciled takes the free nodes.
    pub fn in_order(&self, jobs: BTreeSet<Key>) -> Vec<Key> {
        let mut jobs: Vec<Key> = jobs.into_iter().collect();
        jobs.sort_by_key(|key| self.queue.entries.get(key).map(|entry| &entry.position));
        jobs
    }

    /// All jobs in the order in which a new leader reconciles them: first those that are placed or
    /// need no placement, then those that may be queued, in queue order. Otherwise a job far behind
    /// would take the nodes that the first one held.
    pub fn all_in_order(&mut self, now: Timestamp) -> Vec<Key> {
        self.reorder(now);
        let from_state = self.job_states.values().filter_map(|state| state.key.as_ref());
        let keys: BTreeSet<&Key> = self.jobs.keys().chain(self.unreadable.keys()).chain(from_state).collect();
        let position = |key: &Key| {
            let job = self.jobs.get(key).filter(|job| is_live(job) && placement_of(job).is_none())?;
            Some(self.queue_position(job))
        };
        let mut keys: Vec<(Option<QueuePosition>, Key)> =
            keys.into_iter().map(|key| (position(key), key.clone())).collect();
        keys.sort();
        keys.into_iter().map(|(_, key)| key).collect()
    }

    /// Updates the order of the queue, at most as often as forecasts are computed. Returns the head
    /// of the queue if it changed.
    pub(crate) fn reorder(&mut self, now: Timestamp) -> Option<Key> {
        let period = waiting_period(self.queue.entries.len());
        if (SignedDuration::ZERO..period).contains(&now.duration_since(self.queue.slowdown.at)) {
            return None;
        }
        let head = self.head();
        self.queue.slowdown.at = now;
        self.refusals.forget(now);
        if let Some(fairness) = &mut self.queue.fairness {
            let running =
                self.jobs.values().map(|job| &**job).filter(|job| is_live(job) && placement_of(job).is_some());
            fairness.recompute(running, now);
        }
        let positions =
            self.queue.entries.keys().filter_map(|key| Some((key.clone(), self.queue_position(self.jobs.get(key)?))));
        let positions: Vec<_> = positions.collect();
        for (key, position) in positions {
            if let Some(entry) = self.queue.entries.get_mut(&key) {
                entry.position = position;
            }
        }
        let holder =
            self.queue.reservation.as_ref().and_then(|held| self.job_of(&held.job)).map(|job| self.queue_position(job));
        if let (Some(held), Some(position)) = (&mut self.queue.reservation, holder) {
            held.position = position;
        }
        self.head().filter(|now| Some(now) != head.as_ref())
    }

    /// The name of the job at this queue position, hidden from readers in other namespaces unless
    /// `names_others` is set.
    pub(super) fn name_for(&self, reader: &TrainJob, position: &QueuePosition) -> String {
        let namespace = position.name().split('/').next();
        if self.queue.settings.names_others || namespace == reader.metadata.namespace.as_deref() {
            position.name().to_string()
        } else {
            "a job of another namespace".to_string()
        }
    }
}
