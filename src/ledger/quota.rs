//! Jobs of one namespace that compete for its ResourceQuotas.
//!
//! Gang pods are created one by one, so two gangs could each hold a part of a quota and deadlock.
//! Of the gangs that lack quota, only the first in queue order keeps its pods. A gang that only
//! lacks room leaves the quota to one that has room but lacks quota.

use crate::index::Index;
use crate::job::{JobId, Key, attempt_of, is_live, key_of, placement_of};
use crate::usage::UsageOverlay;
use std::sync::Arc;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::PlacementRules;
use switchyard_plan::cluster::blocker::WriteError;
use switchyard_plan::cluster::place_with_fabric::place_with_fabric;
use switchyard_plan::cluster::queue_order::QueuePosition;

/// Number of jobs to check for room, because each check costs a placement.
const MAX_TRIED: usize = 4;

impl Index {
    /// Records that the API server refused pods of a job because of a quota.
    pub fn mark_short_of_quota(&mut self, job: &JobId) {
        self.short_of_quota.insert(job.clone());
    }

    /// The jobs of a namespace whose pods cannot be created for lack of quota, in queue order.
    pub fn short_of_quota_in(&mut self, namespace: &str) -> Vec<(QueuePosition, Arc<TrainJob>)> {
        if self.short_of_quota.is_empty() {
            return Vec::new();
        }
        let job_states = &self.job_states;
        let write_error = |id: &JobId| job_states.get(id).and_then(|state| state.write_error.as_ref());
        self.short_of_quota.retain(|id| write_error(id).is_some_and(WriteError::is_quota));
        let in_namespace = self.short_of_quota.iter().filter(|id| id.namespace == namespace);
        let jobs = in_namespace.filter_map(|id| self.jobs.get(self.job_states.get(id)?.key.as_ref()?));
        let waits = |job: &&Arc<TrainJob>| is_live(job) && !job.spec.suspend && placement_of(job).is_none();
        let mut jobs: Vec<_> = jobs.filter(waits).map(|job| (self.queue_position(job), job.clone())).collect();
        jobs.sort_by(|a, b| a.0.cmp(&b.0));
        jobs
    }

    /// The job in the same namespace for which an unplaced job must give up its pods and their
    /// quota; `None` if it keeps them.
    pub fn quota_recipient(&mut self, job: &TrainJob, rules: PlacementRules<'_>) -> Option<Key> {
        let id = JobId::of(&job.metadata);
        let mut short = self.short_of_quota_in(&id.namespace);
        let attempt = attempt_of(job);
        let has_pods = self.job_states.get(&id)?.pods.values().any(|pod| pod.attempt == attempt);
        if !has_pods || placement_of(job).is_some() {
            return None;
        }
        let position = self.queue_position(job);
        let is_short = short.iter().any(|(other, _)| *other == position);
        short.retain(|(other, _)| *other != position);
        if is_short {
            let (first, other) = short.first()?;
            return (*first < position).then(|| key_of(&other.metadata));
        }
        if !self.queue.contains(&key_of(&job.metadata)) {
            return None;
        }
        let has_room = |(_, other): &(QueuePosition, Arc<TrainJob>)| self.has_room_now(other, rules);
        let (_, other) = short.into_iter().take(MAX_TRIED).find(has_room)?;
        Some(key_of(&other.metadata))
    }

    /// Whether a job could start now if its pods existed.
    fn has_room_now(&mut self, job: &TrainJob, rules: PlacementRules<'_>) -> bool {
        let found = self.with_request(job, rules, |index, request| {
            let ignorable = index.ignorable_takers(job, rules.now);
            let overlay = UsageOverlay::new(&mut index.usage, &ignorable);
            place_with_fabric(request, overlay.nodes()).is_ok()
        });
        found.unwrap_or(false)
    }

