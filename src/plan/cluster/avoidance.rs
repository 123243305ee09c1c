//! Nodes that failed a job. The job's status records them, so a new leader knows them too, and
//! later attempts avoid them for a while.

use super::placement_request::Avoided;
use super::view::NodeView;
use super::{blocker, clock};
use crate::status::time;
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_crds::{NodeFailure, TrainJobStatus};

/// Maximum number of failed nodes that a job remembers.
pub(super) const MAX_NODES: usize = 128;
/// Pause after the first failure on a node.
pub(super) const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(60);
/// After this long without a failure, a node's pause starts again at its first value.
const FORGET_AFTER: SignedDuration = SignedDuration::from_secs(3600);
/// How long the status remembers a node. What other jobs conclude from it may apply for hours.
const KEPT_FOR: SignedDuration = SignedDuration::from_hours(24);
/// Longest message that is kept, in characters.
const MAX_MESSAGE: usize = 240;
const MAX_REASON: usize = 64;

/// The node stopped reporting.
pub(super) const LOST: &str = "NodeLost";
/// An administrator took the node out of service.
pub(super) const OUT_OF_SERVICE: &str = "NodeOutOfService";
/// The Node was deleted.
pub(super) const GONE: &str = "NodeGone";
/// The pod did not start there, and its kubelet did not report why.
pub(super) const NOT_STARTED: &str = "NotStarted";
/// The scheduler refused the node.
pub(super) const UNSCHEDULABLE: &str = "Unschedulable";

/// A failure that is attributed to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeFault {
    pub node: String,
    /// One word: a constant of this module, or the kubelet's reason.
    pub reason: String,
    pub message: String,
}

/// What other jobs may conclude about a node from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// The node was lost. It is at fault whatever ran there.
    Lost,
    /// The kubelet could not allocate devices that its node offers, such as a GPU that fell off the
    /// bus.
    Refused,
    /// Nothing started. A template can cause this too, so the node is at fault only once the same
    /// template runs elsewhere.
    NotStarted,
}

/// Classifies a failure reason. `None` if the job or other pods may have caused it.
pub fn evidence(reason: &str) -> Option<Evidence> {
    match reason {
        LOST | OUT_OF_SERVICE => Some(Evidence::Lost),
        "UnexpectedAdmissionError" => Some(Evidence::Refused),
        "FailedCreatePodSandBox"
        | "FailedPrepareDynamicResources"
        | "NetworkNotReady"
        | "CreateContainerError"
        | "RunContainerError" => Some(Evidence::NotStarted),
        _ => None,
    }
}

/// Records node failures, newest last.
pub(super) fn record_faults(known: &mut Vec<NodeFailure>, faults: impl IntoIterator<Item = NodeFault>, now: Timestamp) {
    let age = |failure: &NodeFailure| now.duration_since(failure.last_time.0);
    known.retain(|failure| age(failure) < KEPT_FOR);
    for NodeFault { node, reason, message } in faults {
        let reason: String = reason.chars().take(MAX_REASON).collect();
        let before = known.iter().position(|failure| failure.node_name == node).map(|position| known.remove(position));
        let before = before.filter(|before| before.reason == reason && age(before) < FORGET_AFTER);
        known.push(NodeFailure {
            count: before.map_or(1, |before| before.count.saturating_add(1)),
            message: message.chars().take(MAX_MESSAGE).collect(),
            last_time: time(now),
            node_name: node,
            reason,
        });
    }
    known.drain(..known.len().saturating_sub(MAX_NODES));
}

/// When the node's pause ends, and the longest possible pause. `None` if the node's health decides
/// instead.
fn until(failure: &NodeFailure) -> Option<(Timestamp, SignedDuration)> {
    let (factor, max_pause): (i32, _) = match failure.reason.as_str() {
        LOST | OUT_OF_SERVICE | GONE => return None,
        // The scheduler's obstacle may be gone within a minute.
        UNSCHEDULABLE => (2, SignedDuration::from_secs(600)),
        _ => (4, FORGET_AFTER),
    };
    let times = factor.saturating_pow(failure.count.clamp(1, 16).unsigned_abs() - 1);
    let pause = FIRST_PAUSE.saturating_mul(times).min(max_pause);
    Some((failure.last_time.0.saturating_add(pause).unwrap_or(Timestamp::MAX), max_pause))
}

fn is_avoided(failure: &NodeFailure, now: Timestamp) -> bool {
    until(failure).is_some_and(|(until, max_pause)| !clock::is_over(until, max_pause, now))
}

/// Nodes that the job's next attempts avoid, and why. A node that was registered again after its
/// failure is not avoided.
pub fn avoided(
    status: &TrainJobStatus,
    nodes: &BTreeMap<String, NodeView>,
    now: Timestamp,
) -> BTreeMap<String, Avoided> {
    let still_registered =
        |failure: &&NodeFailure| nodes.get(&failure.node_name).is_none_or(|node| node.existed_at(failure.last_time.0));
    let avoidance_of = |failure: &NodeFailure| {
        let is_refusal = failure.reason == UNSCHEDULABLE;
        let forgotten = failure.last_time.0.saturating_add(FORGET_AFTER).unwrap_or(Timestamp::MAX);
        let is_avoided = is_avoided(failure, now);
        let is_last_resort =
            !is_avoided && !is_refusal && until(failure).is_some() && !clock::is_over(forgotten, FORGET_AFTER, now);
        let what_happened =
            if is_refusal { "the scheduler refused it" } else { "a pod of this job could not start there" };
        let reason = format!("{what_happened}: {}", failure.message);
        (is_avoided || is_last_resort).then(|| (failure.node_name.clone(), Avoided { reason, is_last_resort }))
    };
    status.node_failures.iter().filter(still_registered).filter_map(avoidance_of).collect()
}

