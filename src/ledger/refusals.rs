//! Namespaces whose jobs got nodes but could not start, because the API server refused objects that
//! their pods need.
//!
//! Each of these jobs held its nodes for 10 s. Jobs created one after another would hold them
//! permanently, so the record outlives the job and, through the leader's Lease, the leader
//! (`memory`).

use crate::job::{JobId, placement_of};
use jiff::Timestamp;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use switchyard_crds::{TrainJob, conditions};
use switchyard_plan::cluster::queue_order::{is_recent, refused_at};

/// Number of recent refused jobs after which all jobs of a namespace go to the end of the queue.
const REFUSALS_TO_DEMOTE: usize = 3;
/// Number of refused jobs remembered per namespace.
const MAX_REMEMBERED: usize = 16;

/// The last refusal of each job, by namespace and UID.
#[derive(Debug, Default)]
pub struct Refusals {
    by_namespace: BTreeMap<String, BTreeMap<String, Timestamp>>,
}

impl Refusals {
    /// A job appeared or changed.
    pub fn observe(&mut self, job: &TrainJob) {
        let JobId { namespace, uid } = JobId::of(&job.metadata);
        match refused_at(job) {
            Some(at) => self.record(JobId { namespace, uid }, at),
            // The API server accepted the objects later.
            None => drop(self.by_namespace.get_mut(&namespace).and_then(|jobs| jobs.remove(&uid))),
        }
    }

    /// A job was deleted. If it had a placement but none of its gates was lifted, it held nodes in
    /// vain.
    pub fn forget_job(&mut self, job: &TrainJob, is_gated: bool) {
        let placed = placement_of(job).and(job.status.as_ref()).and_then(|status| status.condition(conditions::PLACED));
        if let Some(placed) = placed.filter(|_| is_gated) {
            self.record(JobId::of(&job.metadata), placed.last_transition_time.0);
        }
    }

    /// Records that a job held nodes in vain.
    pub(crate) fn record(&mut self, job: JobId, at: Timestamp) {
        let jobs = self.by_namespace.entry(job.namespace).or_default();
        jobs.insert(job.uid, at);
        if jobs.len() > MAX_REMEMBERED
            && let Some(oldest) = jobs.iter().min_by_key(|(_, at)| **at).map(|(uid, _)| uid.clone())
        {
            jobs.remove(&oldest);
        }
    }

    /// Whether the jobs of a namespace go to the end of the queue.
    pub fn is_demoted(&self, namespace: &str, now: Timestamp) -> bool {
        let times = self.by_namespace.get(namespace).into_iter().flat_map(BTreeMap::values);
        times.filter(|at| is_recent(**at, now)).count() >= REFUSALS_TO_DEMOTE
    }

    /// The refusals of the `most` namespaces with the latest ones, each cut to the number that sets
    /// it back.
    pub(crate) fn latest(&self, most: usize) -> BTreeMap<String, BTreeMap<String, Timestamp>> {
        let mut namespaces: Vec<_> = self.by_namespace.iter().collect();
        namespaces.sort_by_key(|(_, jobs)| Reverse(jobs.values().max()));
        let cut = |jobs: &BTreeMap<String, Timestamp>| {
            let mut jobs: Vec<_> = jobs.iter().collect();
            jobs.sort_by_key(|(_, at)| Reverse(**at));
            jobs.into_iter().take(REFUSALS_TO_DEMOTE).map(|(uid, at)| (uid.clone(), *at)).collect()
        };
        namespaces.into_iter().take(most).map(|(namespace, jobs)| (namespace.clone(), cut(jobs))).collect()
    }

    /// Forgets refusals that are no longer recent.
    pub fn forget(&mut self, now: Timestamp) {
        self.by_namespace.retain(|_, times| {
            times.retain(|_, at| is_recent(*at, now));
            !times.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::index::Index;
    use serde_json::json;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    fn job(name: &str, namespace: &str, refused: Option<(&str, i64)>) -> TrainJob {
        let conditions: Vec<_> = refused
            .into_iter()
            .map(|(state, second)| {
                json!({"type": "ObjectsRefused", "status": state, "reason": "Refused", "message": "", "lastTransitionTime": at(second)})
            })
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": name, "namespace": namespace, "uid": format!("{namespace}-{name}"), "creationTimestamp": at(0)},
            "spec": {"trainer": {"framework": "Plain", "image": "i"}}, "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    /// Regression test: one tenant held nodes for 10 s with one job after another.
    #[test]
    fn a_namespace_with_repeated_refusals_comes_last() {
        let mut index = Index::default();
        let (old, new) = (job("z", "good", None), job("fresh", "evil", None));
        let is_first = |index: &mut Index, second: i64| {
            index.queue.set_time(at(second));
            index.queue_position(&new) < index.queue_position(&old)
        };
        for number in 0..3 {
            assert!(is_first(&mut index, number * 10), "after {number} jobs");
            let refused = job(&format!("j{number}"), "evil", Some(("True", number * 10)));
            index.apply_job(refused.clone());
            index.delete_job(&refused.metadata);
        }
        assert!(!is_first(&mut index, 30) && index.queue_position(&new).is_demoted());
        assert!(!index.queue_position(&old).is_demoted());
        assert!(!is_first(&mut index, 3599) && is_first(&mut index, 3600), "an hour after the first of three");
    }

    /// A job that its tenant deletes before the refusal is reported has still held nodes.
    #[test]
    fn jobs_deleted_while_holding_nodes_in_vain_count() {
        for is_gated in [true, false] {
            let mut index = Index::default();
            for number in 0..3 {
                let name = format!("j{number}");
                let mut placed = job(&name, "evil", None);
                let status = json!({
                    "attempt": 1, "placement": {"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n"}]},
                    "conditions": [{"type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": at(number)}],
                });
                placed.status = serde_json::from_value(status).unwrap();
                let uid = placed.metadata.uid.clone().unwrap();
                let gates = if is_gated { json!([{"name": "training.switchyard.dev/gang"}]) } else { json!([]) };
                let pod = json!({
                    "metadata": {"name": format!("{name}-1-0"), "namespace": "evil", "uid": name, "labels": {"training.switchyard.dev/job-uid": uid},
                        "ownerReferences": [{"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "name": name, "uid": uid, "controller": true}]},
                    "spec": {"schedulingGates": gates, "containers": [{"name": "trainer"}]},
                });
                index.apply_job(placed.clone());
                index.apply_pod(&serde_json::from_value(pod).unwrap());
                index.delete_job(&placed.metadata);
            }
            assert_eq!(index.refusals.is_demoted("evil", at(10)), is_gated);
        }
    }

    #[test]
    fn accepted_and_old_refusals_are_forgotten() {
        let mut refusals = Refusals::default();
        for number in 0..100 {
            refusals.observe(&job(&format!("j{number}"), "evil", Some(("True", number))));
        }
        assert_eq!(refusals.by_namespace["evil"].len(), MAX_REMEMBERED);
        let mut few = Refusals::default();
        (0..3).for_each(|number| few.observe(&job(&format!("j{number}"), "evil", Some(("True", number)))));
        assert!(few.is_demoted("evil", at(3)) && !few.is_demoted("good", at(3)));
        few.observe(&job("j0", "evil", Some(("False", 4))));
        assert!(!few.is_demoted("evil", at(4)));
        few.forget(at(10_000));
        assert!(few.by_namespace.is_empty());
    }
}