    /// Ends the backoff of the first job that lacks quota, because deleted pods of the namespace
    /// may have freed some quota. Returns that job.
    pub(crate) fn quota_freed(&mut self, namespace: &str) -> Option<Key> {
        let (_, job) = self.short_of_quota_in(namespace).into_iter().next()?;
        let state = self.job_states.get_mut(&JobId::of(&job.metadata))?;
        state.writes.end_backoff();
        Some(key_of(&job.metadata))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use jiff::Timestamp;
    use k8s_openapi::api::core::v1::{Node, Pod};
    use serde_json::{Value, json};
    use switchyard_crds::labels;
    use switchyard_plan::cluster::WaitReason;
    use switchyard_plan::cluster::levels::Levels;
    use switchyard_plan::objects::Defaults;

    fn key(name: &str) -> Key {
        Key { namespace: "t".into(), name: name.into() }
    }

    fn id(name: &str) -> JobId {
        JobId { namespace: "t".into(), uid: name.into() }
    }

    /// Creates a job at this second, and this number of its pods.
    fn create(index: &mut Index, name: &str, second: i64, nodes: u32, pods: u32) {
        let created = Timestamp::from_second(second).unwrap();
        let limits = json!({"cpu": "2"});
        let trainer =
            json!({"framework": "Plain", "image": "i", "numNodes": nodes, "resourcesPerNode": {"limits": limits}});
        let job = json!({
            "apiVersion": labels::API_VERSION, "kind": "TrainJob",
            "metadata": {"name": name, "namespace": "t", "uid": name, "creationTimestamp": created},
            "spec": {"trainer": trainer}, "status": {"attempt": 1},
        });
        index.apply_job(serde_json::from_value(job).unwrap());
        (0..pods).for_each(|rank| drop(index.apply_pod(&pod(name, rank))));
    }

    fn pod(job: &str, rank: u32) -> Pod {
        let name = format!("{job}-1-{rank}");
        let owner =
            json!({"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": job, "uid": job, "controller": true});
        let container = json!({"name": "trainer", "resources": {"limits": {"cpu": "2"}}});
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "t", "uid": name, "labels": {labels::JOB_UID: job}, "ownerReferences": [owner]},
            "spec": {"schedulingGates": [{"name": labels::GANG_GATE}], "containers": [container]},
        }))
        .unwrap()
    }

    fn refuse(index: &mut Index, name: &str) {
        let text = format!("cannot create Pod {name}-1-9: pods is forbidden: exceeded quota: q");
        let write_error = WriteError::after(None, text, true, Timestamp::UNIX_EPOCH);
        index.job_states.get_mut(&id(name)).unwrap().write_error = Some(write_error);
        index.mark_short_of_quota(&id(name));
    }

    fn recipient(index: &mut Index, name: &str, then: impl Fn(&mut Index, PlacementRules<'_>)) -> Option<String> {
        let (defaults, levels) = (Defaults::default(), Levels::default());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::from_second(100).unwrap() };
        then(index, rules);
        let job = index.jobs.get(&key(name)).unwrap().clone();
        index.quota_recipient(&job, rules).map(|key| key.name)
    }

    #[test]
    fn the_first_gang_short_of_quota_keeps_its_pods() {
        let mut index = Index::default();
        for (name, second, pods) in [("a", 1, 2), ("b", 2, 2), ("c", 3, 0)] {
            create(&mut index, name, second, 3, pods);
        }
        let all = |index: &mut Index| ["a", "b", "c"].map(|name| recipient(index, name, |_, _| {}));
        assert_eq!(all(&mut index), [None, None, None], "no job is short of quota");
        ["a", "b", "c"].iter().for_each(|name| refuse(&mut index, name));
        assert_eq!(all(&mut index), [None, Some("a".into()), None], "c has no pods to delete");
        index.job_states.get_mut(&id("a")).unwrap().write_error = None;
        assert_eq!(all(&mut index), [None, None, None], "a has all its pods");
        // The first job is tried again once pods of the namespace are deleted.
        refuse(&mut index, "a");
        assert_eq!(index.delete_pod(&pod("b", 0).metadata).quota, Some(key("a")));
        assert_eq!(index.delete_pod(&json_metadata("elsewhere")).quota, None);
    }

    fn json_metadata(namespace: &str) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
        serde_json::from_value(json!({"name": "x", "namespace": namespace, "uid": "x"})).unwrap()
    }

    #[test]
    fn a_gang_without_room_leaves_the_quota_to_one_with_room() {
        let mut index = Index::default();
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let node = |name: &str| -> Value {
            json!({"metadata": {"name": name}, "status": {"allocatable": {"cpu": "3", "pods": "9"}, "conditions": ready}})
        };
        for name in ["n0", "n1"] {
            index.apply_node(&serde_json::from_value::<Node>(node(name)).unwrap());
        }
        for (name, second, nodes, pods) in [("wide", 1, 4, 4), ("large", 2, 3, 0), ("small", 3, 1, 0)] {
            create(&mut index, name, second, nodes, pods);
        }
        let waits = |index: &mut Index, rules: PlacementRules<'_>| {
            drop(index.enqueue(&key("wide"), WaitReason::Room { open: 2 }, rules));
        };
        assert_eq!(recipient(&mut index, "wide", waits), None, "no job is short of quota");
        refuse(&mut index, "large");
        assert_eq!(recipient(&mut index, "wide", waits), None, "it has no room either");
        refuse(&mut index, "small");
        assert_eq!(recipient(&mut index, "wide", waits), Some("small".into()));
    }
}
