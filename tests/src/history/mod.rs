//! Records every change in a control plane, and checks the history against oracles.
//!
//! ```text
//! Recorder (one raw watch per kind) ─> History (list by revision) ─> oracle (pure) ─> Violations
//! ```
//!
//! All objects are stored in one etcd, so their resource versions form a single sequence. Sorted by
//! them, the changes from several watches are in the order in which they happened.

mod gpus;
mod oracle;
mod preemption;
mod recorder;
mod replay;

pub use gpus::{double_gpus, mispredicted, partly_bound_gangs};
pub use oracle::{
    ORACLES, Violation, double_runs, late_messages, monotone_attempts, over_allocated, over_promised, partial_gangs,
    status_writes, too_many_status_writes, unfounded_restarts, waits_despite_room,
};
pub use preemption::{excessive_preemptions, lost_steps, policy_preemptions, starved_head};
pub use recorder::Recorder;
pub use replay::{Replay, Replayed, replay};

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use switchyard_core::quantity::Resources;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{TrainJob, TrainJobStatus};
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::view::{NodeView, PodView};
use switchyard_plan::eligible::NodeFacts;
use switchyard_plan::resources;

/// Kind of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The object was created, or existed when recording began.
    Added,
    /// The object was changed.
    Modified,
    /// The object was deleted.
    Deleted,
}

/// Facts about a job that the oracles need.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JobFact {
    /// Number of pods.
    pub nodes: usize,
    /// Changes with the spec.
    pub generation: i64,
    /// True while the job is being deleted.
    pub deleting: bool,
    /// Status; empty for a new job.
    pub status: TrainJobStatus,
    /// The complete object; `None` in synthetic histories.
    pub whole: Option<Arc<TrainJob>>,
}

impl JobFact {
    fn of(job: &TrainJob) -> JobFact {
        JobFact {
            nodes: job.spec.trainer.num_nodes.unsigned_abs() as usize,
            generation: job.metadata.generation.unwrap_or(0),
            deleting: job.metadata.deletion_timestamp.is_some(),
            status: job.status.clone().unwrap_or_default(),
            whole: Some(Arc::new(job.clone())),
        }
    }

    /// Returns whether a condition is true.
    pub fn is(&self, kind: &str) -> bool {
        self.status.conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True")
    }

    /// Current stage; empty before the first one.
    pub fn stage(&self) -> &str {
        let summary = self.status.conditions.iter().find(|c| c.type_ == switchyard_crds::conditions::SUCCEEDED);
        summary.map_or("", |condition| condition.reason.as_str())
    }

    /// Current attempt; 0 before the first one.
    pub fn attempt(&self) -> u32 {
        self.status.attempt.unwrap_or(0).unsigned_abs()
    }
}

/// Any pod, whether or not it belongs to a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodFact {
    /// UID of the job; empty if the pod is not ours.
    pub job: String,
    /// All other facts.
    pub view: PodView,
}

impl PodFact {
    fn of(pod: &Pod) -> PodFact {
        PodFact { job: ownership::owner(&pod.metadata).unwrap_or_default().into(), view: PodView::of(pod) }
    }

    /// Returns the node whose resources the pod occupies, if any.
    pub fn holds(&self) -> Option<&str> {
        self.view.node.as_deref().filter(|_| !self.view.is_over())
    }
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFact {
    /// The node is Ready.
    pub ready: bool,
    /// The node is not reporting, or an administrator took it out of service.
    pub silent: bool,
    /// Neither cordoned nor tainted.
    pub open: bool,
    /// Allocatable resources; `None` if the node has not reported since it registered.
    pub allocatable: Option<Resources>,
    /// Facts that decide whether a pod can be placed there.
    pub facts: NodeFacts,
}

impl NodeFact {
    fn of(node: &Node) -> NodeFact {
        let spec = node.spec.clone().unwrap_or_default();
        let status = node.status.clone().unwrap_or_default();
        let view = NodeView::of(node);
        NodeFact {
            silent: view.silent_since.is_some() || view.out_of_service,
            ready: status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True"),
            open: spec.unschedulable != Some(true) && spec.taints.is_none_or(|taints| taints.is_empty()),
            allocatable: status.allocatable.as_ref().map(resources::of_quantities),
            facts: view.facts,
        }
    }
}

/// A device claim.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClaimFact {
    /// UID of the job; empty if the claim is not ours.
    pub job: String,
    /// Pool and name of each allocated device.
    pub devices: Vec<(String, String)>,
}

impl ClaimFact {
    fn of(claim: &ResourceClaim) -> ClaimFact {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_deref());
        let devices = results.unwrap_or_default().iter().map(|result| (result.pool.clone(), result.device.clone()));
        ClaimFact { job: ownership::owner(&claim.metadata).unwrap_or_default().into(), devices: devices.collect() }
    }
}

/// GPUs offered by a driver.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OfferFact {
    /// Node name.
    pub node: String,
    /// UUIDs by pool and device name.
    pub gpus: BTreeMap<(String, String), String>,
}

