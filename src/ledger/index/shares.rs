//! The queue in the order of what the namespaces had lately. The rule is that of `fairness`; this applies it to the index.

use super::Index;
use crate::job::{Key, is_live, placement_of};
use jiff::{SignedDuration, Timestamp};
use switchyard_plan::cluster::waiting_period;

impl Index {
    /// Counts anew what the namespaces had, as seldom as forecasts are made, and puts the queue in that order. Returns the job that is the head of the
    /// queue by that, if it was not before.
    pub(crate) fn share_out(&mut self, now: Timestamp) -> Option<Key> {
        let period = waiting_period(self.waiting.len());
        let fairness = self.fairness.as_mut()?;
        if (SignedDuration::ZERO..period).contains(&now.duration_since(fairness.counted())) {
            return None;
        }
        let running = self.jobs.values().map(|job| &**job).filter(|job| is_live(job) && placement_of(job).is_some());
        if !fairness.count(running, now) {
            return None;
        }
        let head = self.head();
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
