//! Waits for pods of older attempts that may still run when the next attempt could start. A program
//! that does not fence its files must not run twice: both attempts would write the same
//! checkpoints, hold the same locks, or listen on the same port.
//!
//! All inputs are pods and nodes, so a new leader decides like its predecessor.

use super::attempt::Attempt;
use super::view::PodView;
use super::{JobSnapshot, Silence};
use jiff::{SignedDuration, Timestamp};
use std::cmp::Reverse;
use switchyard_core::units::plural;
use switchyard_crds::Replacement;

/// Time for the kubelet to report that containers have ended, after it killed them at the end of
/// the grace period.
const REPORT_GRACE: SignedDuration = SignedDuration::from_secs(30);

/// A pod of an older attempt that may still run.
struct OldPod<'a> {
    pod: &'a PodView,
    /// When the next attempt stops waiting for it, `None` if unknown.
    until: Option<Timestamp>,
    /// Source of that time, or why there is none.
    reason: String,
}

impl OldPod<'_> {
    fn is_awaited(&self, now: Timestamp) -> bool {
        // However far in the future it is: a clock that was set back must not start a second
        // writer.
        self.until.is_none_or(|until| until > now)
    }

    fn name(&self) -> String {
        let on = self.pod.node.as_ref().map_or_else(String::new, |node| format!(" on node {node}"));
        format!("pod {} of attempt {}{on}", self.pod.name, self.pod.attempt)
    }
}

/// A wait for older pods.
pub(super) struct Wait {
    /// `None` if the pods are not bound and disappear as soon as they are deleted.
    pub text: Option<String>,
    /// When it ends or must be rechecked.
    pub wake: Timestamp,
}

/// The wait for pods of older attempts, `None` if this attempt may start.
pub(super) fn wait(attempt: &Attempt<'_>) -> Option<Wait> {
    let now = attempt.now();
    let awaited: Vec<OldPod<'_>> = old_pods(attempt).filter(|old_pod| old_pod.is_awaited(now)).collect();
    let longest = |old_pod: &&OldPod<'_>| {
        (old_pod.pod.node.is_some(), old_pod.until.unwrap_or(Timestamp::MAX), Reverse(old_pod.pod.node_rank))
    };
    let last = awaited.iter().max_by_key(longest)?;
    let is_on_node = awaited.iter().any(|old_pod| old_pod.pod.node.is_some());
    let text = format!("attempt {} starts once {} has ended", attempt.number, last.name());
    let text = match last.until {
        Some(until) => format!("{text}, or at {until}, {}", last.reason),
        None if last.reason.is_empty() => text,
        None => format!("{text}: {}", last.reason),
    };
    let more = awaited.len() - 1;
    let others = (more > 0).then(|| format!("; it waits for {more} more pod{}", plural(more as u64)));
    // The end of a mass outage does not show as a change of this job's nodes, so recheck after a
    // while.
    let later = now.saturating_add(attempt.snapshot.silence.grace).unwrap_or(Timestamp::MAX);
    let text = Some(text + &others.unwrap_or_default()).filter(|_| is_on_node);
    Some(Wait { text, wake: last.until.unwrap_or(later) })
}

/// Describes pods of older attempts that may still run but whose wait is over. `None` if there are
/// none.
pub(super) fn overlap_warning(attempt: &Attempt<'_>) -> Option<String> {
    let mut unawaited = old_pods(attempt).filter(|old_pod| !old_pod.is_awaited(attempt.now()));
    let first = unawaited.next()?;
    let since = first.until.map_or_else(String::new, |until| format!(" since {until}, {}", first.reason));
    let text = format!("{} may still run; attempt {} no longer waits for it{since}", first.name(), attempt.number);
    let more = unawaited.count();
    let others = (more > 0).then(|| format!("; so may {more} more pod{}", plural(more as u64)));
    Some(text + &others.unwrap_or_default())
}

fn old_pods<'a>(attempt: &'a Attempt<'_>) -> impl Iterator<Item = OldPod<'a>> {
    let JobSnapshot { job, pods, .. } = attempt.snapshot;
    let counts = job.spec.replacement() == Replacement::AfterTermination;
    let older = pods.iter().copied().filter(move |pod| counts && pod.attempt < attempt.number && pod.can_run());
    older.map(|pod| old_pod(attempt, pod))
}

fn old_pod<'a>(attempt: &Attempt<'_>, pod: &'a PodView) -> OldPod<'a> {
    let Silence { grace, mass_outage, .. } = attempt.snapshot.silence;
    let (Some(name), Some(deletion)) = (&pod.node, &pod.deletion) else {
        return OldPod { pod, until: None, reason: String::new() };
    };
    let after = |time: Timestamp, pause| Some(time.saturating_add(pause).unwrap_or(Timestamp::MAX));
    let after_node_grace = |why: String| {
        let reason = format!("{} s after it was deleted: {why}", grace.as_secs());
        (after(deletion.requested, grace), reason)
    };
    let (until, reason) = match attempt.snapshot.nodes.get(name) {
        None => after_node_grace(format!("node {name} is gone")),
        Some(node) if node.out_of_service => {
            (Some(deletion.requested), format!("when it was deleted: an administrator took node {name} out of service"))
        }
        Some(node) => match (node.silent_since, mass_outage) {
            (None, _) => {
                let seconds = REPORT_GRACE.as_secs();
                (after(deletion.due, REPORT_GRACE), format!("{seconds} s after the end of its grace period"))
            }
            (Some(_), Some(mass_outage)) => (None, mass_outage.to_string()),
            (Some(since), None) => after_node_grace(format!("node {name} has not reported since {since}")),
        },
    };
    OldPod { pod, until, reason }
}
