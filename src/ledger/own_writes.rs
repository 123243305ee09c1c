//! "Do not plan again before the cache shows my last write": the writes for one job that the watch
//! cache does not show yet.
//!
//! Kubernetes' own controllers do the same (KEP-5647). Resource versions of one API server grow,
//! and a watch delivers the changes of a kind in their order, so one number per kind is enough.
//! Object names are deterministic, so an error here would only waste calls; this is why waiting
//! ends after [`PATIENCE`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use switchyard_core::digest::fnv1a;

/// Upper bound on waiting for the cache. A watch that lags further is restarted by its own timeout.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// First pause in a fight with another writer; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Upper bound on that pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A fight is over once nothing was undone for this long.
pub const PEACE: Duration = Duration::from_secs(60);

/// Number of statuses remembered per attempt. It is bounded because the status of a queued job
/// keeps changing.
const MOST_SAID: usize = 16;

/// The writes of this process for one job.
#[derive(Debug, Default)]
pub struct OwnWrites {
    expected: BTreeMap<&'static str, (u64, Instant)>,
    deleted: BTreeMap<String, Instant>,
    /// Pods whose gates were or may have been lifted, because a reply can be lost.
    released: BTreeSet<String>,
    /// Objects created in the current attempt, to detect repeated creation.
    made: (u32, BTreeSet<String>),
    /// Digests of the statuses written in the current attempt, newest last.
    said: VecDeque<u64>,
    /// Digest of the last status written.
    last: Option<u64>,
    fight: Option<Fight>,
    hold: Option<Instant>,
}

/// Whether the cache shows all writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// All writes are visible.
    Current,
    /// Some writes are missing, but [`PATIENCE`] has passed.
    GivenUp,
    /// Some writes are missing; wait until this time.
    Behind { until: Instant },
}

/// Another writer keeps undoing writes of this process.
#[derive(Debug, Clone)]
struct Fight {
    /// The object that is undone.
    what: String,
    /// Time of our last try.
    last: Instant,
    /// Time to wait before the next try.
    pause: Duration,
}

impl OwnWrites {
    /// Records that an object of this kind was written with this resource version.
    pub fn wrote(&mut self, kind: &'static str, version: &str, now: Instant) {
        let Ok(version) = version.parse::<u64>() else { return };
        let expected = self.expected.entry(kind).or_insert((0, now));
        *expected = (expected.0.max(version), now);
    }

    /// Records that an object was deleted.
    pub fn deletes(&mut self, uid: String, now: Instant) {
        self.deleted.insert(uid, now);
    }

    /// Records that the gate of a pod is about to be lifted.
    pub fn releases(&mut self, uid: String) {
        self.released.insert(uid);
    }

    /// Whether the gate of this pod may have been lifted, even if the cache does not show it.
    pub fn released(&self, uid: &str) -> bool {
        self.released.contains(uid)
    }

    /// Forgets an object that is gone from the cache.
    pub fn forget(&mut self, uid: &str) {
        self.deleted.remove(uid);
        self.released.remove(uid);
    }

    /// Whether this process deleted the object a moment ago.
    pub fn deleted(&self, uid: &str, now: Instant) -> bool {
        self.deleted.get(uid).is_some_and(|at| now.duration_since(*at) < PATIENCE)
    }

    /// Compares the cache with the writes, and forgets those that are visible or overdue.
    pub fn catch_up(&mut self, versions: &BTreeMap<&'static str, u64>, now: Instant) -> Cache {
        self.deleted.retain(|_, at| now.duration_since(*at) < PATIENCE);
        self.expected.retain(|kind, (version, _)| versions.get(kind).is_none_or(|seen| seen < version));
        let Some(last) = self.expected.values().map(|(_, at)| *at).max() else { return Cache::Current };
        if now.duration_since(last) < PATIENCE {
            return Cache::Behind { until: last + PATIENCE };
        }
        self.expected.clear();
        Cache::GivenUp
    }

    /// Records that an object is about to be created or repaired in an attempt. Returns whether
    /// that had been recorded before.
    pub fn record_made(&mut self, attempt: u32, name: String) -> bool {
        self.enter(attempt);
        !self.made.1.insert(name)
    }

    fn enter(&mut self, attempt: u32) {
        // Attempts only grow, so a lower number comes from another writer.
        if self.made.0 < attempt {
            self.made = (attempt, BTreeSet::new());
            self.said.clear();
        }
    }

    /// Records the text of a status written in an attempt.
    pub fn says(&mut self, attempt: u32, words: &str) {
        self.enter(attempt);
        let digest = fnv1a(words);
        self.said.retain(|said| *said != digest);
        self.said.push_back(digest);
        if self.said.len() > MOST_SAID {
            self.said.pop_front();
        }
        self.last = Some(digest);
    }

    /// Whether a status with this text was written before in this attempt or a later one.
    pub fn has_said(&self, attempt: u32, words: &str) -> bool {
        self.made.0 >= attempt && self.said.contains(&fnv1a(words))
    }

