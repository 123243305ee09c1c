//! Upper bound on reservations: a gang that cannot start, for whatever reason, would otherwise keep
//! its nodes idle forever. The head of the queue releases its reservation after the time that the
//! administrator allows. A cooldown of the same length follows, in which it reserves nothing. It is
//! still placed as soon as it finds room, and jobs behind it can reserve nodes.

use crate::index::Index;
use crate::job::{Key, key_of};
use jiff::Timestamp;
use std::collections::BTreeSet;
use switchyard_plan::cluster::queue_order::Basis;

impl Index {
    /// When the reservation expires: after the configured time, or twice that if limits promise
    /// that the head can start by then.
    fn reservation_deadline(&self) -> Option<Timestamp> {
        let (held, longest) = (self.queue.reservation.as_ref()?, self.queue.settings.longest_reservation?);
        let after = |times| held.since.saturating_add(longest.saturating_mul(times)).unwrap_or(Timestamp::MAX);
        let is_promised = held.start.is_some_and(|(at, basis)| basis == Basis::Limits && at <= after(2));
        Some(after(if is_promised { 2 } else { 1 }))
    }

    /// When a queued job loses its reservation, or may hold one again.
    pub fn reservation_ends(&self, key: &Key) -> Option<Timestamp> {
        let holds = self.queue.reservation.as_ref().and_then(|held| self.job_of(&held.job));
        let holds = holds.is_some_and(|job| key_of(&job.metadata) == *key);
        self.cooldown_until(key).or_else(|| self.reservation_deadline().filter(|_| holds))
    }

    /// Until when a job that held a reservation for too long gets none.
    pub fn cooldown_until(&self, key: &Key) -> Option<Timestamp> {
        self.queue.cooldowns.get(key).copied()
    }

    /// Ends an expired reservation, and cooldowns that are over. Returns the jobs to reconcile.
    pub(super) fn expire_reservation(&mut self, now: Timestamp) -> BTreeSet<Key> {
        let Some(longest) = self.queue.settings.longest_reservation else { return BTreeSet::new() };
        // If the clock was set back, do not extend the cooldown.
        self.queue.cooldowns.retain(|_, until| *until > now && until.duration_since(now) <= longest);
        if self.reservation_deadline().is_none_or(|until| until > now) {
            return BTreeSet::new();
        }
        let holder =
            self.queue.reservation.as_ref().and_then(|held| self.job_of(&held.job)).map(|job| key_of(&job.metadata));
        let freed = self.unreserve(|_| true);
        let Some(holder) = holder else { return self.jobs_helped_by(&freed) };
        self.queue.cooldowns.insert(holder.clone(), now.saturating_add(longest).unwrap_or(Timestamp::MAX));
        self.jobs_to_reconcile(&holder, Some(holder.clone()), &freed)
    }
}
