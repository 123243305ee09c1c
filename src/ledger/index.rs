//! What the watches have shown, as small views: the one place that snapshots are made from.
//!
//! Plain data: `apply` and `delete` take objects in, and return which jobs must be reconciled. It knows no client and no clock.

mod claims;

use crate::devices::Devices;
use crate::job::{Key, attempt_of, key_of, placement_of};
use crate::own_writes::OwnWrites;
use crate::reservation::Reservation;
use crate::usage::{Share, Usage};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use switchyard_crds::{PlacedNode, PlacementStatus, TrainJob, labels};
use switchyard_plan::cluster::transport::Seen;
use switchyard_plan::cluster::view::{self, NodeView, ObjectView, PodView};
use switchyard_plan::objects::Kind;
use switchyard_worker_contract::event::Summary;

/// A job that cannot be read, and why.
#[derive(Debug, Clone)]
pub struct Unreadable {
    pub version: String,
    pub why: String,
    /// Its status says so.
    pub told: bool,
}

/// Position of a pod in its job; pods are in the order of attempt and node rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    pub attempt: u32,
    pub node_rank: u32,
    /// Name of the pod: somebody else may have created another one with our labels.
    pub name: String,
}

/// Where a pod is kept.
#[derive(Debug)]
struct Kept {
    /// UID of the job.
    job: String,
    slot: Slot,
}

/// What belongs to one job, by the UID that its objects carry.
#[derive(Debug, Default)]
pub struct Family {
    pub key: Option<Key>,
    pub pods: BTreeMap<Slot, PodView>,
    pub objects: BTreeMap<(Kind, String), ObjectView>,
    /// A place that was decided a moment ago and is not in the cache yet.
    pub assumed: Option<(u32, PlacementStatus)>,
    pub own: OwnWrites,
    /// What the last write met, one sentence.
    pub trouble: Option<String>,
    /// When the status was last written.
    pub status_written: Option<Timestamp>,
    /// Last figures of the training.
    pub summary: Option<Summary>,
    /// What pods said of the links between ranks, by attempt and node rank.
    pub seen: BTreeMap<u32, BTreeMap<u32, Seen>>,
    /// It would not fit into the empty cluster either.
    pub hopeless: bool,
    /// The attempt that gives way to a job of higher priority, and to which one.
    pub gives_way_in: Option<u32>,
    pub gives_way_to: Option<String>,
}

/// What the watches have shown.
#[derive(Debug, Default)]
pub struct Index {
    pub jobs: BTreeMap<Key, Arc<TrainJob>>,
    pub unreadable: BTreeMap<Key, Unreadable>,
    /// By UID of the job.
    pub families: BTreeMap<String, Family>,
    pub usage: Usage,
    pub devices: Devices,
    /// Where each pod of ours is kept, by its UID.
    pods: BTreeMap<String, Kept>,
    /// Latest resource version seen, by kind.
    pub versions: BTreeMap<&'static str, u64>,
    /// Jobs that wait for room.
    pub waiting: BTreeSet<Key>,
    /// What the first of them holds.
    pub reservation: Option<Reservation>,
    /// What gangs hold that start again, by UID of the job.
    pub holes: BTreeMap<String, Vec<String>>,
}

/// What a change means.
#[derive(Debug, Default)]
pub struct Effect {
    /// Jobs to reconcile.
    pub jobs: BTreeSet<Key>,
    /// There may be room for those that wait.
    pub room: bool,
}

impl AsMut<Usage> for Index {
    fn as_mut(&mut self) -> &mut Usage {
        &mut self.usage
    }
}

