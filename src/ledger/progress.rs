//! Detects from pod logs whether a gang makes progress.
//!
//! The pod of rank 0 is read first because it logs most. If its kubelet does not answer, the log of
//! another pod shows whether the ranks make progress.

use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::{TrainJobStatus, conditions};
use switchyard_plan::cluster::view::{NodeView, Phase, PodView};

/// Number of further pods to read while the logs of earlier ones are unavailable.
const MAX_OTHERS: usize = 3;

/// Progress according to the logs of a job's pods.
#[derive(Debug, Default)]
pub struct Progress {
    /// Attempt and newest step, and when this step was first seen.
    newest: Option<(u32, u64, Timestamp)>,
    /// UIDs of pods whose logs could not be read last time.
    unread: BTreeSet<String>,
    /// Whether reading a log was tried, successfully or not, since this controller became the
    /// leader.
    read_attempted: bool,
}

impl Progress {
    /// Records the newest step in a log of this attempt; `None` if it has none yet.
    pub fn record_step(
        &mut self,
        attempt: u32,
        uid: &str,
        step: Option<u64>,
        status: Option<&TrainJobStatus>,
        now: Timestamp,
    ) {
        self.read_attempted = true;
        self.unread.remove(uid);
        let known = self.of(attempt).or_else(|| from_status(status));
        if let Some(step) = step {
            // Ignore older steps: pods are read one after another.
            let (step, at) = known.filter(|(known, _)| *known >= step).unwrap_or((step, now));
            self.newest = Some((attempt, step, at));
        }
    }

    /// Records that the log of this pod is unavailable.
    pub fn record_unreadable(&mut self, uid: &str) {
        self.read_attempted = true;
        self.unread.insert(uid.to_string());
    }

    /// This controller leads again after another one, whose reads it does not know.
    pub fn reset_for_new_term(&mut self) {
        self.read_attempted = false;
    }

    fn of(&self, attempt: u32) -> Option<(u64, Timestamp)> {
        self.newest.filter(|(of, ..)| *of == attempt).map(|(_, step, at)| (step, at))
    }

    /// When this controller or an earlier one last saw a new step of an attempt.
    pub fn last(&self, attempt: u32, status: Option<&TrainJobStatus>) -> Option<Timestamp> {
        self.of(attempt).or_else(|| from_status(status)).map(|(_, at)| at)
    }

    /// Whether a log could be read but no read has been tried yet.
    pub fn is_first_read_due<'a>(
        &self,
        attempt: u32,
        pods: impl Iterator<Item = &'a PodView>,
        nodes: &BTreeMap<String, NodeView>,
    ) -> bool {
        !self.read_attempted && !self.sources(attempt, pods, nodes).is_empty()
    }

    /// The pods to read: the first one on a node that reports, and one more after each that could
    /// not be read.
    pub fn sources<'a>(
        &self,
        attempt: u32,
        pods: impl Iterator<Item = &'a PodView>,
        nodes: &BTreeMap<String, NodeView>,
    ) -> Vec<&'a PodView> {
        let reports = |pod: &&PodView| {
            pod.node.as_ref().and_then(|node| nodes.get(node)).is_some_and(|node| node.silent_since.is_none())
        };
        let runs = |pod: &&PodView| pod.attempt == attempt && pod.phase == Phase::Running && !pod.deleting;
        let mut found = Vec::new();
        for pod in pods.filter(runs).filter(reports).take(1 + MAX_OTHERS) {
            found.push(pod);
            if !self.unread.contains(&pod.uid) {
                break;
            }
        }
        found
    }

    /// Forgets a deleted pod.
    pub fn forget(&mut self, uid: &str) {
        self.unread.remove(uid);
    }
}

