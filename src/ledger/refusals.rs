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
use switchyard_plan::cluster::turn::{is_recent, refused_at};

/// Number of recent refused jobs after which all jobs of a namespace go to the end of the queue.
const MOST: usize = 3;
/// Number of refused jobs remembered per namespace.
const REMEMBERED: usize = 16;

/// The last refusal of each job, by namespace and UID.
#[derive(Debug, Default)]
pub struct Refusals {
    of: BTreeMap<String, BTreeMap<String, Timestamp>>,
}

impl Refusals {
    /// A job appeared or changed.
    pub fn observe(&mut self, job: &TrainJob) {
        let JobId { namespace, uid } = JobId::of(&job.metadata);
        match refused_at(job) {
            Some(at) => self.note(JobId { namespace, uid }, at),
            // The API server accepted the objects later.
            None => drop(self.of.get_mut(&namespace).and_then(|of_namespace| of_namespace.remove(&uid))),
        }
    }

    /// A job was deleted. If it had a placement but none of its gates was lifted, it held nodes in
    /// vain.
    pub fn forget_job(&mut self, job: &TrainJob, is_gated: bool) {
        let placed = placement_of(job).and(job.status.as_ref()).and_then(|status| status.condition(conditions::PLACED));
        if let Some(placed) = placed.filter(|_| is_gated) {
            self.note(JobId::of(&job.metadata), placed.last_transition_time.0);
        }
    }

    /// Records that a job held nodes in vain.
    pub(crate) fn note(&mut self, job: JobId, at: Timestamp) {
        let of_namespace = self.of.entry(job.namespace).or_default();
        of_namespace.insert(job.uid, at);
        if of_namespace.len() > REMEMBERED
            && let Some(oldest) = of_namespace.iter().min_by_key(|(_, at)| **at).map(|(uid, _)| uid.clone())
        {
            of_namespace.remove(&oldest);
        }
    }

    /// Whether the jobs of a namespace go to the end of the queue.
    pub fn set_back(&self, namespace: &str, now: Timestamp) -> bool {
        let times = self.of.get(namespace).into_iter().flat_map(BTreeMap::values);
        times.filter(|at| is_recent(**at, now)).count() >= MOST
    }

    /// The refusals of the `most` namespaces with the latest ones, each cut to the number that sets
    /// it back.
    pub(crate) fn latest(&self, most: usize) -> BTreeMap<String, BTreeMap<String, Timestamp>> {
        let mut namespaces: Vec<_> = self.of.iter().collect();
        namespaces.sort_by_key(|(_, jobs)| Reverse(jobs.values().max()));
        let cut = |jobs: &BTreeMap<String, Timestamp>| {
            let mut jobs: Vec<_> = jobs.iter().collect();
            jobs.sort_by_key(|(_, at)| Reverse(**at));
            jobs.into_iter().take(MOST).map(|(uid, at)| (uid.clone(), *at)).collect()
        };
        namespaces.into_iter().take(most).map(|(namespace, jobs)| (namespace.clone(), cut(jobs))).collect()
    }

    /// Forgets refusals that are no longer recent.
    pub fn forget(&mut self, now: Timestamp) {
        self.of.retain(|_, times| {
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
    fn a_namespace_whose_jobs_are_refused_one_after_the_other_comes_after_all_others() {
        let mut index = Index::default();
        let (old, new) = (job("z", "good", None), job("fresh", "evil", None));
        let is_first = |index: &mut Index, second: i64| {
            index.lateness.at = at(second);
            index.turn(&new) < index.turn(&old)
        };
        for number in 0..3 {
            assert!(is_first(&mut index, number * 10), "after {number} jobs");
            let refused = job(&format!("j{number}"), "evil", Some(("True", number * 10)));
            index.apply_job(refused.clone());
            index.delete_job(&refused.metadata);
        }
        assert!(!is_first(&mut index, 30) && index.turn(&new).is_set_back());
        assert!(!index.turn(&old).is_set_back());
        assert!(!is_first(&mut index, 3599) && is_first(&mut index, 3600), "an hour after the first of three");
    }

    /// A job that its tenant deletes before the refusal is reported has still held nodes.
    #[test]
    fn jobs_that_are_deleted_while_they_hold_nodes_for_nothing_count_too() {
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
            assert_eq!(index.refusals.set_back("evil", at(10)), is_gated);
        }
    }

    #[test]
    fn what_is_accepted_later_and_what_is_old_is_forgotten() {
        let mut refusals = Refusals::default();
        for number in 0..100 {
            refusals.observe(&job(&format!("j{number}"), "evil", Some(("True", number))));
        }
        assert_eq!(refusals.of["evil"].len(), REMEMBERED);
        let mut few = Refusals::default();
        (0..3).for_each(|number| few.observe(&job(&format!("j{number}"), "evil", Some(("True", number)))));
        assert!(few.set_back("evil", at(3)) && !few.set_back("good", at(3)));
        few.observe(&job("j0", "evil", Some(("False", 4))));
        assert!(!few.set_back("evil", at(4)));
        few.forget(at(10_000));
        assert!(few.of.is_empty());
    }
}
