//! Order of the queue. It changes with time, because queued jobs become late and the shares of
//! namespaces change. The rules are in `plan::cluster::turn` and `fairness`; this module applies
//! them to the index.

use super::Index;
use crate::job::{Key, is_live, placement_of};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeSet;
use switchyard_plan::cluster::turn::Turn;
use switchyard_plan::cluster::waiting_period;

impl Index {
    /// Sorts jobs to reconcile: first those that are not queued, then in queue order. The order
    /// matters because the first job reconciled takes the free nodes.
    pub fn in_order(&self, jobs: BTreeSet<Key>) -> Vec<Key> {
        let mut jobs: Vec<Key> = jobs.into_iter().collect();
        jobs.sort_by_key(|key| self.waiting.get(key).map(|waiting| &waiting.turn));
        jobs
    }

    /// All jobs in the order in which a new leader reconciles them: first those that are placed or
    /// need no placement, then those that may be queued, in queue order. Otherwise a job far behind
    /// would take the nodes that the first one held.
    pub fn all_in_order(&mut self, now: Timestamp) -> Vec<Key> {
        self.reorder(now);
        let of_families = self.families.values().filter_map(|family| family.key.as_ref());
        let keys: BTreeSet<&Key> = self.jobs.keys().chain(self.unreadable.keys()).chain(of_families).collect();
        let turn = |key: &Key| {
            let job = self.jobs.get(key).filter(|job| is_live(job) && placement_of(job).is_none())?;
            Some(self.turn(job))
        };
        let mut keys: Vec<(Option<Turn>, Key)> = keys.into_iter().map(|key| (turn(key), key.clone())).collect();
        keys.sort();
        keys.into_iter().map(|(_, key)| key).collect()
    }

    /// Updates the order of the queue, at most as often as forecasts are computed. Returns the head
    /// of the queue if it changed.
    pub(crate) fn reorder(&mut self, now: Timestamp) -> Option<Key> {
        let period = waiting_period(self.waiting.len());
        if (SignedDuration::ZERO..period).contains(&now.duration_since(self.lateness.at)) {
            return None;
        }
        let head = self.head();
        self.lateness.at = now;
        self.refusals.forget(now);
        if let Some(fairness) = &mut self.fairness {
            let running =
                self.jobs.values().map(|job| &**job).filter(|job| is_live(job) && placement_of(job).is_some());
            fairness.count(running, now);
        }
        let turns = self.waiting.keys().filter_map(|key| Some((key.clone(), self.turn(self.jobs.get(key)?))));
        let turns: Vec<_> = turns.collect();
        for (key, turn) in turns {
            if let Some(waiting) = self.waiting.get_mut(&key) {
                waiting.turn = turn;
            }
        }
        let holder = self.reservation.as_ref().and_then(|held| self.job_of(&held.job)).map(|job| self.turn(job));
        if let (Some(held), Some(turn)) = (&mut self.reservation, holder) {
            held.turn = turn;
        }
        self.head().filter(|now| Some(now) != head.as_ref())
    }
}