/// The newest step in the status, and when it was first seen. Until the condition `Progressing` is
/// true, the figures are from an earlier attempt.
fn from_status(status: Option<&TrainJobStatus>) -> Option<(u64, Timestamp)> {
    let status = status.filter(|status| status.is(conditions::PROGRESSING))?;
    let figures = status.trainer_status.as_ref()?;
    Some((figures.step.unsigned_abs(), figures.last_updated_time.as_ref()?.0))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn gang(nodes: u32) -> (Vec<PodView>, BTreeMap<String, NodeView>) {
        let pod = |rank: u32| PodView {
            uid: format!("p{rank}"),
            attempt: 1,
            node_rank: rank,
            node: Some(format!("n{rank}")),
            phase: Phase::Running,
            ..PodView::default()
        };
        let nodes_of = (0..nodes).map(|rank| (format!("n{rank}"), NodeView::default()));
        ((0..nodes).map(pod).collect(), nodes_of.collect())
    }

    /// Regression test from real nodes: the kubelet of rank 0 was stopped for 85 s, and a gang that
    /// was making progress was ended.
    #[test]
    fn another_pod_is_read_if_the_first_kubelet_does_not_answer() {
        let (pods, mut nodes) = gang(6);
        let mut progress = Progress::default();
        let read = |progress: &Progress, nodes: &BTreeMap<String, NodeView>| -> Vec<u32> {
            progress.sources(1, pods.iter(), nodes).into_iter().map(|pod| pod.node_rank).collect()
        };
        assert_eq!(read(&progress, &nodes), [0]);
        progress.record_unreadable("p0");
        assert_eq!(read(&progress, &nodes), [0, 1]);
        (1..6).for_each(|rank| progress.record_unreadable(&format!("p{rank}")));
        assert_eq!(read(&progress, &nodes), [0, 1, 2, 3], "not all of a large gang");
        progress.record_step(1, "p0", Some(1), None, at(0));
        assert_eq!(read(&progress, &nodes), [0]);
        for node in ["n0", "n1"] {
            nodes.get_mut(node).unwrap().silent_since = Some(at(0));
        }
        nodes.remove("n2");
        progress.record_step(1, "p3", Some(2), None, at(9));
        assert_eq!(read(&progress, &nodes), [3], "silent nodes are skipped without a failed read");
        assert_eq!(progress.last(1, None), Some(at(9)));
        progress.record_step(1, "p0", Some(2), None, at(10));
        progress.record_step(1, "p0", Some(1), None, at(11));
        assert_eq!(progress.last(1, None), Some(at(9)), "the step was already known from another pod");
        progress.record_step(2, "p0", Some(1), None, at(12));
        assert_eq!((progress.last(2, None), progress.last(3, None)), (Some(at(12)), None));
    }

    #[test]
    fn a_new_leader_knows_the_last_step_and_waits_for_its_first_read() {
        let (pods, nodes) = gang(2);
        let status = |state: &str| -> TrainJobStatus {
            let condition = json!({"type": "Progressing", "status": state, "reason": "StepsMade", "message": "",
                "lastTransitionTime": at(0).to_string()});
            let figures =
                json!({"step": 7, "totalSteps": 9, "progressPercentage": 77, "lastUpdatedTime": at(50).to_string()});
            serde_json::from_value(json!({"conditions": [condition], "trainerStatus": figures})).unwrap()
        };
        let (steps, started) = (status("True"), status("False"));
        let mut progress = Progress::default();
        assert_eq!((progress.last(1, Some(&steps)), progress.last(1, Some(&started))), (Some(at(50)), None));
        assert!(
            progress.is_first_read_due(1, pods.iter(), &nodes)
                && !progress.is_first_read_due(1, pods.iter(), &BTreeMap::new())
        );
        progress.record_step(1, "p0", Some(7), Some(&steps), at(90));
        assert_eq!(progress.last(1, Some(&steps)), Some(at(50)), "the same step is no progress");
        assert!(!progress.is_first_read_due(1, pods.iter(), &nodes));
        progress.record_step(1, "p0", Some(8), Some(&steps), at(100));
        assert_eq!(progress.last(1, Some(&steps)), Some(at(100)));
        progress.reset_for_new_term();
        assert!(progress.is_first_read_due(1, pods.iter(), &nodes));
        let mut resumed = Progress::default();
        resumed.record_step(2, "p0", Some(5), Some(&started), at(200));
        assert_eq!(resumed.last(2, Some(&started)), Some(at(200)), "steps of an earlier attempt do not count");
    }
}
