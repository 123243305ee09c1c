//! Circuit breaker for mass node outages: nodes that stop reporting together are more likely cut
//! off from the API server than dead.

use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;

/// Nodes that stop reporting within this time count as one outage.
const TOGETHER: SignedDuration = SignedDuration::from_secs(60);
/// Fewer nodes never trip the breaker, because two nodes may well die together.
const FEWEST: usize = 3;

/// Nodes that do not report, and the state of the circuit breaker.
#[derive(Debug, Default)]
pub struct Fleet {
    silent: BTreeMap<String, Timestamp>,
    brake: Option<String>,
    released: Option<Timestamp>,
}

impl Fleet {
    /// Records since when a node has not reported; `None` if it reports, was deleted, or an
    /// administrator declared it out of service.
    pub fn set(&mut self, node: &str, silent_since: Option<Timestamp>) {
        match silent_since {
            Some(since) => drop(self.silent.insert(node.to_string(), since)),
            None => drop(self.silent.remove(node)),
        }
    }

    /// Trips the breaker if more than `percent` percent of `all` nodes stopped reporting together,
    /// and resets it otherwise. 0 disables it.
    pub fn look(&mut self, all: usize, percent: u8, now: Timestamp) {
        let mut since: Vec<Timestamp> = self.silent.values().copied().collect();
        since.sort_unstable();
        let together = |first: usize| {
            let end = since[first].saturating_add(TOGETHER).unwrap_or(Timestamp::MAX);
            since[first..].partition_point(|time| *time <= end)
        };
        let most = (0..since.len()).map(together).max().unwrap_or(0);
        let is_braked = percent > 0 && most >= FEWEST && most * 100 > all * usize::from(percent);
        let next = is_braked.then(|| {
            format!(
                "{most} of {all} nodes stopped reporting within a minute, so nothing is started again for that until they report; a node \
                 that is really lost: give it the taint node.kubernetes.io/out-of-service, or delete it"
            )
        });
        if self.brake.is_some() && next.is_none() {
            self.released = Some(now);
        }
        self.brake = next;
    }

    /// The reason why no silent node is given up; `None` unless the breaker has tripped.
    pub fn brake(&self) -> Option<&str> {
        self.brake.as_deref()
    }

    /// When the breaker was last reset.
    pub fn released(&self) -> Option<Timestamp> {
        self.released
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Whether the breaker trips in a fleet of 20 nodes. `silent` has the second since which each
    /// silent node does not report.
    fn brakes(silent: &[i64], percent: u8) -> bool {
        let mut fleet = Fleet::default();
        for (node, since) in silent.iter().enumerate() {
            fleet.set(&node.to_string(), Some(at(*since)));
        }
        fleet.look(20, percent, at(1000));
        fleet.brake().is_some()
    }

    #[test]
    fn a_share_of_the_fleet_that_goes_silent_within_a_minute_brakes() {
        for (silent, percent, brake) in [
            (&[0, 1, 2, 3, 60][..], 20, true),
            (&[0, 1, 2, 60], 20, false),
            (&[0, 1, 2, 3, 61], 20, false),
            (&[0, 20, 40, 60, 80, 100, 120], 20, false),
            (&[0, 61, 62, 63, 64, 65], 20, true),
            (&[0, 1], 5, false),
            (&[0, 1, 2], 10, true),
            (&[0, 1, 2, 3, 4, 5, 6, 7], 0, false),
        ] {
            assert_eq!(brakes(silent, percent), brake, "{silent:?} at {percent} %");
        }
    }

    #[test]
    fn the_brake_is_taken_off_when_they_are_back_and_the_last_ones_get_their_grace() {
        let mut fleet = Fleet::default();
        (0..5).for_each(|node| fleet.set(&node.to_string(), Some(at(0))));
        fleet.look(20, 20, at(1));
        assert!(fleet.brake().unwrap().starts_with("5 of 20 nodes stopped reporting within a minute"));
        fleet.set("0", None);
        fleet.look(20, 20, at(500));
        assert_eq!((fleet.brake(), fleet.released()), (None, Some(at(500))));
        fleet.look(20, 20, at(501));
        assert_eq!(fleet.released(), Some(at(500)));
    }
}
