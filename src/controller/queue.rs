//! Work queue of keys: each key once, at its earliest time, and never processed concurrently. A key
//! may have two entries: one that is always processed, and one that is processed only if it is
//! worthwhile by then.
//!
//! [`Schedule`] implements the rules, with time as a parameter; [`Queue`] lets tasks wait for due
//! keys. A task that takes a key holds a [`KeyGuard`], which releases the key when it is dropped.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// First backoff after a failure; it doubles each time.
const INITIAL_BACKOFF: Duration = Duration::from_millis(50);
/// Upper bound on the backoff in the first minute of failures, and lower bound after it.
const STEADY_BACKOFF: Duration = Duration::from_secs(5);
/// Upper bound on the backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Failures are expected to pass within this time.
const STEADY_AFTER: Duration = Duration::from_secs(60);

/// Whether a due key must be processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Pass {
    Required,
    /// Only if it is worthwhile by then, which the task that takes the key decides.
    Optional,
}

impl Pass {
    fn other(self) -> Pass {
        match self {
            Pass::Required => Pass::Optional,
            Pass::Optional => Pass::Required,
        }
    }
}

/// Due times of the keys.
#[derive(Debug)]
pub(super) struct Schedule<K> {
    due: BTreeSet<(Instant, u64, K, Pass)>,
    at: HashMap<(K, Pass), (Instant, u64)>,
    running: HashSet<K>,
    /// Entries for keys that are being processed, scheduled again when these are done.
    deferred: HashMap<(K, Pass), Instant>,
    backoffs: HashMap<K, Backoff>,
    sequence: u64,
}