    /// Whether another writer changed the status since this process last wrote it.
    pub fn is_changed(&self, words: &str) -> bool {
        self.last.is_some_and(|last| last != fnv1a(words))
    }

    /// Creates nothing before this time, because the last try was refused. A refusal is not a
    /// fight, so this ends any fight.
    pub fn hold(&mut self, until: Instant) {
        (self.fight, self.made.1) = (None, BTreeSet::new());
        self.said.clear();
        self.hold = Some(until);
    }

    /// Ends the backoff, because a refused write may succeed now.
    pub fn release_hold(&mut self) {
        self.hold = None;
    }

    /// The end of the backoff, if it is still in effect.
    pub fn held(&self, now: Instant) -> Option<Instant> {
        self.hold.filter(|until| *until > now)
    }

    /// Records that a write is repeated because another writer may have undone it.
    ///
    /// # Errors
    /// It is too early; the error is the earliest time for the repetition.
    pub fn try_repeat(&mut self, what: &str, now: Instant) -> Result<(), Instant> {
        let pause = match self.fight.as_ref().filter(|fight| now.duration_since(fight.last) < PEACE) {
            None => FIRST_PAUSE,
            Some(fight) if now.duration_since(fight.last) < fight.pause => return Err(fight.last + fight.pause),
            Some(fight) => (fight.pause * 2).min(LONGEST_PAUSE),
        };
        self.fight = Some(Fight { what: what.to_string(), last: now, pause });
        Ok(())
    }

    /// The object that another writer keeps undoing.
    pub fn fights(&self, now: Instant) -> Option<&str> {
        let goes_on = |fight: &&Fight| fight.pause > FIRST_PAUSE && now.duration_since(fight.last) < PEACE;
        self.fight.as_ref().filter(goes_on).map(|fight| fight.what.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planning_waits_until_the_cache_shows_the_last_write_and_not_for_ever() {
        let (mut own, start) = (OwnWrites::default(), Instant::now());
        own.wrote("Pod", "10", start);
        own.wrote("Pod", "12", start);
        own.wrote("TrainJob", "not a number", start);
        assert_eq!(own.catch_up(&BTreeMap::from([("Pod", 11)]), start), Cache::Behind { until: start + PATIENCE });
        assert_eq!(own.catch_up(&BTreeMap::from([("Pod", 12)]), start), Cache::Current);
        own.wrote("Pod", "20", start);
        assert_eq!(own.catch_up(&BTreeMap::from([("Pod", 12)]), start + PATIENCE), Cache::GivenUp, "given up");
        assert_eq!(own.catch_up(&BTreeMap::new(), start + PATIENCE), Cache::Current);
    }

    #[test]
    fn what_was_deleted_is_not_deleted_again() {
        let (mut own, start) = (OwnWrites::default(), Instant::now());
        own.deletes("a".into(), start);
        assert!(own.deleted("a", start) && !own.deleted("b", start));
        assert!(!own.deleted("a", start + PATIENCE), "the answer may have been wrong");
        own.forget("a");
        assert!(!own.deleted("a", start));
    }

    #[test]
    fn a_status_is_changed_by_others_only() {
        let mut own = OwnWrites::default();
        assert!(!own.is_changed("what another controller wrote"));
        own.says(1, "runs");
        assert!(own.has_said(1, "runs") && !own.is_changed("runs"), "the same words with new figures are no fight");
        assert!(own.is_changed("waits"));
        own.says(2, "starts");
        assert!(own.has_said(2, "starts") && !own.has_said(2, "runs"), "of another attempt");
    }

    /// Regression test: every distinct text was kept, up to 17 MB a day for a queued job.
    #[test]
    fn a_job_that_waits_for_days_costs_no_memory() {
        let mut own = OwnWrites::default();
        for free in 0..100_000 {
            own.says(1, &format!("{free} of 9 nodes have room"));
        }
        assert_eq!((own.said.len(), own.made.1.len()), (MOST_SAID, 0));
        assert!(own.has_said(1, "99999 of 9 nodes have room") && !own.has_said(1, "1 of 9 nodes have room"));
    }

    #[test]
    fn a_fight_over_an_object_slows_down() {
        let (mut own, start) = (OwnWrites::default(), Instant::now());
        assert!(!own.record_made(1, "Service a".into()) && own.record_made(1, "Service a".into()));
        assert!(!own.record_made(2, "Service a".into()), "a new attempt makes its own");
        assert!(
            own.record_made(1, "Service a".into()) && own.record_made(2, "Service a".into()),
            "attempts do not go back"
        );
        let at = |second: u64| start + Duration::from_secs(second);
        let tries: Vec<u64> = (0..30).filter(|second| own.try_repeat("Service a", at(*second)).is_ok()).collect();
        assert_eq!(tries, [0, 1, 3, 7, 12, 17, 22, 27]);
        assert_eq!((own.fights(at(28)), own.fights(at(87))), (Some("Service a"), None));
        assert_eq!((own.try_repeat("Pod b", at(87)), own.fights(at(87))), (Ok(()), None), "the first after a peace");
    }
}
