//! Circuit breaker for mass node outages: nodes that stop reporting together are more likely cut
//! off from the API server than dead.

use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;

/// Nodes that stop reporting within this time count as one outage.
const OUTAGE_WINDOW: SignedDuration = SignedDuration::from_secs(60);
/// Fewer nodes never trip the breaker, because two nodes may well die together.
const MIN_NODES: usize = 3;

/// Nodes that do not report, and the state of the circuit breaker.
#[derive(Debug, Default)]
pub struct MassOutage {
    silent: BTreeMap<String, Timestamp>,
    reason: Option<String>,
    ended: Option<Timestamp>,
}

impl MassOutage {
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
    pub fn update(&mut self, all: usize, percent: u8, now: Timestamp) {
        let mut since: Vec<Timestamp> = self.silent.values().copied().collect();
        since.sort_unstable();
        let together = |first: usize| {
            let end = since[first].saturating_add(OUTAGE_WINDOW).unwrap_or(Timestamp::MAX);
            since[first..].partition_point(|time| *time <= end)
        };
        let largest = (0..since.len()).map(together).max().unwrap_or(0);
        let is_tripped = percent > 0 && largest >= MIN_NODES && largest * 100 > all * usize::from(percent);
        let next = is_tripped.then(|| {
            format!(
                "{largest} of {all} nodes stopped reporting within a minute, so no job is restarted for that until they report; if a \
                 node is really lost, give it the taint node.kubernetes.io/out-of-service, or delete it"
            )
        });
        if self.reason.is_some() && next.is_none() {
            self.ended = Some(now);
        }
        self.reason = next;
    }

    /// The reason why no silent node is given up; `None` unless the breaker has tripped.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// When the breaker was last reset.
    pub fn ended(&self) -> Option<Timestamp> {
        self.ended
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
    fn trips(silent: &[i64], percent: u8) -> bool {
        let mut outage = MassOutage::default();
        for (node, since) in silent.iter().enumerate() {
            outage.set(&node.to_string(), Some(at(*since)));
        }
        outage.update(20, percent, at(1000));
        outage.reason().is_some()
    }

    #[test]
    fn a_share_of_nodes_going_silent_within_a_minute_trips_the_breaker() {
        for (silent, percent, is_tripped) in [
            (&[0, 1, 2, 3, 60][..], 20, true),
            (&[0, 1, 2, 60], 20, false),
            (&[0, 1, 2, 3, 61], 20, false),
            (&[0, 20, 40, 60, 80, 100, 120], 20, false),
            (&[0, 61, 62, 63, 64, 65], 20, true),
            (&[0, 1], 5, false),
            (&[0, 1, 2], 10, true),
            (&[0, 1, 2, 3, 4, 5, 6, 7], 0, false),
        ] {
            assert_eq!(trips(silent, percent), is_tripped, "{silent:?} at {percent} %");
        }
    }

    #[test]
    fn the_breaker_resets_when_nodes_report_again() {
        let mut outage = MassOutage::default();
        (0..5).for_each(|node| outage.set(&node.to_string(), Some(at(0))));
        outage.update(20, 20, at(1));
        assert!(outage.reason().unwrap().starts_with("5 of 20 nodes stopped reporting within a minute"));
        outage.set("0", None);
        outage.update(20, 20, at(500));
        assert_eq!((outage.reason(), outage.ended()), (None, Some(at(500))));
        outage.update(20, 20, at(501));
        assert_eq!(outage.ended(), Some(at(500)));
    }
}
