//! "Do not plan again before the cache shows my last write": per job, what was written and not seen yet.
//!
//! Kubernetes' own controllers do the same (KEP-5647). Resource versions of one API server grow, and a watch shows changes of a
//! kind in their order, so one number per kind is enough. Names are deterministic, so nothing but wasted calls would follow if
//! this were wrong; therefore it gives up waiting after [`PATIENCE`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

/// Longest wait for the cache. A watch that is this late is started again by its own timeout.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// Failures of the last minute are tried again quickly.
const MINUTE: Duration = Duration::from_secs(60);

/// What this process wrote for one job.
#[derive(Debug, Default)]
pub(super) struct OwnWrites {
    expected: BTreeMap<&'static str, (u64, Instant)>,
    deleted: HashMap<String, Instant>,
    /// Objects made for the current attempt, to notice that they are made again and again.
    made: (u32, HashSet<String>),
    repeats: Option<(Instant, Instant)>,
    hold: Option<Instant>,
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

    /// The cache shows that it is gone.
    pub fn is_deleted(&mut self, uid: &str) {
        self.deleted.remove(uid);
    }

    /// Whether this object was deleted by us a moment ago.
    pub fn deleted(&self, uid: &str, now: Instant) -> bool {
        self.deleted.get(uid).is_some_and(|at| now.duration_since(*at) < PATIENCE)
    }

    /// When the cache shows everything: `Ok(given up)`. Otherwise when to stop waiting.
    pub fn seen(&mut self, versions: &HashMap<&'static str, u64>, now: Instant) -> Result<bool, Instant> {
        self.deleted.retain(|_, at| now.duration_since(*at) < PATIENCE);
        self.expected.retain(|kind, (version, _)| versions.get(kind).is_none_or(|seen| seen < version));
        let Some(last) = self.expected.values().map(|(_, at)| *at).max() else { return Ok(false) };
        if now.duration_since(last) < PATIENCE {
            return Err(last + PATIENCE);
        }
        self.expected.clear();
        Ok(true)
    }

    /// Notes that an object is about to be made (or set right) in an attempt. Answers whether that was done before.
    pub fn makes(&mut self, attempt: u32, name: String) -> bool {
        if self.made.0 != attempt {
            self.made = (attempt, HashSet::new());
        }
        !self.made.1.insert(name)
    }

    /// Nothing is created before this time: the last try was refused.
    pub fn hold(&mut self, until: Instant) {
        self.hold = Some(until);
    }

    /// Until when nothing is created.
    pub fn held(&self, now: Instant) -> Option<Instant> {
        self.hold.filter(|until| *until > now)
    }

    /// Somebody undoes what we do: after a minute of that, at most one try in 5 s. Answers when the next try is allowed.
    pub fn repeat(&mut self, now: Instant) -> Result<(), Instant> {
        let Some((first, last)) = self.repeats.filter(|(_, last)| now.duration_since(*last) < 2 * MINUTE) else {
            self.repeats = Some((now, now));
            return Ok(());
        };
        let pause = if now.duration_since(first) < MINUTE { Duration::from_secs(1) } else { Duration::from_secs(5) };
        if now.duration_since(last) < pause {
            return Err(last + pause);
        }
        self.repeats = Some((first, now));
        Ok(())
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
        assert_eq!(own.seen(&HashMap::from([("Pod", 11)]), start), Err(start + PATIENCE));
        assert_eq!(own.seen(&HashMap::from([("Pod", 12)]), start), Ok(false));
        own.wrote("Pod", "20", start);
        assert_eq!(own.seen(&HashMap::from([("Pod", 12)]), start + PATIENCE), Ok(true), "given up");
        assert_eq!(own.seen(&HashMap::new(), start + PATIENCE), Ok(false));
    }

    #[test]
    fn what_was_deleted_is_not_deleted_again() {
        let (mut own, start) = (OwnWrites::default(), Instant::now());
        own.deletes("a".into(), start);
        assert!(own.deleted("a", start) && !own.deleted("b", start));
        assert!(!own.deleted("a", start + PATIENCE), "the answer may have been wrong");
        own.is_deleted("a");
        assert!(!own.deleted("a", start));
    }

    #[test]
    fn a_fight_over_an_object_slows_down() {
        let (mut own, start) = (OwnWrites::default(), Instant::now());
        assert!(!own.makes(1, "Service a".into()) && own.makes(1, "Service a".into()));
        assert!(!own.makes(2, "Service a".into()), "a new attempt makes its own");
        let mut tries = Vec::new();
        for second in 0..300 {
            if own.repeat(start + Duration::from_secs(second)).is_ok() {
                tries.push(second);
            }
        }
        assert_eq!(tries.iter().filter(|at| **at < 60).count(), 60);
        let late: Vec<&u64> = tries.iter().filter(|at| **at >= 61).collect();
        assert!(late.windows(2).all(|pair| pair[1] - pair[0] >= 5), "{late:?}");
    }
}