impl OfferFact {
    fn of(slice: &ResourceSlice) -> OfferFact {
        let pool = &slice.spec.pool.name;
        let devices = slice.spec.devices.iter().flatten().filter_map(|device| {
            let uuid = device.attributes.as_ref()?.get("uuid")?.string.clone()?;
            Some(((pool.clone(), device.name.clone()), uuid))
        });
        OfferFact { node: slice.spec.node_name.clone().unwrap_or_default(), gpus: devices.collect() }
    }
}

/// State of an object after a change; its last state if it was deleted.
#[derive(Debug, Clone, PartialEq)]
pub enum Fact {
    /// A TrainJob.
    Job(Box<JobFact>),
    /// A pod.
    Pod(Box<PodFact>),
    /// A node.
    Node(NodeFact),
    /// A device claim.
    Claim(ClaimFact),
    /// Devices offered by a driver.
    Offer(OfferFact),
    /// An agent's report.
    Report(Box<GPUTopology>),
}

/// One change of one object.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Resource version.
    pub revision: u64,
    /// Kind of change.
    pub what: ChangeKind,
    /// `NAMESPACE/NAME`; for a node, its name.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// State of the object.
    pub fact: Fact,
}

/// All changes, in the order in which they happened.
#[derive(Debug, Clone, Default)]
pub struct History {
    changes: Vec<Change>,
}

impl History {
    /// Sorts the changes.
    ///
    /// # Errors
    /// A change is missing or duplicated: a missing object changes, or an existing one is added
    /// again.
    pub fn new(mut changes: Vec<Change>) -> Result<History> {
        changes.sort_by_key(|change| change.revision);
        let mut alive = BTreeSet::new();
        let mut last = 0;
        for Change { revision, what, name, uid, .. } in &changes {
            ensure!(*revision > last, "revision {revision} occurs twice: {name}");
            last = *revision;
            let fits = match what {
                ChangeKind::Added => alive.insert(uid),
                ChangeKind::Modified => alive.contains(uid),
                ChangeKind::Deleted => alive.remove(uid),
            };
            ensure!(fits, "revision {revision}: {name} is {what:?}, but the change before it is missing");
        }
        Ok(History { changes })
    }

    /// All changes, in order.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Visits every change with the object's previous state and the world after the change. Returns
    /// the final world.
    pub fn walk<'a>(&'a self, mut visit: impl FnMut(Option<&'a Fact>, &World<'a>, &'a Change)) -> World<'a> {
        let mut world = World::default();
        let mut facts: BTreeMap<&str, &Fact> = BTreeMap::new();
        for change in &self.changes {
            world.apply(change);
            visit(facts.insert(&change.uid, &change.fact), &world, change);
            if change.what == ChangeKind::Deleted {
                facts.remove(change.uid.as_str());
            }
        }
        world
    }
}

/// All objects at one revision.
#[derive(Debug, Clone, Default)]
pub struct World<'a> {
    /// Jobs by UID, with their names.
    pub jobs: BTreeMap<&'a str, (&'a str, &'a JobFact)>,
    /// Pods by UID.
    pub pods: BTreeMap<&'a str, &'a PodFact>,
    /// Nodes by name.
    pub nodes: BTreeMap<&'a str, &'a NodeFact>,
    /// Claims by UID, with their names.
    pub claims: BTreeMap<&'a str, (&'a str, &'a ClaimFact)>,
    /// Offers by UID.
    pub offers: BTreeMap<&'a str, &'a OfferFact>,
    /// Reports by node.
    pub reports: BTreeMap<&'a str, &'a GPUTopology>,
}

impl<'a> World<'a> {
    fn apply(&mut self, change: &'a Change) {
        let gone = change.what == ChangeKind::Deleted;
        let (uid, name) = (change.uid.as_str(), change.name.as_str());
        match &change.fact {
            Fact::Job(_) if gone => drop(self.jobs.remove(uid)),
            Fact::Pod(_) if gone => drop(self.pods.remove(uid)),
            Fact::Node(_) if gone => drop(self.nodes.remove(name)),
            Fact::Claim(_) if gone => drop(self.claims.remove(uid)),
            Fact::Offer(_) if gone => drop(self.offers.remove(uid)),
            Fact::Report(_) if gone => drop(self.reports.remove(name)),
            Fact::Job(job) => drop(self.jobs.insert(uid, (name, &**job))),
            Fact::Pod(pod) => drop(self.pods.insert(uid, &**pod)),
            Fact::Node(node) => drop(self.nodes.insert(name, node)),
            Fact::Claim(claim) => drop(self.claims.insert(uid, (name, claim))),
            Fact::Offer(offer) => drop(self.offers.insert(uid, offer)),
            Fact::Report(report) => drop(self.reports.insert(name, report)),
        }
    }

    /// Pods of a job.
    pub fn pods_of<'b>(&'b self, job: &'b str) -> impl Iterator<Item = &'a PodFact> + 'b {
        self.pods.values().copied().filter(move |pod| pod.job == job)
    }

    /// UUIDs of a claim's GPUs, as far as a driver offers them.
    pub fn gpus_of<'b>(&'b self, claim: &'b ClaimFact) -> impl Iterator<Item = &'a str> + 'b {
        let find = |device| self.offers.values().find_map(|offer| offer.gpus.get(device));
        claim.devices.iter().filter_map(find).map(String::as_str)
    }
}
