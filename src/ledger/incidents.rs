//! Nodes that failed several jobs. All jobs avoid them for a period, which grows while they keep
//! failing.
//!
//! Incidents come from the statuses of jobs, so a new leader knows the last failure of each job.
//! Only failures that are the node's fault count, because a user could otherwise take nodes away
//! from others (`plan::cluster::avoidance::evidence`).

use crate::job::{JobId, placement_of, stage_of};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_crds::conditions::Stage;
use switchyard_crds::{NodeFailure, TrainJob, TrainJobStatus};
use switchyard_plan::cluster::Avoided;
use switchyard_plan::cluster::avoidance::{Evidence, evidence};
use switchyard_plan::cluster::view::NodeView;

/// Number of losses within [`PERIOD`] after which a node is avoided.
const MAX_LOSSES: usize = 3;
const PERIOD: SignedDuration = SignedDuration::from_hours(1);
/// Losses of a node within this time are one incident, because a lost node ends all its jobs.
const INCIDENT_WINDOW: SignedDuration = SignedDuration::from_secs(120);
/// Upper bound of the avoidance period, which starts at [`PERIOD`] and doubles each time.
const MAX_PERIOD: SignedDuration = SignedDuration::from_hours(8);
const FORGET_AFTER: SignedDuration = SignedDuration::from_hours(24);
/// Number of incidents kept per node.
const MAX_INCIDENTS: usize = 32;

#[derive(Debug, Clone, PartialEq)]
struct Incident {
    at: Timestamp,
    job: JobId,
    cause: String,
    is_loss: bool,
}

/// The latest incidents by node, in chronological order.
#[derive(Debug, Default)]
pub struct Incidents(BTreeMap<String, Vec<Incident>>);

/// Until when a node is avoided, and the reason.
struct Avoidance {
    until: Timestamp,
    reason: String,
}

impl Incidents {
    /// Records the node failures in a job's status.
    pub fn observe(&mut self, job: &TrainJob) {
        let Some(status) = job.status.as_ref().filter(|status| !status.node_failures.is_empty()) else { return };
        let id = JobId::of(&job.metadata);
        for failure in &status.node_failures {
            let Some(evidence) = evidence(&failure.reason) else { continue };
            match evidence {
                Evidence::Lost | Evidence::Refused => self.add(failure, &id, evidence == Evidence::Lost),
                Evidence::NotStarted if runs_elsewhere(job, status, &failure.node_name) => {
                    self.add(failure, &id, false)
                }
                Evidence::NotStarted => {}
            }
            if evidence != Evidence::Lost && runs_on(job, status, &failure.node_name) {
                self.forgive(&failure.node_name, &id);
            }
        }
    }

    fn add(&mut self, failure: &NodeFailure, job: &JobId, is_loss: bool) {
        let at = failure.last_time.0;
        let is_recent =
            |known: &Vec<Incident>| known.last().is_some_and(|last| at.duration_since(last.at) < FORGET_AFTER);
        self.0.retain(|_, known| is_recent(known));
        let known = self.0.entry(failure.node_name.clone()).or_default();
        if known.iter().any(|incident| incident.at == at && incident.job == *job) {
            return;
        }
        let position = known.partition_point(|incident| incident.at <= at);
        known.insert(position, Incident { at, job: job.clone(), cause: failure.message.clone(), is_loss });
        known.drain(..known.len().saturating_sub(MAX_INCIDENTS));
    }

    /// Drops the failed starts of a job on a node on which it now runs.
    fn forgive(&mut self, node: &str, job: &JobId) {
        if let Some(known) = self.0.get_mut(node) {
            known.retain(|incident| incident.is_loss || incident.job != *job);
        }
        self.0.retain(|_, known| !known.is_empty());
    }

    /// The incidents of each node, without those from before it was registered again.
    fn current<'a>(
        &'a self,
        nodes: &BTreeMap<String, NodeView>,
    ) -> impl Iterator<Item = (&'a String, Vec<&'a Incident>)> {
        self.0.iter().map(|(name, known)| {
            let node = nodes.get(name);
            (name, known.iter().filter(|incident| node.is_none_or(|node| node.existed_at(incident.at))).collect())
        })
    }

    /// Nodes that a job avoids because they failed other jobs.
    pub fn avoided(
        &self,
        job: &JobId,
        nodes: &BTreeMap<String, NodeView>,
        now: Timestamp,
    ) -> BTreeMap<String, Avoided> {
        let avoided = self.current(nodes).filter_map(|(node, known)| {
            if let Some(Avoidance { until, reason }) = avoidance(&known, now) {
                let reason = format!("{reason}, and is avoided until {until}");
                return Some((node.clone(), Avoided { reason, is_last_resort: false }));
            }
            let by_other_job = known.iter().rev().find(|incident| !incident.is_loss && incident.job != *job)?;
            let is_recent = now.duration_since(by_other_job.at) < PERIOD;
            let reason =
                format!("a pod of another job could not start there at {}: {}", by_other_job.at, by_other_job.cause);
            is_recent.then(|| (node.clone(), Avoided { reason, is_last_resort: true }))
        });
        avoided.collect()
    }

    /// The earliest time at which one of the avoided nodes becomes usable again.
    pub fn next(&self, nodes: &BTreeMap<String, NodeView>, now: Timestamp) -> Option<Timestamp> {
        self.current(nodes).filter_map(|(_, known)| avoidance(&known, now)).map(|avoidance| avoidance.until).min()
    }
}

