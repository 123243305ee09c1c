//! Order of the queue. It changes with time, because queued jobs become late and the shares of
//! namespaces change. The rules are in `plan::cluster::queue_order` and `fairness`; this
//! module applies them to the index.

use super::Index;
use crate::job::{Key, is_live, placement_of};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeSet;
use switchyard_plan::cluster::queue_order::QueuePosition;
use switchyard_plan::cluster::waiting_period;

impl Index {
    /// Sorts jobs to reconcile: first those that are not queued, then in queue order. The order
    /// matters because the first job reconciled takes the free nodes.
    pub fn in_order(&self, jobs: BTreeSet<Key>) -> Vec<Key> {
        let mut jobs: Vec<Key> = jobs.into_iter().collect();
        jobs.sort_by_key(|key| self.queue.get(key).map(|entry| &entry.position));
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
        let period = waiting_period(self.queue.len());
        if (SignedDuration::ZERO..period).contains(&now.duration_since(self.slowdown.at)) {
            return None;
        }
        let head = self.head();
        self.slowdown.at = now;
        self.refusals.forget(now);
        if let Some(fairness) = &mut self.fairness {
            let running =
                self.jobs.values().map(|job| &**job).filter(|job| is_live(job) && placement_of(job).is_some());
            fairness.recompute(running, now);
        }
        let positions =
            self.queue.keys().filter_map(|key| Some((key.clone(), self.queue_position(self.jobs.get(key)?))));
        let positions: Vec<_> = positions.collect();
        for (key, position) in positions {
            if let Some(entry) = self.queue.get_mut(&key) {
                entry.position = position;
            }
        }
        let holder =
            self.reservation.as_ref().and_then(|held| self.job_of(&held.job)).map(|job| self.queue_position(job));
        if let (Some(held), Some(position)) = (&mut self.reservation, holder) {
            held.position = position;
        }
        self.head().filter(|now| Some(now) != head.as_ref())
    }
}
