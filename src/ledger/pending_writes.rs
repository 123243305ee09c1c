//! "Do not plan again before the cache shows my last write": the writes for one job that the watch
//! cache does not show yet.
//!
//! Kubernetes' own controllers do the same (KEP-5647). Resource versions of one API server grow,
//! and a watch delivers the changes of a kind in their order, so one number per kind is enough.
//! Object names are deterministic, so an error here would only waste calls; this is why waiting
//! ends after [`CACHE_TIMEOUT`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use switchyard_core::digest::fnv1a;

/// Upper bound on waiting for the cache. A watch that lags further is restarted by its own timeout.
pub const CACHE_TIMEOUT: Duration = Duration::from_secs(30);
/// First pause in a conflict with another writer; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Upper bound on that pause.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// A conflict is over once nothing was undone for this long.
pub const CONFLICT_WINDOW: Duration = Duration::from_secs(60);

/// Number of statuses remembered per attempt. It is bounded because the status of a queued job
/// keeps changing.
const MAX_STATUSES: usize = 16;

/// The writes of this process for one job.
#[derive(Debug, Default)]
pub struct PendingWrites {
    expected: BTreeMap<&'static str, (u64, Instant)>,
    deleted: BTreeMap<String, Instant>,
    /// Pods whose gates were or may have been lifted, because a reply can be lost.
    released: BTreeSet<String>,
    /// Objects created in the current attempt, to detect repeated creation.
    created: (u32, BTreeSet<String>),
    /// Digests of the statuses written in the current attempt, newest last.
    statuses: VecDeque<u64>,
    /// Digest of the last status written.
    last: Option<u64>,
    conflict: Option<WriteConflict>,
    backoff: Option<Instant>,
}

/// Whether the cache shows all writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheState {
    /// All writes are visible.
    Current,
    /// Some writes are missing, but [`CACHE_TIMEOUT`] has passed.
    TimedOut,
    /// Some writes are missing; wait until this time.
    Behind { until: Instant },
}

/// Another writer keeps undoing writes of this process.
#[derive(Debug, Clone)]
struct WriteConflict {
    /// The object that is undone.
    what: String,
    /// Time of our last try.
    last: Instant,
    /// Time to wait before the next try.
    pause: Duration,
}

impl PendingWrites {
    /// Records that an object of this kind was written with this resource version.
    pub fn record_write(&mut self, kind: &'static str, version: &str, now: Instant) {
        let Ok(version) = version.parse::<u64>() else { return };
        let expected = self.expected.entry(kind).or_insert((0, now));
        *expected = (expected.0.max(version), now);
    }

    /// Records that an object was deleted.
    pub fn record_deletion(&mut self, uid: String, now: Instant) {
        self.deleted.insert(uid, now);
    }

    /// Records that the gate of a pod is about to be lifted.
    pub fn record_release(&mut self, uid: String) {
        self.released.insert(uid);
    }

    /// Whether the gate of this pod may have been lifted, even if the cache does not show it.
    pub fn was_released(&self, uid: &str) -> bool {
        self.released.contains(uid)
    }

    /// Forgets an object that is gone from the cache.
    pub fn forget(&mut self, uid: &str) {
        self.deleted.remove(uid);
        self.released.remove(uid);
    }

    /// Whether this process deleted the object a moment ago.
    pub fn was_deleted(&self, uid: &str, now: Instant) -> bool {
        self.deleted.get(uid).is_some_and(|at| now.duration_since(*at) < CACHE_TIMEOUT)
    }

    /// Compares the cache with the writes, and forgets those that are visible or overdue.
    pub fn catch_up(&mut self, versions: &BTreeMap<&'static str, u64>, now: Instant) -> CacheState {
        self.deleted.retain(|_, at| now.duration_since(*at) < CACHE_TIMEOUT);
        self.expected.retain(|kind, (version, _)| versions.get(kind).is_none_or(|seen| seen < version));
        let Some(last) = self.expected.values().map(|(_, at)| *at).max() else { return CacheState::Current };
        if now.duration_since(last) < CACHE_TIMEOUT {
            return CacheState::Behind { until: last + CACHE_TIMEOUT };
        }
        self.expected.clear();
        CacheState::TimedOut
    }

    /// Records that an object is about to be created or repaired in an attempt. Returns whether
    /// that had been recorded before.
    pub fn record_creation(&mut self, attempt: u32, name: String) -> bool {
        self.enter_attempt(attempt);
        !self.created.1.insert(name)
    }

    fn enter_attempt(&mut self, attempt: u32) {
        // Attempts only grow, so a lower number comes from another writer.
        if self.created.0 < attempt {
            self.created = (attempt, BTreeSet::new());
            self.statuses.clear();
        }
    }

    /// Records the text of a status written in an attempt.
    pub fn record_status(&mut self, attempt: u32, text: &str) {
        self.enter_attempt(attempt);
        let digest = fnv1a(text);
        self.statuses.retain(|written| *written != digest);
        self.statuses.push_back(digest);
        if self.statuses.len() > MAX_STATUSES {
            self.statuses.pop_front();
        }
        self.last = Some(digest);
    }

    /// Whether a status with this text was written before in this attempt or a later one.
    pub fn has_written_status(&self, attempt: u32, text: &str) -> bool {
        self.created.0 >= attempt && self.statuses.contains(&fnv1a(text))
    }

    /// Whether another writer changed the status since this process last wrote it.
    pub fn is_status_changed(&self, text: &str) -> bool {
        self.last.is_some_and(|last| last != fnv1a(text))
    }

