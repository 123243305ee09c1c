//! Upper bound on reservations: a gang that cannot start, for whatever reason, would otherwise keep
//! its nodes idle forever. The head of the queue releases its reservation after the time that the
//! administrator allows, and rests: it gets none for the same time again. Meanwhile it is placed as
//! soon as it finds room, and jobs behind it may reserve nodes.

use super::Index;
use crate::job::{Key, key_of};
use jiff::Timestamp;
use std::collections::BTreeSet;
use switchyard_plan::cluster::turn::Basis;

impl Index {
    /// When the reservation expires: after the configured time, or twice that if limits promise
    /// that the head can start by then.
    fn held_until(&self) -> Option<Timestamp> {
        let (held, longest) = (self.reservation.as_ref()?, self.longest_reservation?);
        let after = |times| held.since.saturating_add(longest.saturating_mul(times)).unwrap_or(Timestamp::MAX);
        let is_promised = held.start.is_some_and(|(at, basis)| basis == Basis::Limits && at <= after(2));
        Some(after(if is_promised { 2 } else { 1 }))
    }

    /// When a queued job loses its reservation, or may hold one again.
    pub fn reservation_ends(&self, key: &Key) -> Option<Timestamp> {
        let holds = self.reservation.as_ref().and_then(|held| self.job_of(&held.job));
        let holds = holds.is_some_and(|job| key_of(&job.metadata) == *key);
        self.rests_until(key).or_else(|| self.held_until().filter(|_| holds))
    }

    /// Until when a job that held a reservation for too long gets none.
    pub fn rests_until(&self, key: &Key) -> Option<Timestamp> {
        self.rests.get(key).copied()
    }

    /// Ends an expired reservation, and rests that are over. Returns the jobs to reconcile.
    pub(crate) fn rest(&mut self, now: Timestamp) -> BTreeSet<Key> {
        let Some(longest) = self.longest_reservation else { return BTreeSet::new() };
        // If the clock was set back, do not rest for longer.
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