/// The longest avoidance of a node that is still in effect.
fn avoidance(known: &[&Incident], now: Timestamp) -> Option<Avoidance> {
    let all = [loss_avoidance(known), start_avoidance(known)].into_iter().flatten();
    all.max_by_key(|avoidance| avoidance.until).filter(|avoidance| avoidance.until > now)
}

/// Whether the pods of a job have started, none of them on this node. This shows that the job's
/// template works.
fn runs_elsewhere(job: &TrainJob, status: &TrainJobStatus, node: &str) -> bool {
    let has_started = [Stage::Running, Stage::Complete].map(|stage| Some(stage.reason())).contains(&stage_of(status));
    has_started && !runs_on(job, status, node)
}

fn runs_on(job: &TrainJob, status: &TrainJobStatus, node: &str) -> bool {
    let nodes = placement_of(job).map_or(&[][..], |placement| &placement.nodes);
    stage_of(status) == Some(Stage::Running.reason()) && nodes.iter().any(|placed| placed.node_name == node)
}

/// The avoidance of a node that was lost too often.
fn loss_avoidance(known: &[&Incident]) -> Option<Avoidance> {
    let mut separate_losses: Vec<&Incident> = Vec::new();
    for loss in known.iter().copied().filter(|incident| incident.is_loss) {
        if separate_losses.last().is_none_or(|last| loss.at.duration_since(last.at) >= INCIDENT_WINDOW) {
            separate_losses.push(loss);
        }
    }
    let is_frequent = |losses: &[&Incident]| {
        let first = losses.len().checked_sub(MAX_LOSSES).map(|first| losses[first].at);
        losses.last().zip(first).is_some_and(|(last, first)| last.at.duration_since(first) < PERIOD)
    };
    let last = separate_losses.last()?;
    let reason = format!("it ended attempts {MAX_LOSSES} times within an hour, last with \"{}\"", last.cause);
    Some(Avoidance { until: until(&separate_losses, is_frequent)?, reason })
}

/// The avoidance of a node on which pods of several jobs could not start.
fn start_avoidance(known: &[&Incident]) -> Option<Avoidance> {
    let failures: Vec<&Incident> = known.iter().copied().filter(|incident| !incident.is_loss).collect();
    let (last, _) = failures.split_last()?;
    let is_frequent = |failures: &[&Incident]| {
        let Some((last, before)) = failures.split_last() else { return false };
        before.iter().any(|incident| incident.job != last.job && last.at.duration_since(incident.at) < PERIOD)
    };
    let reason = format!("pods of several jobs could not start there, last with \"{}\"", last.cause);
    Some(Avoidance { until: until(&failures, is_frequent)?, reason })
}