    /// Creates nothing before this time, because the last try was refused. A refusal is not a
    /// conflict, so this ends any conflict.
    pub fn back_off(&mut self, until: Instant) {
        (self.conflict, self.created.1) = (None, BTreeSet::new());
        self.statuses.clear();
        self.backoff = Some(until);
    }

    /// Ends the backoff, because a refused write may succeed now.
    pub fn end_backoff(&mut self) {
        self.backoff = None;
    }

    /// The end of the backoff, if it is still in effect.
    pub fn backoff_until(&self, now: Instant) -> Option<Instant> {
        self.backoff.filter(|until| *until > now)
    }

    /// Records that a write is repeated because another writer may have undone it.
    ///
    /// # Errors
    /// It is too early; the error is the earliest time for the repetition.
    pub fn try_repeat(&mut self, what: &str, now: Instant) -> Result<(), Instant> {
        let pause = match self.conflict.as_ref().filter(|conflict| now.duration_since(conflict.last) < CONFLICT_WINDOW)
        {
            None => FIRST_PAUSE,
            Some(conflict) if now.duration_since(conflict.last) < conflict.pause => {
                return Err(conflict.last + conflict.pause);
            }
            Some(conflict) => (conflict.pause * 2).min(MAX_PAUSE),
        };
        self.conflict = Some(WriteConflict { what: what.to_string(), last: now, pause });
        Ok(())
    }

    /// The object that another writer keeps undoing.
    pub fn contested_object(&self, now: Instant) -> Option<&str> {
        let is_ongoing = |conflict: &&WriteConflict| {
            conflict.pause > FIRST_PAUSE && now.duration_since(conflict.last) < CONFLICT_WINDOW
        };
        self.conflict.as_ref().filter(is_ongoing).map(|conflict| conflict.what.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planning_waits_for_the_cache_up_to_a_timeout() {
        let (mut writes, start) = (PendingWrites::default(), Instant::now());
        writes.record_write("Pod", "10", start);
        writes.record_write("Pod", "12", start);
        writes.record_write("TrainJob", "not a number", start);
        assert_eq!(
            writes.catch_up(&BTreeMap::from([("Pod", 11)]), start),
            CacheState::Behind { until: start + CACHE_TIMEOUT }
        );
        assert_eq!(writes.catch_up(&BTreeMap::from([("Pod", 12)]), start), CacheState::Current);
        writes.record_write("Pod", "20", start);
        assert_eq!(
            writes.catch_up(&BTreeMap::from([("Pod", 12)]), start + CACHE_TIMEOUT),
            CacheState::TimedOut,
            "timed out"
        );
        assert_eq!(writes.catch_up(&BTreeMap::new(), start + CACHE_TIMEOUT), CacheState::Current);
    }

    #[test]
    fn a_deleted_object_is_not_deleted_again() {
        let (mut writes, start) = (PendingWrites::default(), Instant::now());
        writes.record_deletion("a".into(), start);
        assert!(writes.was_deleted("a", start) && !writes.was_deleted("b", start));
        assert!(!writes.was_deleted("a", start + CACHE_TIMEOUT), "the deletion may have failed");
        writes.forget("a");
        assert!(!writes.was_deleted("a", start));
    }

    #[test]
    fn only_other_writers_change_a_status() {
        let mut writes = PendingWrites::default();
        assert!(!writes.is_status_changed("what another controller wrote"));
        writes.record_status(1, "runs");
        assert!(
            writes.has_written_status(1, "runs") && !writes.is_status_changed("runs"),
            "the same text is no conflict"
        );
        assert!(writes.is_status_changed("waits"));
        writes.record_status(2, "starts");
        assert!(
            writes.has_written_status(2, "starts") && !writes.has_written_status(2, "runs"),
            "statuses of another attempt do not count"
        );
    }

    /// Regression test: every distinct text was kept, up to 17 MB a day for a queued job.
    #[test]
    fn a_job_queued_for_days_uses_bounded_memory() {
        let mut writes = PendingWrites::default();
        for free in 0..100_000 {
            writes.record_status(1, &format!("{free} of 9 nodes have room"));
        }
        assert_eq!((writes.statuses.len(), writes.created.1.len()), (MAX_STATUSES, 0));
        assert!(
            writes.has_written_status(1, "99999 of 9 nodes have room")
                && !writes.has_written_status(1, "1 of 9 nodes have room")
        );
    }

    #[test]
    fn a_write_conflict_backs_off() {
        let (mut writes, start) = (PendingWrites::default(), Instant::now());
        assert!(!writes.record_creation(1, "Service a".into()) && writes.record_creation(1, "Service a".into()));
        assert!(!writes.record_creation(2, "Service a".into()), "a new attempt has its own objects");
        assert!(
            writes.record_creation(1, "Service a".into()) && writes.record_creation(2, "Service a".into()),
            "attempts never decrease"
        );
        let at = |second: u64| start + Duration::from_secs(second);
        let tries: Vec<u64> = (0..30).filter(|second| writes.try_repeat("Service a", at(*second)).is_ok()).collect();
        assert_eq!(tries, [0, 1, 3, 7, 12, 17, 22, 27]);
        assert_eq!((writes.contested_object(at(28)), writes.contested_object(at(87))), (Some("Service a"), None));
        assert_eq!(
            (writes.try_repeat("Pod b", at(87)), writes.contested_object(at(87))),
            (Ok(()), None),
            "the conflict has ended"
        );
    }
}
