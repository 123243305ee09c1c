//! Work queue of keys: each key once, at its earliest time, and never processed concurrently. A key
//! may have two entries: one that is always processed, and one that is processed only if it is
//! worthwhile by then.
//!
//! [`Schedule`] implements the rules, with time as a parameter; [`Queue`] lets tasks wait for due
//! keys. A task that takes a key holds a [`Turn`], which releases the key however the work ends.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// First backoff after a failure; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Upper bound on the backoff in the first minute of failures, and lower bound after it.
const MINUTE_PAUSE: Duration = Duration::from_secs(5);
/// Upper bound on the backoff.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Failures are expected to pass within this time.
const MINUTE: Duration = Duration::from_secs(60);

/// Whether a due key must be processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Look {
    InAnyCase,
    /// Only if it is worthwhile by then, which the task that takes the key decides.
    IfWorthIt,
}

impl Look {
    fn other(self) -> Look {
        match self {
            Look::InAnyCase => Look::IfWorthIt,
            Look::IfWorthIt => Look::InAnyCase,
        }
    }
}

/// Due times of the keys.
#[derive(Debug)]
pub(super) struct Schedule<K> {
    due: BTreeSet<(Instant, u64, K, Look)>,
    at: HashMap<(K, Look), (Instant, u64)>,
    running: HashSet<K>,
    /// Entries for keys that are being processed, scheduled again when these are done.
    again: HashMap<(K, Look), Instant>,
    failing: HashMap<K, Failing>,
    sequence: u64,
}

