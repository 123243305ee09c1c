//! Nodes that ended attempts by faults of their own: one that did so again and again is avoided by all jobs until it was quiet for a time.
//!
//! Only what no user can bring about counts: a node that is lost or gone. The memory is the controller's; after a change of the leader it
//! begins again.

use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, VecDeque};

/// Incidents within [`PERIOD`] after which a node is avoided.
const MOST: usize = 3;
const PERIOD: SignedDuration = SignedDuration::from_hours(1);
/// A node that is lost ends all its jobs within this time: one incident.
const TOGETHER: SignedDuration = SignedDuration::from_secs(120);

#[derive(Debug, Clone, PartialEq)]
struct Incident {
    at: Timestamp,
    cause: String,
}

/// The last incidents by node.
#[derive(Debug, Default)]
pub struct Incidents(BTreeMap<String, VecDeque<Incident>>);

impl Incidents {
    /// A node ended an attempt.
    pub fn add(&mut self, node: &str, cause: &str, now: Timestamp) {
        self.0.retain(|_, known| known.back().is_some_and(|last| now.duration_since(last.at) < PERIOD));
        let known = self.0.entry(node.to_string()).or_default();
        if known.back().is_some_and(|last| now.duration_since(last.at) < TOGETHER) {
            return;
        }
        known.push_back(Incident { at: now, cause: cause.to_string() });
        if known.len() > MOST {
            known.pop_front();
        }
    }

    /// Until when a node is avoided; `None`: it is not.
    fn until(known: &VecDeque<Incident>, now: Timestamp) -> Option<Timestamp> {
        let (first, last) = (known.front()?, known.back()?);
        let is_often = known.len() == MOST && last.at.duration_since(first.at) < PERIOD;
        last.at.saturating_add(PERIOD).ok().filter(|until| is_often && *until > now)
    }

    fn avoided(&self, now: Timestamp) -> impl Iterator<Item = (&String, &VecDeque<Incident>, Timestamp)> {
        self.0.iter().filter_map(move |(node, known)| Some((node, known, Self::until(known, now)?)))
    }

    /// Nodes that are avoided, and why.
    pub fn left_out(&self, now: Timestamp) -> impl Iterator<Item = (String, String)> {
        self.avoided(now).map(|(node, known, until)| {
            let last = known.back().map(|last| last.cause.as_str()).unwrap_or_default();
            (
                node.clone(),
                format!(
                    "it ended attempts {MOST} times within an hour, last with \"{last}\", and is avoided until {until}"
                ),
            )
        })
    }

    /// When the next of them may be used again.
    pub fn next(&self, now: Timestamp) -> Option<Timestamp> {
        self.avoided(now).map(|(.., until)| until).min()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_node_that_fails_three_times_in_an_hour_is_avoided_until_it_was_quiet_for_one() {
        let at = |minute: i64| Timestamp::from_second(60 * minute).unwrap();
        let mut incidents = Incidents::default();
        for minute in [0, 1, 20] {
            incidents.add("n", "the node is lost", at(minute));
        }
        assert_eq!(incidents.left_out(at(20)).count(), 0, "that of the first two minutes was one");
        incidents.add("n", "the node is lost", at(40));
        incidents.add("other", "the node is gone", at(41));
        let left_out: BTreeMap<String, String> = incidents.left_out(at(99)).collect();
        let why = "it ended attempts 3 times within an hour, last with \"the node is lost\", and is avoided until 1970-01-01T01:40:00Z";
        assert_eq!(left_out, BTreeMap::from([("n".to_string(), why.to_string())]));
        assert_eq!(incidents.next(at(99)), Some(at(100)));
        assert_eq!((incidents.left_out(at(100)).count(), incidents.next(at(100))), (0, None));
        incidents.add("n", "the node is lost", at(101));
        assert_eq!(incidents.left_out(at(101)).count(), 0, "it was quiet for an hour, and begins again");
    }
}
