//! In-memory index of everything the watches have reported, as small views. All snapshots are built
//! from it.
//!
//! Plain data without a client or a clock: `apply` and `delete` methods take objects, and return
//! the jobs that must be reconciled.

mod claims;
mod missing;
mod pods;
pub mod queue;
mod request;
mod restart_hold;
mod slice_join;

pub use slice_join::{MissingSlice, SliceJoin};

use crate::devices::Devices;
use crate::incidents::Incidents;
use crate::index::queue::Queue;
use crate::job::{JobId, Key, attempt_of, is_live, key_of, placement_of};
use crate::mass_outage::MassOutage;
use crate::pending_writes::{CacheState, PendingWrites};
use crate::progress::Progress;
use crate::refusals::Refusals;
use crate::schedulers::Schedulers;
use crate::usage::Usage;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use switchyard_crds::{PlacementStatus, TrainJob, labels};
use switchyard_plan::cluster::blocker::WriteError;
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::transport::LogObservation;
use switchyard_plan::cluster::view::{NodeView, ObjectView, PodView};
use switchyard_plan::objects::Kind;
use switchyard_worker_contract::event::Summary;

/// A TrainJob that is invalid or too large, and the reason.
#[derive(Debug, Clone)]
pub struct Unreadable {
    pub version: String,
    pub why: String,
    /// Whether its status already reports it.
    pub reported: bool,
}

/// Position of a pod in its job. Pods are ordered by attempt and node rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodKey {
    pub attempt: u32,
    pub node_rank: u32,
    /// Name of the pod, because another client may have created a second pod with our labels.
    pub name: String,
}

/// The key of a pod in the index.
#[derive(Debug)]
struct PodLocation {
    job: JobId,
    pod_key: PodKey,
}

/// The objects of one job: those in its namespace that carry its UID.
#[derive(Debug, Default)]
pub struct JobState {
    pub key: Option<Key>,
    pub pods: BTreeMap<PodKey, PodView>,
    /// UIDs, by name, of pods that have the job as their controller but lack its label.
    pub unlabelled: BTreeMap<String, String>,
    pub objects: BTreeMap<(Kind, String), ObjectView>,
    /// A placement that was decided a moment ago and is not in the watch cache yet, with its
    /// attempt.
    pub assumed: Option<(u32, PlacementStatus)>,
    pub writes: PendingWrites,
    /// Error of the last write.
    pub write_error: Option<WriteError>,
    /// When the status was last written.
    pub status_written: Option<Timestamp>,
    /// Latest training summary, and the attempt that wrote it.
    pub summary: Option<(u32, Summary)>,
    pub progress: Progress,
    /// Reports of the links between ranks found in the pods' logs, by attempt and node rank.
    pub log_observations: BTreeMap<u32, BTreeMap<u32, LogObservation>>,
    /// Whether the namespace enforces Pod Security `restricted`: the API server refuses pods that
    /// do not declare that they run as non-root.
    pub restricted: bool,
    /// The attempt that is being preempted, and the name of the preempting job.
    pub preempted_attempt: Option<u32>,
    pub preempted_by: Option<String>,
    /// GPU seconds that the queue policy expects to gain by this preemption. If it takes several
    /// jobs, the first one has all of them.
    pub preemption_gain: i64,
}

impl JobState {
    /// Records since when the scheduler refuses pods of this job. Refusals do not count while pods
    /// of an earlier attempt still occupy its nodes.
    pub fn note_refusals(&mut self, job: &TrainJob, now: Timestamp) {
        if self.pods.values().all(|pod| pod.unschedulable.is_none()) {
            return;
        }
        let (attempt, planned) = (attempt_of(job), placement_of(job).map_or(&[][..], |placement| &placement.nodes));
        let is_planned = |node: &String| planned.iter().any(|placed| placed.node_name == *node);
        let mut earlier = self.pods.values().filter(|pod| pod.attempt < attempt && !pod.is_over());
        let is_in_the_way = earlier.any(|pod| pod.node.as_ref().is_some_and(is_planned));
        for refused in self.pods.values_mut().filter_map(|pod| pod.unschedulable.as_mut()) {
            refused.since = if is_in_the_way { None } else { refused.since.or(Some(now)) };
        }
    }
}