#[derive(Debug, Clone, Copy)]
struct Backoff {
    since: Instant,
    pause: Duration,
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Schedule {
            due: BTreeSet::new(),
            at: HashMap::new(),
            running: HashSet::new(),
            deferred: HashMap::new(),
            backoffs: HashMap::new(),
            sequence: 0,
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> Schedule<K> {
    /// Schedules a key for this time, unless the same entry is already scheduled earlier.
    pub fn add(&mut self, key: K, at: Instant, pass: Pass) {
        let entry = (key, pass);
        if self.running.contains(&entry.0) {
            let deferred = self.deferred.entry(entry).or_insert(at);
            *deferred = (*deferred).min(at);
            return;
        }
        if self.at.get(&entry).is_some_and(|(before, _)| *before <= at) {
            return;
        }
        self.unschedule(&entry);
        self.sequence += 1;
        self.at.insert(entry.clone(), (at, self.sequence));
        self.due.insert((at, self.sequence, entry.0, pass));
    }

    /// Removes an entry from the schedule. Returns its time.
    fn unschedule(&mut self, entry: &(K, Pass)) -> Option<Instant> {
        let (at, sequence) = self.at.remove(entry)?;
        self.due.remove(&(at, sequence, entry.0.clone(), entry.1));
        Some(at)
    }

    /// Takes a due key, which is then processed until [`Schedule::done`]. One pass serves both
    /// entries of the key if both are due.
    pub fn pop(&mut self, now: Instant) -> Option<(K, Pass)> {
        if self.due.first().is_none_or(|(at, ..)| *at > now) {
            return None;
        }
        let (_, _, key, mut pass) = self.due.pop_first()?;
        self.at.remove(&(key.clone(), pass));
        let other = (key.clone(), pass.other());
        if let Some(at) = self.unschedule(&other) {
            if at <= now {
                pass = Pass::Required;
            } else {
                self.deferred.insert(other, at);
            }
        }
        self.running.insert(key.clone());
        Some((key, pass))
    }

    /// Removes all scheduled entries.
    pub fn clear(&mut self) {
        self.due.clear();
        self.at.clear();
    }

    /// Marks a key as no longer processed.
    pub fn done(&mut self, key: &K) {
        self.running.remove(key);
        for pass in [Pass::Required, Pass::Optional] {
            if let Some(at) = self.deferred.remove(&(key.clone(), pass)) {
                self.add(key.clone(), at, pass);
            }
        }
    }

    /// The time at which the next key is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, ..)| *at)
    }

    /// Number of due keys, and the age of the oldest.
    pub fn depth(&self, now: Instant) -> (usize, Duration) {
        let due = self.due.iter().take_while(|(at, ..)| *at <= now).count();
        (due, self.next_due().map(|at| now.saturating_duration_since(at)).unwrap_or_default())
    }

    /// Records a failure of a key. Returns the time of its next try, which an observed change can
    /// bring forward.
    pub fn failed(&mut self, key: &K, now: Instant) -> Instant {
        let backoff = self.backoffs.entry(key.clone()).or_insert(Backoff { since: now, pause: INITIAL_BACKOFF / 2 });
        let is_recent = now.duration_since(backoff.since) < STEADY_AFTER;
        let next = backoff.pause * 2;
        backoff.pause = if is_recent { next.min(STEADY_BACKOFF) } else { next.clamp(STEADY_BACKOFF, MAX_BACKOFF) };
        now + backoff.pause
    }

    /// Resets the backoff of a key.
    pub fn succeeded(&mut self, key: &K) {
        self.backoffs.remove(key);
    }
}

/// A [`Schedule`] shared by tasks.
#[derive(Debug, Clone)]
pub(super) struct Queue<K> {
    inner: Arc<Mutex<Schedule<K>>>,
    changed: Arc<Notify>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Queue { inner: Arc::default(), changed: Arc::default() }
    }
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Schedule<K>) -> T) -> T {
        change(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Schedules a key that must be processed then.
    pub fn add(&self, key: K, at: Instant) {
        self.schedule(key, at, Pass::Required);
    }

    /// See [`Schedule::add`].
    pub fn schedule(&self, key: K, at: Instant, pass: Pass) {
        self.with(|schedule| schedule.add(key, at, pass));
        self.changed.notify_one();
    }

    /// Waits for the next due key. Cancel-safe.
    pub async fn next(&self) -> KeyGuard<K> {
        loop {
            let (key, due) = self.with(|schedule| (schedule.pop(Instant::now()), schedule.next_due()));
            match (key, due) {
                (Some((key, pass)), _) => return KeyGuard { key, pass, queue: self.clone() },
                (None, Some(due)) => {
                    let _ = tokio::time::timeout_at(due.into(), self.changed.notified()).await;
                }
                (None, None) => self.changed.notified().await,
            }
        }
    }

    /// Schedules a key again after its backoff. Returns the time.
    pub fn failed(&self, key: &K) -> Instant {
        let now = Instant::now();
        self.with(|schedule| {
            let at = schedule.failed(key, now);
            schedule.add(key.clone(), at, Pass::Required);
            at
        })
    }

    /// See [`Schedule::succeeded`].
    pub fn succeeded(&self, key: &K) {
        self.with(|schedule| schedule.succeeded(key));
    }

    /// See [`Schedule::depth`].
    pub fn depth(&self) -> (usize, Duration) {
        self.with(|schedule| schedule.depth(Instant::now()))
    }
}

/// A key that is being processed until this is dropped. A panic counts as a failure, so the key is
/// tried again after its backoff.
#[derive(Debug)]
pub(super) struct KeyGuard<K: Clone + Eq + Hash + Ord> {
    key: K,
    pub pass: Pass,
    queue: Queue<K>,
}

impl<K: Clone + Eq + Hash + Ord> Deref for KeyGuard<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.key
    }
}

