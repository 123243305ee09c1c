//! The head of the queue does not hold nodes forever: a gang that cannot begin, for whatever reason, would keep them idle. It gives them back after
//! the longest time that the administrator allows, and holds none for as long again. Meanwhile it is placed as soon as it finds room, and the
//! jobs behind it may hold nodes.

use super::Index;
use crate::job::{Key, key_of};
use jiff::Timestamp;
use std::collections::BTreeSet;
use switchyard_plan::cluster::turn::Basis;

impl Index {
    /// When the head gives its nodes back: after the longest time, or twice that where limits promise that it can begin by then.
    fn held_until(&self) -> Option<Timestamp> {
        let (held, longest) = (self.reservation.as_ref()?, self.longest_reservation?);
        let after = |times| held.since.saturating_add(longest.saturating_mul(times)).unwrap_or(Timestamp::MAX);
        let is_promised = held.start.is_some_and(|(at, basis)| basis == Basis::Limits && at <= after(2));
        Some(after(if is_promised { 2 } else { 1 }))
    }

    /// When a job that waits gives back what it holds, or may hold nodes again.
    pub fn reservation_ends(&self, key: &Key) -> Option<Timestamp> {
        let holds = self.reservation.as_ref().and_then(|held| self.job_of(&held.job));
        let holds = holds.is_some_and(|job| key_of(&job.metadata) == *key);
        self.rests_until(key).or_else(|| self.held_until().filter(|_| holds))
    }

    /// Until when a job that held nodes for too long holds none.
    pub fn rests_until(&self, key: &Key) -> Option<Timestamp> {
        self.rests.get(key).copied()
    }

    /// Ends a reservation that has lasted too long, and rests that are over. Returns the jobs to look at.
    pub(crate) fn rest(&mut self, now: Timestamp) -> BTreeSet<Key> {
        let Some(longest) = self.longest_reservation else { return BTreeSet::new() };
        // A clock that was set back does not make a rest longer.
        self.rests.retain(|_, until| *until > now && until.duration_since(now) <= longest);
        if self.held_until().is_none_or(|until| until > now) {
            return BTreeSet::new();
        }
        let holder = self.reservation.as_ref().and_then(|held| self.job_of(&held.job)).map(|job| key_of(&job.metadata));
        let freed = self.unreserve(|_| true);
        let Some(holder) = holder else { return self.helped(&freed) };
        self.rests.insert(holder.clone(), now.saturating_add(longest).unwrap_or(Timestamp::MAX));
        self.concerned(&holder, Some(holder.clone()), &freed)
    }
}
