//! "Do not plan again before the cache shows my last write": per job, what was written and not seen yet.
//!
//! Kubernetes' own controllers do the same (KEP-5647). Resource versions of one API server grow, and a watch shows changes of a
//! kind in their order, so one number per kind is enough. Names are deterministic, so nothing but wasted calls would follow if
//! this were wrong; therefore it gives up waiting after [`PATIENCE`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use switchyard_core::digest::fnv1a;

/// Longest wait for the cache. A watch that is this late is restarted by its own timeout.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// First pause in a fight; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause in a fight.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A fight is over when nothing was undone for this long.
pub const PEACE: Duration = Duration::from_secs(60);

/// Statuses of an attempt that are remembered. A job that waits for days says something new all the time.
const MOST_SAID: usize = 16;

/// What this process wrote for one job.
#[derive(Debug, Default)]
pub struct OwnWrites {
    expected: BTreeMap<&'static str, (u64, Instant)>,
    deleted: BTreeMap<String, Instant>,
    /// Pods whose gates were lifted, as far as is known: a reply may be lost.
    released: BTreeSet<String>,
    /// Objects made for the current attempt, to notice that they are made again and again.
    made: (u32, BTreeSet<String>),
    /// What the status said in the current attempt, as digests, the newest last.
    said: VecDeque<u64>,
    /// What it said when it was written last.
    last: Option<u64>,
    fight: Option<Fight>,
    hold: Option<Instant>,
}

/// Whether the cache shows what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// Everything.
    Current,
    /// Not everything, but [`PATIENCE`] is over.
    GivenUp,
    /// Not yet; it is waited for until then.
    Behind { until: Instant },
}

/// Another writer undoes what this process writes.
#[derive(Debug, Clone)]
struct Fight {
    /// What is undone.
    what: String,
    /// Our last try.
    last: Instant,
    /// Before the next one.
    pause: Duration,
}

impl OwnWrites {
    /// An object of this kind was written with this resource version.
    pub fn wrote(&mut self, kind: &'static str, version: &str, now: Instant) {
        let Ok(version) = version.parse::<u64>() else { return };
        let expected = self.expected.entry(kind).or_insert((0, now));
        *expected = (expected.0.max(version), now);
    }

    /// An object was deleted.
    pub fn deletes(&mut self, uid: String, now: Instant) {
        self.deleted.insert(uid, now);
    }

    /// The gate of a pod is about to be lifted.
    pub fn releases(&mut self, uid: String) {
        self.released.insert(uid);
    }

    /// Whether the gate of this pod may have been lifted, whatever the cache shows.
    pub fn released(&self, uid: &str) -> bool {
        self.released.contains(uid)
    }

    /// The cache shows that an object is gone: what was done to it need not be remembered any longer.
    pub fn forget(&mut self, uid: &str) {
        self.deleted.remove(uid);
        self.released.remove(uid);
    }

    /// Whether this object was deleted by us a moment ago.
    pub fn deleted(&self, uid: &str, now: Instant) -> bool {
        self.deleted.get(uid).is_some_and(|at| now.duration_since(*at) < PATIENCE)
    }

    /// Compares what the cache shows with what was written, and forgets what it shows or what was waited for too long.
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

    /// Records that an object is about to be made (or set right) in an attempt. Returns whether that was recorded before.
    pub fn record_made(&mut self, attempt: u32, name: String) -> bool {
        self.enter(attempt);
        !self.made.1.insert(name)
    }

    fn enter(&mut self, attempt: u32) {
        // Attempts only grow; a lower number comes from another writer.
        if self.made.0 < attempt {
            self.made = (attempt, BTreeSet::new());
            self.said.clear();
        }
    }

    /// Notes what a status says that was written in an attempt.
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

    /// Whether a status said that before.
    pub fn has_said(&self, attempt: u32, words: &str) -> bool {
        self.made.0 >= attempt && self.said.contains(&fnv1a(words))
    }

    /// Whether another writer changed the status since it was last written here.
    pub fn is_changed(&self, words: &str) -> bool {
        self.last.is_some_and(|last| last != fnv1a(words))
    }

    /// Nothing is created before this time: the last try was refused. What was refused is not undone by anybody.
    pub fn hold(&mut self, until: Instant) {
        (self.fight, self.made.1) = (None, BTreeSet::new());
        self.said.clear();
        self.hold = Some(until);
    }

    /// What was refused may be accepted now.
    pub fn release_hold(&mut self) {
        self.hold = None;
    }

    /// Until when nothing is created.
    pub fn held(&self, now: Instant) -> Option<Instant> {
        self.hold.filter(|until| *until > now)
    }

    /// Records a repetition of something that was done before.
    ///
    /// # Errors
    /// It is too early: the time at which it is allowed.
    pub fn try_repeat(&mut self, what: &str, now: Instant) -> Result<(), Instant> {
        let pause = match self.fight.as_ref().filter(|fight| now.duration_since(fight.last) < PEACE) {
            None => FIRST_PAUSE,
            Some(fight) if now.duration_since(fight.last) < fight.pause => return Err(fight.last + fight.pause),
            Some(fight) => (fight.pause * 2).min(LONGEST_PAUSE),
        };
        self.fight = Some(Fight { what: what.to_string(), last: now, pause });
        Ok(())
    }

    /// What another writer keeps undoing.
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

    /// Every distinct text was kept: up to 17 MB a day for a job that waits.
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