impl<K: Clone + Eq + Hash + Ord> Drop for KeyGuard<K> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.queue.failed(&self.key);
        }
        self.queue.with(|schedule| schedule.done(&self.key));
        self.queue.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_earliest_time_of_a_key_wins() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        schedule.add("a", at(5), Pass::Required);
        schedule.add("a", at(3), Pass::Required);
        schedule.add("b", at(4), Pass::Required);
        schedule.add("a", at(9), Pass::Required);
        assert_eq!(schedule.next_due(), Some(at(3)));
        assert_eq!(schedule.pop(at(2)), None);
        let popped: Vec<&str> = std::iter::from_fn(|| schedule.pop(at(9))).map(|(key, _)| key).collect();
        assert_eq!(popped, ["a", "b"]);
    }

    #[test]
    fn a_key_added_while_it_runs_runs_once_more() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.add("a", now, Pass::Required);
        assert_eq!(schedule.pop(now), Some(("a", Pass::Required)));
        schedule.add("a", now, Pass::Required);
        schedule.add("a", now, Pass::Required);
        assert_eq!(schedule.pop(now), None, "it runs");
        schedule.done(&"a");
        assert_eq!((schedule.pop(now), schedule.pop(now)), (Some(("a", Pass::Required)), None));
    }

    #[test]
    fn an_optional_pass_does_not_replace_the_required_one() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        schedule.add("a", at(5), Pass::Required);
        schedule.add("a", at(3), Pass::Optional);
        assert_eq!(schedule.pop(at(4)), Some(("a", Pass::Optional)));
        schedule.add("a", at(4), Pass::Optional);
        schedule.done(&"a");
        assert_eq!(schedule.pop(at(6)), Some(("a", Pass::Required)), "one required pass serves both");
        schedule.done(&"a");
        assert_eq!((schedule.pop(at(9)), schedule.next_due()), (None, None));
    }

    #[test]
    fn retries_back_off() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let (mut now, mut tries) = (start, Vec::new());
        while now < start + Duration::from_secs(600) {
            tries.push(now.duration_since(start).as_secs_f64());
            now = schedule.failed(&"a", now);
        }
        assert!(tries[1] <= 0.051, "{tries:?}");
        assert!(tries.windows(2).filter(|pair| pair[0] >= 60.0).all(|pair| pair[1] - pair[0] >= 5.0), "{tries:?}");
        assert!(tries.windows(2).all(|pair| pair[1] - pair[0] < 60.001), "{tries:?}");
        schedule.succeeded(&"a");
        assert_eq!(schedule.failed(&"a", now), now + INITIAL_BACKOFF);
    }

    #[tokio::test]
    async fn a_key_is_released_even_if_its_task_panics() {
        let queue = Queue::default();
        queue.add("a", Instant::now());
        let next_key = async |queue: &Queue<&'static str>| {
            tokio::time::timeout(Duration::from_secs(30), queue.next()).await.expect("a key within 30 s")
        };
        let guard = next_key(&queue).await;
        queue.add("a", Instant::now());
        queue.add("b", Instant::now());
        assert_eq!(*next_key(&queue).await, "b", "a runs");
        let waiter = tokio::spawn({
            let queue = queue.clone();
            async move { *queue.next().await }
        });
        drop(guard);
        assert_eq!(tokio::time::timeout(Duration::from_secs(30), waiter).await.unwrap().unwrap(), "a");
        queue.add("c", Instant::now());
        let guard = next_key(&queue).await;
        let panicking = tokio::spawn(async move { panic!("intended panic while {} runs", *guard) });
        assert!(panicking.await.is_err());
        assert_eq!(*next_key(&queue).await, "c", "after its backoff");
    }

    proptest! {
        #[test]
        fn keys_are_popped_in_the_order_in_which_they_are_due(times in prop::collection::vec((0_u8..20, 0_u64..9), 1..60)) {
            let (mut schedule, start) = (Schedule::default(), Instant::now());
            let mut earliest: BTreeMap<u8, u64> = BTreeMap::new();
            for (key, seconds) in times {
                schedule.add(key, start + Duration::from_secs(seconds), Pass::Required);
                earliest.entry(key).and_modify(|before| *before = seconds.min(*before)).or_insert(seconds);
            }
            for second in 0..9 {
                let now = start + Duration::from_secs(second);
                let due: Vec<u8> = std::iter::from_fn(|| schedule.pop(now)).map(|(key, _)| key).collect();
                prop_assert!(due.iter().all(|key| earliest[key] == second), "{due:?} at {second}: {earliest:?}");
                prop_assert_eq!(due.len(), earliest.values().filter(|at| **at == second).count());
            }
        }

        #[test]
        fn no_entry_is_lost_and_no_key_runs_twice_at_a_time(
            steps in prop::collection::vec((0_u8..4, 0_u8..4, 0_u64..5), 1..200),
        ) {
            let (mut schedule, start) = (Schedule::default(), Instant::now());
            let (mut now, mut running, mut pending) = (start, HashSet::new(), HashSet::new());
            for (key, operation, seconds) in steps {
                let pass = if operation == 0 { Pass::Required } else { Pass::Optional };
                match operation {
                    0 | 1 => {
                        schedule.add(key, now + Duration::from_secs(seconds), pass);
                        pending.insert((key, pass));
                    }
                    2 => {
                        now += Duration::from_secs(seconds);
                        if let Some((key, pass)) = schedule.pop(now) {
                            prop_assert!(running.insert(key), "runs twice");
                            prop_assert!(pending.remove(&(key, pass)), "{pass:?} of {key}");
                            if pass == Pass::Required && !schedule.deferred.contains_key(&(key, Pass::Optional)) {
                                pending.remove(&(key, Pass::Optional));
                            }
                        }
                    }
                    _ => {
                        if running.remove(&key) {
                            schedule.done(&key);
                        }
                    }
                }
            }
            for key in running {
                schedule.done(&key);
            }
            let left: HashSet<(u8, Pass)> = schedule.at.keys().copied().collect();
            prop_assert_eq!(left, pending);
        }
    }
}
