//! Jobs whose placements are stored in PlacementSlices. A job becomes visible in the index once all
//! its slices, and with them its nodes, are known.
//!
//! Until then the index keeps the job's previous state, because a placement without nodes would
//! take no resources and other jobs would get its GPUs.

use super::{Effect, Index, label};
use crate::job::{JobId, Key, key_of};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeMap;
use switchyard_crds::names::LAST_APPLIED;
use switchyard_crds::{PlacedNode, PlacementSlice, PlacementSliceSpec, SlicesStatus, TrainJob, labels};
use switchyard_plan::cluster::ownership;
use switchyard_plan::objects::Kind;
use switchyard_plan::slices;

/// Slices and jobs that have not been joined yet.
#[derive(Debug, Default)]
pub struct SliceJoin {
    /// Slices by owning job and name. Slices of visible jobs are not kept, because their nodes are
    /// in the job.
    known: BTreeMap<JobId, BTreeMap<String, PlacementSliceSpec>>,
    /// Jobs that wait for slices.
    waiting: BTreeMap<Key, TrainJob>,
}

/// The slice that a job is waiting for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingSlice {
    pub job: JobId,
    /// The first missing slice; `None` if all exist but differ from those in the status.
    pub slice: Option<String>,
}

impl Index {
    /// A job appeared or changed.
    pub fn show_job(&mut self, mut job: TrainJob) -> Effect {
        let key = key_of(&job.metadata);
        // Each of these fields may be as large as the rest of the object.
        job.metadata.managed_fields = None;
        job.metadata.annotations.iter_mut().for_each(|all| drop(all.remove(LAST_APPLIED)));
        self.slice_join.waiting.remove(&key);
        let Some(named) = slices::of(&job).cloned() else { return self.apply_job(job) };
        match self.nodes_of(&key, &job, &named) {
            Some(nodes) => {
                if let Some(known) = self.slice_join.known.get_mut(&JobId::of(&job.metadata)) {
                    slices::names(&named).for_each(|name| drop(known.remove(&name)));
                }
                slices::set_nodes(&mut job, nodes);
                self.apply_job(job)
            }
            None => {
                self.slice_join.waiting.insert(key.clone(), job);
                Effect { jobs: [key].into(), ..Effect::default() }
            }
        }
    }

    /// The nodes of a status: joined from the slices, or as known since the placement was decided.
    fn nodes_of(&self, key: &Key, job: &TrainJob, named: &SlicesStatus) -> Option<Vec<PlacedNode>> {
        let shown = self.jobs.get(key).filter(|shown| shown.metadata.uid == job.metadata.uid);
        let shown = shown.filter(|shown| slices::of(shown) == Some(named));
        if let Some(placement) = shown.and_then(|shown| shown.status.as_ref()?.placement.as_ref()) {
            return Some(placement.nodes.clone());
        }
        slices::join(named, self.slice_join.known.get(&JobId::of(&job.metadata))?)
    }

    /// A job was deleted.
    pub fn hide_job(&mut self, metadata: &ObjectMeta) -> Effect {
        let key = key_of(metadata);
        if self.slice_join.waiting.get(&key).is_some_and(|job| job.metadata.uid == metadata.uid) {
            self.slice_join.waiting.remove(&key);
        }
        self.slice_join.known.remove(&JobId::of(metadata));
        self.delete_job(metadata)
    }

    /// A slice appeared. A slice counts only if its job controls it, whatever its name.
    pub fn show_slice(&mut self, slice: PlacementSlice) -> Effect {
        let mut effect = self.apply_object(Kind::PlacementSlice, &slice.metadata, serde_json::Value::Null);
        let uid = label(&slice.metadata, labels::JOB_UID).filter(|uid| ownership::owner(&slice.metadata) == Some(uid));
        let (Some(uid), Some(name)) = (uid, slice.metadata.name.clone()) else { return effect };
        let namespace = slice.metadata.namespace.clone().unwrap_or_default();
        let key =
            Key { namespace: namespace.clone(), name: label(&slice.metadata, labels::JOB_NAME).unwrap_or_default() };
        let shown = self.jobs.get(&key).and_then(|job| slices::of(job));
        if shown.is_some_and(|named| slices::names(named).any(|named| named == name)) {
            return effect;
        }
        self.slice_join.known.entry(JobId { namespace, uid }).or_default().insert(name, slice.spec);
        if let Some(job) = self.slice_join.waiting.get(&key).cloned() {
            let shown = self.show_job(job);
            effect.jobs.extend(shown.jobs);
            effect.room.extend(shown.room);
        }
        effect
    }

    /// A slice was deleted.
    pub fn hide_slice(&mut self, metadata: &ObjectMeta) -> Effect {
        let name = metadata.name.as_deref().unwrap_or_default();
        for known in self.slice_join.known.values_mut() {
            known.remove(name);
        }
        self.delete_object(Kind::PlacementSlice, metadata)
    }

    /// The slices that a job is waiting for; `None` if it is visible or unknown.
    pub fn missing_slice(&self, key: &Key) -> Option<MissingSlice> {
        let job = self.slice_join.waiting.get(key)?;
        let id = JobId::of(&job.metadata);
        let known = self.slice_join.known.get(&id);
        let slice = slices::of(job).into_iter().flat_map(slices::names);
        let slice = slice.into_iter().find(|name| !known.is_some_and(|known| known.contains_key(name)));
        Some(MissingSlice { job: id, slice })
    }

    /// Makes a job visible without its nodes, because they will never be known.
    pub fn show_without_nodes(&mut self, key: &Key) -> Effect {
        self.slice_join.waiting.remove(key).map_or_else(Effect::default, |job| self.apply_job(job))
    }

    /// Makes all waiting jobs visible without their nodes.
    pub fn show_all(&mut self) {
        let keys: Vec<Key> = self.slice_join.waiting.keys().cloned().collect();
        keys.iter().for_each(|key| drop(self.show_without_nodes(key)));
    }
}

#[cfg(test)]
mod tests;
