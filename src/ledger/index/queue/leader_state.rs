//! State that the leader passes to the next leader because no object holds it: since when the head
//! of the queue holds its reservation, and which jobs held nodes in vain. It is an annotation of
//! the Lease, which the leader renews anyway and tenants cannot change.

use crate::index::Index;
use crate::job::{JobId, Key};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Upper bound on entries of each kind, because a Lease must stay small.
const MAX_ENTRIES: usize = 32;

/// The state, as stored in the annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LeaderState {
    /// UID of the job that holds the reservation, and since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<(String, Timestamp)>,
    /// Jobs that held a reservation for too long, and until when they get none, by
    /// `namespace/name`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    rests: BTreeMap<String, Timestamp>,
    /// Times at which jobs held nodes in vain, by namespace and UID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    refusals: BTreeMap<String, BTreeMap<String, Timestamp>>,
}

impl LeaderState {
    /// Parses the state written by an earlier leader. Invalid text, perhaps from another version,
    /// is ignored.
    pub fn parse(text: &str) -> LeaderState {
        serde_json::from_str(text).unwrap_or_default()
    }

    /// The state as JSON; `None` if it is empty.
    pub fn to_json(&self) -> Option<String> {
        (*self != LeaderState::default()).then(|| serde_json::to_string(self).ok()).flatten()
    }
}

impl Index {
    pub fn leader_state(&self) -> LeaderState {
        let holder = self.queue.reservation.as_ref().map(|held| (held.job.uid.clone(), held.since));
        let rests =
            self.queue.cooldowns.iter().take(MAX_ENTRIES).map(|(key, until)| (key.to_string(), *until)).collect();
        LeaderState {
            holder: holder.or_else(|| self.queue.previous_holder.clone()),
            rests,
            refusals: self.refusals.latest(MAX_ENTRIES),
        }
    }

    /// Takes over the state of the previous leader.
    pub fn restore(&mut self, state: LeaderState) {
        let LeaderState { holder, rests, refusals } = state;
        match (&mut self.queue.reservation, &holder) {
            (Some(held), Some((uid, since))) if held.job.uid == *uid => held.since = held.since.min(*since),
            _ => self.queue.previous_holder = holder,
        }
        let rests = rests.into_iter().filter_map(|(name, until)| {
            let (namespace, name) = name.split_once('/')?;
            Some((Key { namespace: namespace.into(), name: name.into() }, until))
        });
        self.queue.cooldowns.extend(rests);
        for (namespace, jobs) in refusals {
            for (uid, at) in jobs {
                self.refusals.record(JobId { namespace: namespace.clone(), uid }, at);
            }
        }
    }

    /// Since when a job held the reservation under an earlier leader.
    pub(crate) fn take_held_since(&mut self, job: &JobId) -> Option<Timestamp> {
        self.queue.previous_holder.take_if(|(uid, _)| *uid == job.uid).map(|(_, since)| since)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    fn id(namespace: &str, uid: &str) -> JobId {
        JobId { namespace: namespace.into(), uid: uid.into() }
    }

    /// Regression test: after a change of leader, a tenant whose three jobs had held nodes in vain
    /// was first in the queue again.
    #[test]
    fn the_next_leader_restores_demotions_and_cooldowns() {
        let (mut last, mut next) = (Index::default(), Index::default());
        assert_eq!(last.leader_state().to_json(), None);
        (0..5).for_each(|number| last.refusals.record(id("evil", &format!("j{number}")), at(number)));
        let rests = Key { namespace: "a".into(), name: "big".into() };
        last.queue.cooldowns.insert(rests.clone(), at(60));
        last.queue.previous_holder = Some(("u".into(), at(7)));
        let text = last.leader_state().to_json().unwrap();
        next.restore(LeaderState::parse(&text));
        assert!(next.refusals.is_demoted("evil", at(10)) && !next.refusals.is_demoted("good", at(10)));
        assert_eq!(next.cooldown_until(&rests), Some(at(60)));
        assert_eq!(next.leader_state(), last.leader_state(), "the state survives another change of leader");
        assert_eq!((next.take_held_since(&id("a", "other")), next.take_held_since(&id("a", "u"))), (None, Some(at(7))));
        next.restore(LeaderState::parse("{\"refusals\": 7}"));
        assert!(next.refusals.is_demoted("evil", at(10)), "invalid state is ignored");
    }

    #[test]
    fn the_state_is_bounded_to_the_latest_refusals() {
        let mut index = Index::default();
        for number in 0..100 {
            (0..9).for_each(|job| {
                index.refusals.record(id(&format!("n{number:03}"), &format!("j{job}")), at(number * 10 + job))
            });
        }
        let LeaderState { refusals, .. } = index.leader_state();
        assert_eq!((refusals.len(), refusals.keys().next().map(String::as_str)), (MAX_ENTRIES, Some("n068")));
        assert!(refusals.values().all(|jobs| jobs.len() == 3 && jobs.contains_key("j8")));
    }
}