impl Index {
    pub fn saw(&mut self, kind: &'static str, metadata: &ObjectMeta) {
        let version = metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0);
        let latest = self.versions.entry(kind).or_default();
        *latest = (*latest).max(version);
    }

    fn touch(&self, uid: &str, effect: &mut Effect) {
        effect.jobs.extend(self.families.get(uid).and_then(|family| family.key.clone()));
    }

    /// A job appeared or changed.
    pub fn apply_job(&mut self, job: TrainJob) -> Effect {
        self.saw("TrainJob", &job.metadata);
        let mut effect = Effect::default();
        let key = key_of(&job.metadata);
        let uid = job.metadata.uid.clone().unwrap_or_default();
        self.unreadable.remove(&key);
        if let Some(before) = self.jobs.get(&key)
            && before.metadata.uid != job.metadata.uid
        {
            // Deleted and made again while we did not look.
            self.forget_job(&key, &mut effect);
        }
        let family = self.families.entry(uid.clone()).or_default();
        family.key = Some(key.clone());
        let attempt = attempt_of(&job);
        let is_placed = placement_of(&job).is_some();
        if family.assumed.as_ref().is_some_and(|(assumed, _)| attempt > *assumed || is_placed) {
            family.assumed = None;
        }
        self.jobs.insert(key.clone(), Arc::new(job));
        effect.room |= self.hold_holes(&uid);
        effect.room |= self.recount(&uid);
        effect.jobs.insert(key);
        effect
    }

    /// A job that cannot be read appeared or changed.
    pub fn apply_unreadable(&mut self, metadata: &ObjectMeta, why: String) -> Effect {
        self.saw("TrainJob", metadata);
        let key = key_of(metadata);
        let version = metadata.resource_version.clone().unwrap_or_default();
        // Our own write comes back as a change and must not be reported twice.
        let told = self.unreadable.get(&key).is_some_and(|before| before.told && before.why == why);
        self.unreadable.insert(key.clone(), Unreadable { version, why, told });
        let jobs = if told { BTreeSet::new() } else { BTreeSet::from([key]) };
        Effect { jobs, room: false }
    }

    /// A job is gone.
    pub fn delete_job(&mut self, metadata: &ObjectMeta) -> Effect {
        self.saw("TrainJob", metadata);
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
        self.waiting.remove(key);
        let Some(job) = self.jobs.remove(key) else { return };
        let uid = job.metadata.uid.clone().unwrap_or_default();
        effect.jobs.insert(key.clone());
        effect.room |= self.recount(&uid);
        effect.room |= self.hold_holes(&uid) | self.waits_no_more(&uid);
        self.drop_if_empty(&uid);
    }

    fn drop_if_empty(&mut self, uid: &str) {
        let is_known = |key: &Key| self.jobs.get(key).is_some_and(|job| job.metadata.uid.as_deref() == Some(uid));
        let Some(family) = self.families.get(uid) else { return };
        if !family.key.as_ref().is_some_and(is_known) && family.pods.is_empty() && family.objects.is_empty() {
            self.families.remove(uid);
        }
    }

    /// A pod appeared or changed, ours or not.
    pub fn apply_pod(&mut self, pod: &Pod) -> Effect {
        self.saw("Pod", &pod.metadata);
        let mut effect = Effect::default();
        let Some(uid) = pod.metadata.uid.clone() else { return effect };
        let Some(job) = view::owner(&pod.metadata).map(str::to_string) else {
            let pod = PodView::of(pod);
            let node = pod.node.filter(|_| !matches!(pod.phase, view::Phase::Succeeded | view::Phase::Failed));
            let share = node.map(|node| Share { node, amount: pod.requests, gpus: Vec::new() });
            effect.room = self.usage.set_share(&uid, share);
            return effect;
        };
        let next = PodView::of(pod);
        let slot = Slot { attempt: next.attempt, node_rank: next.node_rank, name: next.name.clone() };
        let family = self.families.entry(job.clone()).or_default();
        if family.key.is_none() {
            let name = view::controller(&pod.metadata).map(|owner| owner.name.clone());
            let namespace = pod.metadata.namespace.clone().unwrap_or_default();
            family.key = name.map(|name| Key { namespace, name });
        }
        let before = self.pods.insert(uid.clone(), Kept { job: job.clone(), slot: slot.clone() });
        if let Some(Kept { slot: before, .. }) = before.filter(|before| before.slot != slot) {
            family.pods.remove(&before);
        }
        // Only what the plan reads counts as a change; a new version alone does not.
        let is_news = family.pods.get_mut(&slot).is_none_or(|before| {
            before.version.clone_from(&next.version);
            *before != next
        });
        family.pods.insert(slot.clone(), next);
        effect.room = self.recount_pod(&job, &slot);
        if is_news {
            self.touch(&job, &mut effect);
        }
        effect
    }

    /// A pod is gone.
    pub fn delete_pod(&mut self, metadata: &ObjectMeta) -> Effect {
        self.saw("Pod", metadata);
        let mut effect = Effect::default();
        let Some(uid) = &metadata.uid else { return effect };
        effect.room = self.usage.set_share(uid, None);
        if let Some(Kept { job, slot }) = self.pods.remove(uid) {
            if let Some(family) = self.families.get_mut(&job) {
                if family.pods.get(&slot).is_some_and(|pod| pod.uid == *uid) {
                    family.pods.remove(&slot);
                }
                family.own.forget_deletion(uid);
            }
            self.touch(&job, &mut effect);
            self.drop_if_empty(&job);
        }
        effect
    }

    /// An object other than a pod appeared or changed.
    pub fn apply_object(&mut self, kind: Kind, metadata: &ObjectMeta, content: serde_json::Value) -> Effect {
        self.saw(kind.name(), metadata);
        let mut effect = Effect::default();
        let (Some(job), Some(name)) = (label(metadata, labels::JOB_UID), metadata.name.clone()) else { return effect };
        let next = ObjectView {
            uid: metadata.uid.clone().unwrap_or_default(),
            owned: view::owner(metadata) == Some(job.as_str()),
            deleting: metadata.deletion_timestamp.is_some(),
            content,
        };
        let family = self.families.entry(job.clone()).or_default();
        if family.objects.get(&(kind, name.clone())) != Some(&next) {
            family.objects.insert((kind, name), next);
            self.touch(&job, &mut effect);
        }
        effect
    }

    /// An object other than a pod is gone, or lost its label.
    pub fn delete_object(&mut self, kind: Kind, metadata: &ObjectMeta) -> Effect {
        self.saw(kind.name(), metadata);
        let mut effect = Effect::default();
        let name = metadata.name.clone().unwrap_or_default();
        let place = (kind, name);
        let uid = metadata.uid.clone().unwrap_or_default();
        // The labels may be the ones it has now: looked up by UID.
        let holds = |family: &Family| family.objects.get(&place).is_some_and(|object| object.uid == uid);
        let Some(job) = self.families.iter().find(|(_, family)| holds(family)).map(|(job, _)| job.clone()) else {
            return effect;
        };
        if let Some(family) = self.families.get_mut(&job) {
            family.objects.remove(&place);
            family.own.forget_deletion(&uid);
        }
        self.touch(&job, &mut effect);
        self.drop_if_empty(&job);
        effect
    }

    /// A node appeared or changed.
    pub fn apply_node(&mut self, node: &Node) -> Effect {
        self.saw("Node", &node.metadata);
        let view = NodeView::of(node);
        let name = view.facts.name.clone();
        let readiness = |view: &NodeView| view.not_ready_since.is_some();
        let before = self.usage.nodes().get(&name).map(readiness);
        let mut effect = Effect::default();
        if before != Some(readiness(&view)) {
            self.touch_node(&name, &mut effect);
        }
        effect.room = self.usage.set_node(view);
        effect
    }

    /// A node is gone.
    pub fn delete_node(&mut self, metadata: &ObjectMeta) -> Effect {
        self.saw("Node", metadata);
        let mut effect = Effect::default();
        let name = metadata.name.clone().unwrap_or_default();
        self.usage.remove_node(&name);
        self.touch_node(&name, &mut effect);
        effect
    }

    pub fn touch_node(&self, name: &str, effect: &mut Effect) {
        for family in self.families.values() {
            if family.pods.values().any(|pod| pod.node.as_deref() == Some(name)) {
                effect.jobs.extend(family.key.clone());
            }
        }
    }

    /// Takes a place into account before the cache shows it.
    pub fn assume(&mut self, uid: &str, attempt: u32, placement: Option<PlacementStatus>) {
        if let Some(family) = self.families.get_mut(uid) {
            family.assumed = placement.map(|placement| (attempt, placement));
        }
        self.recount(uid);
    }

    /// Recounts what the pods of a job take. Returns whether something became free.
    fn recount(&mut self, job: &str) -> bool {
        let slots: Vec<_> =
            self.families.get(job).map(|family| family.pods.keys().cloned().collect()).unwrap_or_default();
        slots.iter().fold(false, |room, slot| self.recount_pod(job, slot) | room)
    }

    /// A pod takes room on the node it is bound to, or will be: from the moment the place of its gang is decided.
    fn recount_pod(&mut self, job: &str, slot: &Slot) -> bool {
        let Some(family) = self.families.get(job) else { return false };
        let Some(pod) = family.pods.get(slot) else { return false };
        let promised = self.promised(family, pod);
        // What was promised to an attempt that is over stays taken until its pod is gone: its gate is lifted, so it may run or be bound at any
        // moment, and its claim have devices, without that having been seen yet.
        let before = self.usage.share(&pod.uid).filter(|_| promised.is_none() && !pod.gated);
        let promised = promised.map(|placed| (placed.node_name.as_str(), placed.gpus.as_slice()));
        let promised = promised.or(before.map(|share| (share.node.as_str(), share.gpus.as_slice())));
        let node = pod.node.as_deref().or(promised.map(|(node, _)| node));
        let share = node.filter(|_| !pod.is_over()).map(|node| Share {
            gpus: promised.filter(|(place, _)| *place == node).map(|(_, gpus)| gpus.to_vec()).unwrap_or_default(),
            amount: pod.requests.clone(),
            node: node.to_string(),
        });
        let uid = pod.uid.clone();
        self.usage.set_share(&uid, share)
    }

    /// The place of a pod that the last decision is about.
    fn promised<'a>(&'a self, family: &'a Family, pod: &PodView) -> Option<&'a PlacedNode> {
        let job = self.jobs.get(family.key.as_ref()?)?;
        let attempt = attempt_of(job);
        let (attempt, placement) = match &family.assumed {
            Some((attempt, placement)) => (*attempt, placement),
            None => (attempt, placement_of(job)?),
        };
        if pod.attempt != attempt {
            return None;
        }
        placement.nodes.get(pod.node_rank as usize)
    }
}

fn label(metadata: &ObjectMeta, name: &str) -> Option<String> {
    metadata.labels.as_ref().and_then(|labels| labels.get(name)).cloned()
}

#[cfg(test)]
mod tests;