/// Everything the watches have reported.
#[derive(Debug, Default)]
pub struct Index {
    pub jobs: BTreeMap<Key, Arc<TrainJob>>,
    pub unreadable: BTreeMap<Key, Unreadable>,
    pub job_states: BTreeMap<JobId, JobState>,
    pub usage: Usage,
    /// Deleted nodes that still have pods of jobs, and since when they are missing.
    pub missing: BTreeMap<String, Timestamp>,
    pub mass_outage: MassOutage,
    pub incidents: Incidents,
    pub(crate) refusals: Refusals,
    pub devices: Devices,
    pub slice_join: SliceJoin,
    pub schedulers: Schedulers,
    /// The position of each of our pods, by UID.
    pods: BTreeMap<String, PodLocation>,
    /// Latest resource version of each kind in each namespace that has jobs. Versions are per
    /// namespace because each may have its own watch, and one may be ahead of another.
    versions: BTreeMap<String, BTreeMap<&'static str, u64>>,
    pub queue: Queue,
    /// Class of the ProvisioningRequests of gangs that lack nodes; `None` if none are created.
    pub provisioning_class: Option<String>,
    /// Jobs whose pods were last refused because of a ResourceQuota. Reading it drops those that
    /// have recovered.
    pub(crate) short_of_quota: BTreeSet<JobId>,
    /// Takers that hold the GPUs of restarting gangs.
    pub restart_holds: BTreeMap<JobId, Vec<String>>,
}

/// The consequences of a change.
#[derive(Debug, Default)]
pub struct Effect {
    /// Jobs to reconcile.
    pub jobs: BTreeSet<Key>,
    /// Nodes that may have more room.
    pub room: BTreeSet<String>,
    /// A job that lacked quota and may have it now. Its pods are created again without backoff.
    pub quota: Option<Key>,
}

impl AsMut<Usage> for Index {
    fn as_mut(&mut self) -> &mut Usage {
        &mut self.usage
    }
}