/// When the first of the avoided nodes may be used again.
pub fn next(status: &TrainJobStatus, now: Timestamp) -> Option<Timestamp> {
    let avoided = status.node_failures.iter().filter(|failure| is_avoided(failure, now));
    avoided.filter_map(until).map(|(until, _)| until).min()
}

/// The scheduler's message without its preemption details, and the field that it refers to.
pub(super) fn scheduler_message(message: &str) -> String {
    let end = [" still not schedulable", " preemption:"].iter().filter_map(|part| message.find(part)).min();
    let message_text: String = message[..end.unwrap_or(message.len())].chars().take(MAX_MESSAGE).collect();
    match blocker::field_of(&message_text) {
        Some(field) => format!("{message_text} ({field})"),
        None => message_text,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn fault(node: &str, reason: &str) -> NodeFault {
        NodeFault { node: node.into(), reason: reason.into(), message: "no".into() }
    }

    /// Pauses for seven failures, each occurring as soon as the previous pause ends.
    fn pauses(reason: &str) -> Vec<i64> {
        let (mut status, mut now, mut pauses) = (TrainJobStatus::default(), 0, Vec::new());
        for _ in 0..7 {
            record_faults(&mut status.node_failures, [fault("n", reason)], at(now));
            assert!(!avoided(&status, &BTreeMap::new(), at(now))["n"].is_last_resort);
            let until = next(&status, at(now)).unwrap();
            pauses.push(until.duration_since(at(now)).as_secs());
            now = until.as_second();
            assert_eq!(next(&status, at(now)), None);
        }
        record_faults(&mut status.node_failures, [fault("n", reason)], at(now + 3600));
        assert_eq!(next(&status, at(now + 3600)), Some(at(now + 3660)), "forgotten after an hour");
        pauses
    }

    #[test]
    fn pauses_grow_with_each_failure_and_old_failures_are_forgotten() {
        assert_eq!(pauses(UNSCHEDULABLE), [60, 120, 240, 480, 600, 600, 600]);
        assert_eq!(pauses("UnexpectedAdmissionError")[..4], [60, 240, 960, 3600]);
    }

    #[test]
    fn a_node_that_started_nothing_is_the_last_resort_for_an_hour() {
        let mut status = TrainJobStatus::default();
        let all = [fault("ill", "FailedCreatePodSandBox"), fault("full", UNSCHEDULABLE), fault("dead", LOST)];
        record_faults(&mut status.node_failures, all, at(0));
        let firm = |reason: &str| Avoided { reason: reason.into(), is_last_resort: false };
        let ill = "a pod of this job could not start there: no";
        let both = [("ill".to_string(), firm(ill)), ("full".to_string(), firm("the scheduler refused it: no"))];
        assert_eq!(avoided(&status, &BTreeMap::new(), at(59)), both.into());
        let last = Avoided { reason: ill.into(), is_last_resort: true };
        assert_eq!(avoided(&status, &BTreeMap::new(), at(60)), [("ill".to_string(), last)].into());
        assert_eq!(avoided(&status, &BTreeMap::new(), at(3600)), BTreeMap::new());
        let again = NodeView { registered: Some(at(1)), ..NodeView::default() };
        let avoided = avoided(&status, &[("ill".to_string(), again)].into(), at(59));
        assert_eq!(avoided.into_keys().collect::<Vec<_>>(), ["full"], "it was repaired");
    }

    #[test]
    fn the_status_remembers_the_newest_failures_for_a_day() {
        let mut known = Vec::new();
        record_faults(&mut known, (0..MAX_NODES + 2).map(|node| fault(&node.to_string(), LOST)), at(0));
        assert_eq!((known.len(), known[0].node_name.as_str()), (MAX_NODES, "2"));
        record_faults(&mut known, [fault("2", LOST)], at(1));
        assert_eq!(known.last().map(|last| (last.node_name.as_str(), last.count)), Some(("2", 2)));
        record_faults(&mut known, [], at(86_400));
        assert_eq!(known.len(), 1);
    }

    #[test]
    fn the_message_keeps_only_the_part_about_the_node() {
        let rest = "still not schedulable, preemption: 0/3 nodes are available.";
        let message = format!("0/3 nodes are available: 1 cannot allocate all claims. {rest}");
        assert_eq!(scheduler_message(&message), "0/3 nodes are available: 1 cannot allocate all claims.");
        let message = "0/3 nodes are available: 1 node(s) didn't match pod anti-affinity rules. preemption: 0/3 nodes are available.";
        let field = "spec.template.spec.affinity.podAntiAffinity";
        let message_text = "0/3 nodes are available: 1 node(s) didn't match pod anti-affinity rules.";
        assert_eq!(scheduler_message(message), format!("{message_text} ({field})"));
    }
}