#[derive(Debug, Clone, Copy)]
struct Failing {
    since: Instant,
    pause: Duration,
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Schedule {
            due: BTreeSet::new(),
            at: HashMap::new(),
            running: HashSet::new(),
            again: HashMap::new(),
            failing: HashMap::new(),
            sequence: 0,
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> Schedule<K> {
    /// Schedules a key for this time, unless the same entry is already scheduled earlier.
    pub fn add(&mut self, key: K, at: Instant, look: Look) {
        let entry = (key, look);
        if self.running.contains(&entry.0) {
            let again = self.again.entry(entry).or_insert(at);
            *again = (*again).min(at);
            return;
        }
        if self.at.get(&entry).is_some_and(|(before, _)| *before <= at) {
            return;
        }
        self.take(&entry);
        self.sequence += 1;
        self.at.insert(entry.clone(), (at, self.sequence));
        self.due.insert((at, self.sequence, entry.0, look));
    }

    /// Removes an entry from the schedule. Returns its time.
    fn take(&mut self, entry: &(K, Look)) -> Option<Instant> {
        let (at, sequence) = self.at.remove(entry)?;
        self.due.remove(&(at, sequence, entry.0.clone(), entry.1));
        Some(at)
    }

    /// Takes a due key, which is then processed until [`Schedule::done`]. One pass serves both
    /// entries of the key if both are due.
    pub fn pop(&mut self, now: Instant) -> Option<(K, Look)> {
        if self.due.first().is_none_or(|(at, ..)| *at > now) {
            return None;
        }
        let (_, _, key, mut look) = self.due.pop_first()?;
        self.at.remove(&(key.clone(), look));
        let other = (key.clone(), look.other());
        if let Some(at) = self.take(&other) {
            if at <= now {
                look = Look::InAnyCase;
            } else {
                self.again.insert(other, at);
            }
        }
        self.running.insert(key.clone());
        Some((key, look))
    }

    /// Removes all scheduled entries.
    pub fn clear(&mut self) {
        self.due.clear();
        self.at.clear();
    }

    /// Marks a key as no longer processed.
    pub fn done(&mut self, key: &K) {
        self.running.remove(key);
        for look in [Look::InAnyCase, Look::IfWorthIt] {
            if let Some(at) = self.again.remove(&(key.clone(), look)) {
                self.add(key.clone(), at, look);
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
        let failing = self.failing.entry(key.clone()).or_insert(Failing { since: now, pause: FIRST_PAUSE / 2 });
        let is_new = now.duration_since(failing.since) < MINUTE;
        let next = failing.pause * 2;
        failing.pause = if is_new { next.min(MINUTE_PAUSE) } else { next.clamp(MINUTE_PAUSE, LONGEST_PAUSE) };
        now + failing.pause
    }

    /// Resets the backoff of a key.
    pub fn succeeded(&mut self, key: &K) {
        self.failing.remove(key);
    }
}

/// A [`Schedule`] shared by tasks.
#[derive(Debug, Clone)]
pub(super) struct Queue<K> {
    schedule: Arc<Mutex<Schedule<K>>>,
    changed: Arc<Notify>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Queue { schedule: Arc::default(), changed: Arc::default() }
    }
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Schedule<K>) -> T) -> T {
        change(&mut self.schedule.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Schedules a key that must be processed then.
    pub fn add(&self, key: K, at: Instant) {
        self.look(key, at, Look::InAnyCase);
    }

    /// See [`Schedule::add`].
    pub fn look(&self, key: K, at: Instant, look: Look) {
        self.with(|schedule| schedule.add(key, at, look));
        self.changed.notify_one();
    }

    /// Waits for the next due key. Cancel-safe.
    pub async fn next(&self) -> Turn<K> {
        loop {
            let (key, due) = self.with(|schedule| (schedule.pop(Instant::now()), schedule.next_due()));
            match (key, due) {
                (Some((key, look)), _) => return Turn { key, look, queue: self.clone() },
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
            schedule.add(key.clone(), at, Look::InAnyCase);
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
pub(super) struct Turn<K: Clone + Eq + Hash + Ord> {
    key: K,
    pub look: Look,
    queue: Queue<K>,
}

impl<K: Clone + Eq + Hash + Ord> Deref for Turn<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.key
    }
}

impl<K: Clone + Eq + Hash + Ord> Drop for Turn<K> {
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
        schedule.add("a", at(5), Look::InAnyCase);
        schedule.add("a", at(3), Look::InAnyCase);
        schedule.add("b", at(4), Look::InAnyCase);
        schedule.add("a", at(9), Look::InAnyCase);
        assert_eq!(schedule.next_due(), Some(at(3)));
        assert_eq!(schedule.pop(at(2)), None);
        let popped: Vec<&str> = std::iter::from_fn(|| schedule.pop(at(9))).map(|(key, _)| key).collect();
        assert_eq!(popped, ["a", "b"]);
    }

    #[test]
    fn what_is_added_while_it_runs_runs_once_more() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.add("a", now, Look::InAnyCase);
        assert_eq!(schedule.pop(now), Some(("a", Look::InAnyCase)));
        schedule.add("a", now, Look::InAnyCase);
        schedule.add("a", now, Look::InAnyCase);
        assert_eq!(schedule.pop(now), None, "it runs");
        schedule.done(&"a");
        assert_eq!((schedule.pop(now), schedule.pop(now)), (Some(("a", Look::InAnyCase)), None));
    }

    #[test]
    fn a_look_that_may_be_left_out_leaves_the_other_one_in_its_place() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        schedule.add("a", at(5), Look::InAnyCase);
        schedule.add("a", at(3), Look::IfWorthIt);
        assert_eq!(schedule.pop(at(4)), Some(("a", Look::IfWorthIt)));
        schedule.add("a", at(4), Look::IfWorthIt);
        schedule.done(&"a");
        assert_eq!(schedule.pop(at(6)), Some(("a", Look::InAnyCase)), "one look for both, which is not left out");
        schedule.done(&"a");
        assert_eq!((schedule.pop(at(9)), schedule.next_due()), (None, None));
    }

    #[test]
    fn failures_are_tried_less_and_less_often() {
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
        assert_eq!(schedule.failed(&"a", now), now + FIRST_PAUSE);
    }

    #[tokio::test]
    async fn a_turn_ends_however_its_work_ends() {
        let queue = Queue::default();
        queue.add("a", Instant::now());
        let soon = async |queue: &Queue<&'static str>| {
            tokio::time::timeout(Duration::from_secs(30), queue.next()).await.expect("a key within 30 s")
        };
        let turn = soon(&queue).await;
        queue.add("a", Instant::now());
        queue.add("b", Instant::now());
        assert_eq!(*soon(&queue).await, "b", "a runs");
        let waits = tokio::spawn({
            let queue = queue.clone();
            async move { *queue.next().await }
        });
        drop(turn);
        assert_eq!(tokio::time::timeout(Duration::from_secs(30), waits).await.unwrap().unwrap(), "a");
        queue.add("c", Instant::now());
        let turn = soon(&queue).await;
        let panics = tokio::spawn(async move { panic!("planned, while {} runs", *turn) });
        assert!(panics.await.is_err());
        assert_eq!(*soon(&queue).await, "c", "after its pause");
    }

    proptest! {
        #[test]
        fn keys_come_in_the_order_in_which_they_are_due(times in prop::collection::vec((0_u8..20, 0_u64..9), 1..60)) {
            let (mut schedule, start) = (Schedule::default(), Instant::now());
            let mut earliest: BTreeMap<u8, u64> = BTreeMap::new();
            for (key, seconds) in times {
                schedule.add(key, start + Duration::from_secs(seconds), Look::InAnyCase);
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
        fn nothing_is_lost_and_nothing_runs_twice_at_a_time(
            steps in prop::collection::vec((0_u8..4, 0_u8..4, 0_u64..5), 1..200),
        ) {
            let (mut schedule, start) = (Schedule::default(), Instant::now());
            let (mut now, mut running, mut owed) = (start, HashSet::new(), HashSet::new());
            for (key, operation, seconds) in steps {
                let look = if operation == 0 { Look::InAnyCase } else { Look::IfWorthIt };
                match operation {
                    0 | 1 => {
                        schedule.add(key, now + Duration::from_secs(seconds), look);
                        owed.insert((key, look));
                    }
                    2 => {
                        now += Duration::from_secs(seconds);
                        if let Some((key, look)) = schedule.pop(now) {
                            prop_assert!(running.insert(key), "runs twice");
                            prop_assert!(owed.remove(&(key, look)), "{look:?} of {key}");
                            if look == Look::InAnyCase && !schedule.again.contains_key(&(key, Look::IfWorthIt)) {
                                owed.remove(&(key, Look::IfWorthIt));
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
            let left: HashSet<(u8, Look)> = schedule.at.keys().copied().collect();
            prop_assert_eq!(left, owed);
        }
    }
}