impl Index {
    pub fn record_version(&mut self, kind: &'static str, metadata: &ObjectMeta) {
        let version = metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0);
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        if let Some(seen) = self.versions.get_mut(namespace) {
            let latest = seen.entry(kind).or_default();
            *latest = (*latest).max(version);
        }
    }

    /// Whether the watch cache shows everything that was written for a job.
    pub fn catch_up(&mut self, job: &JobId, now: Instant) -> CacheState {
        let seen = self.versions.entry(job.namespace.clone()).or_default();
        self.job_states.entry(job.clone()).or_default().writes.catch_up(seen, now)
    }

    /// Jobs that are neither complete nor failed, with their states.
    pub fn live_jobs(&self) -> impl Iterator<Item = (&JobId, &Arc<TrainJob>, &JobState)> {
        self.job_states.iter().filter_map(|(id, state)| {
            let job = self.jobs.get(state.key.as_ref()?)?;
            (job.metadata.uid.as_ref() == Some(&id.uid) && is_live(job)).then_some((id, job, state))
        })
    }

    fn touch(&self, job: &JobId, effect: &mut Effect) {
        effect.jobs.extend(self.job_states.get(job).and_then(|state| state.key.clone()));
    }

    /// A job appeared or changed.
    pub fn apply_job(&mut self, job: TrainJob) -> Effect {
        self.versions.entry(job.metadata.namespace.clone().unwrap_or_default()).or_default();
        self.record_version("TrainJob", &job.metadata);
        let mut effect = Effect::default();
        let key = key_of(&job.metadata);
        let id = JobId::of(&job.metadata);
        self.unreadable.remove(&key);
        if let Some(before) = self.jobs.get(&key)
            && before.metadata.uid != job.metadata.uid
        {
            // The job was deleted and created again between two events of the watch.
            self.forget_job(&key, &mut effect);
        }
        let state = self.job_states.entry(id.clone()).or_default();
        state.key = Some(key.clone());
        let attempt = attempt_of(&job);
        let is_placed = placement_of(&job).is_some();
        if state.assumed.as_ref().is_some_and(|(assumed, _)| attempt > *assumed || is_placed) {
            state.assumed = None;
        }
        self.incidents.observe(&job);
        self.refusals.observe(&job);
        let before = self.jobs.insert(key.clone(), Arc::new(job));
        let has_ended = |job: &&Arc<TrainJob>| !is_live(job) && before.as_ref().is_none_or(|before| is_live(before));
        if let Some(job) = self.jobs.get(&key).filter(has_ended) {
            self.queue.learn(job);
        }
        let [old, new] = [before.as_ref(), self.jobs.get(&key)].map(|job| job?.spec.active_deadline_seconds);
        effect.room.extend(self.limit_changed(&id, old, new));
        effect.room.extend(self.update_restart_hold(&id));
        effect.room.extend(self.recount(&id));
        effect.jobs.insert(key);
        effect
    }

    /// A TrainJob that is invalid or too large appeared or changed.
    pub fn apply_unreadable(&mut self, metadata: &ObjectMeta, why: String) -> Effect {
        self.record_version("TrainJob", metadata);
        let key = key_of(metadata);
        let version = metadata.resource_version.clone().unwrap_or_default();
        // Do not report it again: our own status write comes back as a change.
        let reported = self.unreadable.get(&key).is_some_and(|before| before.reported && before.why == why);
        self.unreadable.insert(key.clone(), Unreadable { version, why, reported });
        let jobs = if reported { BTreeSet::new() } else { BTreeSet::from([key]) };
        Effect { jobs, ..Effect::default() }
    }

    /// A job was deleted.
    pub fn delete_job(&mut self, metadata: &ObjectMeta) -> Effect {
        self.record_version("TrainJob", metadata);
        let mut effect = Effect::default();
        let key = key_of(metadata);
        self.unreadable.remove(&key);
        let current = self.jobs.get(&key).and_then(|job| job.metadata.uid.clone());
        if current == metadata.uid {
            self.forget_job(&key, &mut effect);
        }
        effect
    }

    fn forget_job(&mut self, key: &Key, effect: &mut Effect) {
        let Some(id) = self.jobs.get(key).map(|job| JobId::of(&job.metadata)) else { return };
        effect.jobs.insert(key.clone());
        effect.jobs.extend(self.leave_queue(key, &id));
        if let Some(job) = self.jobs.remove(key) {
            let is_gated =
                |state: &JobState| state.pods.values().all(|pod| pod.gated && !state.writes.was_released(&pod.uid));
            let pods = self.job_states.get(&id).filter(|state| !state.pods.is_empty());
            self.refusals.forget_job(&job, pods.is_some_and(is_gated));
        }
        if !self.jobs.keys().any(|other| other.namespace == key.namespace) {
            self.versions.remove(&key.namespace);
        }
        effect.room.extend(self.recount(&id));
        effect.room.extend(self.update_restart_hold(&id));
        self.drop_if_empty(&id);
    }

    fn drop_if_empty(&mut self, id: &JobId) {
        let is_known = |key: &Key| self.jobs.get(key).is_some_and(|job| JobId::of(&job.metadata) == *id);
        let Some(state) = self.job_states.get(id) else { return };
        let is_empty = state.pods.is_empty() && state.unlabelled.is_empty() && state.objects.is_empty();
        if !state.key.as_ref().is_some_and(is_known) && is_empty {
            self.job_states.remove(id);
        }
    }

    /// An object other than a pod appeared or changed.
    pub fn apply_object(&mut self, kind: Kind, metadata: &ObjectMeta, content: serde_json::Value) -> Effect {
        self.record_version(kind.name(), metadata);
        let mut effect = Effect::default();
        let (Some(uid), Some(name)) = (label(metadata, labels::JOB_UID), metadata.name.clone()) else { return effect };
        let owned = ownership::owner(metadata) == Some(uid.as_str());
        let job = JobId { namespace: metadata.namespace.clone().unwrap_or_default(), uid };
        let next = ObjectView {
            uid: metadata.uid.clone().unwrap_or_default(),
            owned,
            deleting: metadata.deletion_timestamp.is_some(),
            content,
        };
        let state = self.job_states.entry(job.clone()).or_default();
        if state.objects.get(&(kind, name.clone())) != Some(&next) {
            state.objects.insert((kind, name), next);
            self.touch(&job, &mut effect);
        }
        effect
    }

    /// An object other than a pod was deleted, or lost its label.
    pub fn delete_object(&mut self, kind: Kind, metadata: &ObjectMeta) -> Effect {
        self.record_version(kind.name(), metadata);
        let mut effect = Effect::default();
        let name = metadata.name.clone().unwrap_or_default();
        let key = (kind, name);
        let uid = metadata.uid.clone().unwrap_or_default();
        // Search by UID, because the labels may have changed since.
        let holds = |state: &JobState| state.objects.get(&key).is_some_and(|object| object.uid == uid);
        let Some(job) = self.job_states.iter().find(|(_, state)| holds(state)).map(|(job, _)| job.clone()) else {
            return effect;
        };
        if let Some(state) = self.job_states.get_mut(&job) {
            state.objects.remove(&key);
            state.writes.forget(&uid);
        }
        self.touch(&job, &mut effect);
        self.drop_if_empty(&job);
        effect
    }

    /// A node appeared or changed.
    pub fn apply_node(&mut self, node: &Node) -> Effect {
        self.record_version("Node", &node.metadata);
        let view = NodeView::of(node);
        let name = view.facts.name.clone();
        self.missing.remove(&name);
        self.mass_outage.set(&name, view.silent_since.filter(|_| !view.out_of_service));
        let readiness = |view: &NodeView| (view.silent_since, view.out_of_service, view.facts.unschedulable);
        let before = self.usage.nodes().get(&name).map(readiness);
        let mut effect = Effect::default();
        if before != Some(readiness(&view)) {
            self.touch_node(&name, &mut effect);
        }
        if self.usage.set_node(view) {
            effect.room.insert(name);
        }
        effect
    }

    /// A node was deleted.
    pub fn delete_node(&mut self, metadata: &ObjectMeta) -> Effect {
        self.record_version("Node", metadata);
        let mut effect = Effect::default();
        let name = metadata.name.clone().unwrap_or_default();
        self.usage.remove_node(&name);
        self.mass_outage.set(&name, None);
        self.touch_node(&name, &mut effect);
        effect
    }

    pub fn touch_node(&self, name: &str, effect: &mut Effect) {
        for state in self.job_states.values() {
            if state.pods.values().any(|pod| pod.node.as_deref() == Some(name)) {
                effect.jobs.extend(state.key.clone());
            }
        }
    }

    /// Applies a placement before the watch cache shows it.
    pub fn assume(&mut self, job: &JobId, attempt: u32, placement: Option<PlacementStatus>) {
        if let Some(state) = self.job_states.get_mut(job) {
            state.assumed = placement.map(|placement| (attempt, placement));
        }
        self.recount(job);
    }
}

fn label(metadata: &ObjectMeta, name: &str) -> Option<String> {
    metadata.labels.as_ref().and_then(|labels| labels.get(name)).cloned()
}

#[cfg(test)]
mod tests;
