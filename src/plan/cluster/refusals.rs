//! What a job remembers of nodes that the scheduler refused: such a node is not asked again for a while, which grows with each refusal.

use super::{clock, hindrance};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;

/// Pause after the first refusal; each further one is twice as long.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(60);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(600);
/// A node that was refused this long ago is like any other.
const FORGOTTEN: SignedDuration = SignedDuration::from_secs(3600);
/// Longest part of the scheduler's words that is kept, characters.
const LONGEST: usize = 240;

#[derive(Debug, Clone, PartialEq)]
struct Refusal {
    words: String,
    count: u32,
    at: Timestamp,
}

impl Refusal {
    fn until(&self) -> Timestamp {
        let pause = FIRST_PAUSE.saturating_mul(1 << (self.count - 1).min(16)).min(LONGEST_PAUSE);
        self.at.saturating_add(pause).unwrap_or(Timestamp::MAX)
    }
}

/// By node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Refusals(BTreeMap<String, Refusal>);

impl Refusals {
    /// The scheduler refused a node.
    pub fn add(&mut self, node: &str, words: &str, now: Timestamp) {
        self.0.retain(|_, refusal| now.duration_since(refusal.at) < FORGOTTEN);
        let count = self.0.get(node).map_or(0, |before| before.count) + 1;
        self.0.insert(node.to_string(), Refusal { words: words.to_string(), count, at: now });
    }

    fn current(&self, now: Timestamp) -> impl Iterator<Item = (&String, &Refusal)> {
        self.0.iter().filter(move |(_, refusal)| !clock::is_over(refusal.until(), LONGEST_PAUSE, now))
    }

    /// Nodes that are not asked now, and why.
    pub fn left_out(&self, now: Timestamp) -> BTreeMap<String, String> {
        let why = |refusal: &Refusal| format!("the scheduler refused it: {}", refusal.words);
        self.current(now).map(|(node, refusal)| (node.clone(), why(refusal))).collect()
    }

    /// When the next of them may be asked again.
    pub fn next(&self, now: Timestamp) -> Option<Timestamp> {
        self.current(now).map(|(_, refusal)| refusal.until()).min()
    }
}

/// The scheduler's words without what it says of preemption, and the field that they are about.
pub(super) fn words(message: &str) -> String {
    let end = [" still not schedulable", " preemption:"].iter().filter_map(|part| message.find(part)).min();
    let said: String = message[..end.unwrap_or(message.len())].chars().take(LONGEST).collect();
    match hindrance::field_of(&said) {
        Some(field) => format!("{said} ({field})"),
        None => said,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_pause_grows_with_each_refusal_and_an_old_one_is_forgotten() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let mut refusals = Refusals::default();
        let mut now = 0;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            refusals.add("n", "no", at(now));
            let until = refusals.next(at(now)).unwrap();
            pauses.push(until.duration_since(at(now)).as_secs());
            assert_eq!(refusals.left_out(at(now))["n"], "the scheduler refused it: no");
            now = until.as_second();
            assert!(refusals.left_out(at(now)).is_empty() && refusals.next(at(now)).is_none());
        }
        assert_eq!(pauses, [60, 120, 240, 480, 600, 600, 600]);
        refusals.add("n", "no", at(now + 3600));
        assert_eq!(refusals.next(at(now + 3600)), Some(at(now + 3660)));
    }

    #[test]
    fn the_words_are_those_about_the_node() {
        let rest = "still not schedulable, preemption: 0/3 nodes are available.";
        let message = format!("0/3 nodes are available: 1 cannot allocate all claims. {rest}");
        assert_eq!(words(&message), "0/3 nodes are available: 1 cannot allocate all claims.");
        let message = "0/3 nodes are available: 1 node(s) didn't match pod anti-affinity rules. preemption: 0/3 nodes are available.";
        let field = "spec.template.spec.affinity.podAntiAffinity";
        let said = "0/3 nodes are available: 1 node(s) didn't match pod anti-affinity rules.";
        assert_eq!(words(message), format!("{said} ({field})"));
    }
}