/// The end of a node's avoidance: one period after it failed too often, and twice as long each time
/// it fails again within a period after its avoidance ended.
fn until(incidents: &[&Incident], is_frequent: impl Fn(&[&Incident]) -> bool) -> Option<Timestamp> {
    let (mut until, mut pause) = (None::<Timestamp>, PERIOD);
    for (number, incident) in incidents.iter().enumerate() {
        match until.map(|until| incident.at.duration_since(until)) {
            Some(since) if since.is_negative() => {}
            Some(since) if since < PERIOD => pause = pause.saturating_mul(2).min(MAX_PERIOD),
            _ if is_frequent(&incidents[..=number]) => pause = PERIOD,
            _ => continue,
        }
        until = until.max(incident.at.saturating_add(pause).ok());
    }
    until
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(60 * minute).unwrap()
    }

    /// A job with node failures: node, reason and minute of each.
    fn job(uid: &str, stage: &str, on: &str, failures: &[(&str, &str, i64)]) -> TrainJob {
        let failures: Vec<Value> = failures.iter().map(|(node, reason, minute)| {
            let message = format!("{reason}: no");
            json!({"nodeName": node, "reason": reason, "message": message, "count": 1, "lastTime": at(*minute).to_string()})
        }).collect();
        let condition = |kind: &str, status: &str, reason: &str| json!({"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": at(0).to_string()});
        serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": uid, "namespace": "t", "uid": uid},
            "spec": {"trainer": {"framework": "Plain", "image": "i"}},
            "status": {
                "attempt": 2, "nodeFailures": failures, "placement": {"reason": "", "nodes": [{"firstRank": 0, "nodeName": on}]},
                "conditions": [condition("Succeeded", "Unknown", stage), condition("Placed", "True", "Placed")],
            },
        }))
        .unwrap()
    }

    fn other() -> JobId {
        JobId { namespace: "t".into(), uid: "other".into() }
    }

    /// The nodes that another job avoids at this minute, and whether each is a last resort.
    fn avoided(incidents: &Incidents, minute: i64) -> Vec<(String, bool)> {
        let all = incidents.avoided(&other(), &BTreeMap::new(), at(minute));
        all.into_iter().map(|(node, avoided)| (node, avoided.is_last_resort)).collect()
    }

    fn firmly(node: &str) -> Vec<(String, bool)> {
        vec![(node.to_string(), false)]
    }

    #[test]
    fn a_node_lost_three_times_in_an_hour_is_avoided_with_growing_periods() {
        let mut incidents = Incidents::default();
        let mut lose = |minute: i64| {
            incidents.observe(&job("a", "Restarting", "x", &[("n", "NodeLost", minute)]));
            avoided(&incidents, minute)
        };
        for minute in [0, 1, 20] {
            assert_eq!(lose(minute), [], "losses within two minutes count once");
        }
        assert_eq!(lose(40), firmly("n"));
        let reason = "it ended attempts 3 times within an hour, last with \"NodeLost: no\", and is avoided until 1970-01-01T01:40:00Z";
        assert_eq!(incidents.avoided(&other(), &BTreeMap::new(), at(99))["n"].reason, reason);
        assert_eq!(incidents.next(&BTreeMap::new(), at(99)), Some(at(100)));
        assert_eq!((avoided(&incidents, 100), incidents.next(&BTreeMap::new(), at(100))), (Vec::new(), None));
        incidents.observe(&job("b", "Restarting", "x", &[("n", "NodeLost", 110)]));
        assert_eq!(incidents.next(&BTreeMap::new(), at(110)), Some(at(230)), "twice as long");
        incidents.observe(&job("b", "Restarting", "x", &[("n", "NodeLost", 300)]));
        assert_eq!(avoided(&incidents, 300), [], "it worked for an hour after its avoidance ended");
    }

    /// Regression test: only lost nodes were remembered, so each job ran into the same bad node.
    #[test]
    fn a_node_that_refuses_pods_of_two_jobs_is_avoided_by_all_under_any_leader() {
        let refused = |uid: &str, minute: i64| job(uid, "Queued", "x", &[("n", "UnexpectedAdmissionError", minute)]);
        let mut incidents = Incidents::default();
        incidents.observe(&refused("a", 0));
        incidents.observe(&refused("a", 10));
        assert_eq!(avoided(&incidents, 11), [("n".to_string(), true)], "one job: a last resort for other jobs");
        assert_eq!(avoided(&incidents, 70), [], "for an hour");
        incidents.observe(&refused("b", 20));
        assert_eq!(avoided(&incidents, 21), firmly("n"));
        let reason = "pods of several jobs could not start there, last with \"UnexpectedAdmissionError: no\", and is avoided until \
                   1970-01-01T01:20:00Z";
        assert_eq!(incidents.avoided(&other(), &BTreeMap::new(), at(21))["n"].reason, reason);
        let again = NodeView { registered: Some(at(21)), ..NodeView::default() };
        assert!(incidents.avoided(&other(), &[("n".to_string(), again)].into(), at(22)).is_empty(), "it was repaired");
        let mut new_leader = Incidents::default();
        for job in [refused("b", 20), refused("a", 10)] {
            new_leader.observe(&job);
            new_leader.observe(&job);
        }
        assert_eq!(
            new_leader.avoided(&other(), &BTreeMap::new(), at(21)),
            incidents.avoided(&other(), &BTreeMap::new(), at(21))
        );
        incidents.observe(&refused("c", 90));
        assert_eq!(incidents.next(&BTreeMap::new(), at(90)), Some(at(90 + 120)), "the period grows");
    }

    /// Otherwise a template that cannot start anywhere would take all nodes away from other jobs.
    #[test]
    fn a_failed_sandbox_is_the_nodes_fault_once_the_job_runs_elsewhere() {
        let failed = |uid: &str, stage: &str, on: &str| job(uid, stage, on, &[("n", "FailedCreatePodSandBox", 0)]);
        let mut incidents = Incidents::default();
        for uid in ["a", "b"] {
            incidents.observe(&failed(uid, "Starting", "x"));
        }
        assert_eq!(avoided(&incidents, 1), []);
        incidents.observe(&failed("a", "Running", "x"));
        incidents.observe(&failed("b", "Complete", "x"));
        assert_eq!(avoided(&incidents, 1), firmly("n"));
        incidents.observe(&failed("a", "Running", "n"));
        assert_eq!(avoided(&incidents, 1), [("n".to_string(), true)], "it starts there now");
        for reason in ["Unschedulable", "FailedMount", "OutOfcpu", "Evicted"] {
            let mut incidents = Incidents::default();
            for uid in ["a", "b", "c"] {
                incidents.observe(&job(uid, "Running", "x", &[("n", reason, 0)]));
            }
            assert_eq!(avoided(&incidents, 1), [], "{reason} may be the job's own fault");
        }
    }
}
