//! The queue in its order, which changes with time: jobs that wait become late, and namespaces get their shares. The rules are those of
//! `plan::cluster::turn` and of `fairness`; this applies them to the index.

use super::Index;
use crate::job::{Key, is_live, placement_of};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeSet;
use switchyard_plan::cluster::turn::Turn;
use switchyard_plan::cluster::waiting_period;

impl Index {
    /// Jobs to look at, in the order in which they are to be: those that do not wait for room first, then in the order of the queue. Whoever is
    /// looked at first takes what is free.
    pub fn in_order(&self, jobs: BTreeSet<Key>) -> Vec<Key> {
        let mut jobs: Vec<Key> = jobs.into_iter().collect();
        jobs.sort_by_key(|key| self.waiting.get(key).map(|waiting| &waiting.turn));
        jobs
    }

    /// All jobs, as whoever begins to lead looks at them: those that have a place or want none, and then those that may wait, in the order of a queue
    /// that is not known yet. Else a job far behind would take what the first one held.
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

    /// Puts the queue in its order of now, as seldom as forecasts are made. Returns the job that is the head of the queue by that, if it was not
    /// before.
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
