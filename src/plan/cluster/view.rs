//! What a reconcile reads: small views of Kubernetes objects. Everything else is left out, so that a test can describe a situation in a
//! few lines.

use super::clock;
pub use super::containers::Ended;
use super::containers::{InitContainer, Sidecar};
use super::machine::Machine;
use super::ownership::position;
use crate::eligible::{NodeFacts, NodeRules};
use crate::{kueue, resources};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Node, Pod, PodCondition, PodStatus};
use std::sync::Arc;
use switchyard_core::quantity::Resources;
use switchyard_crds::labels;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::names::TRAINER;

/// Phase of a pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Not all containers have started.
    #[default]
    Pending,
    /// Bound, and a container runs.
    Running,
    /// All containers ended well.
    Succeeded,
    /// A container failed, or the pod was ended.
    Failed,
    /// The node does not answer.
    Unknown,
}

/// Why the scheduler does not bind a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unschedulable {
    pub message: String,
    /// Since when this controller sees that, and sees nothing of an earlier attempt that might be in the way. The condition does not say: its
    /// transition is older than the gate.
    pub since: Option<Timestamp>,
}

/// Longest part of a kubelet's message that is shown, characters.
const LONGEST_MESSAGE: usize = 500;

/// Why the trainer does not run yet: its own container, or one that must start before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Waiting {
    pub container: String,
    /// The kubelet's reason, such as `ImagePullBackOff`.
    pub reason: String,
    pub message: String,
}

impl Waiting {
    /// That of a trainer that waits. A container that cannot start comes before one that only has not started yet.
    fn of(status: &PodStatus) -> Option<Waiting> {
        let state = |container: &ContainerStatus| {
            let waiting = container.state.as_ref()?.waiting.clone()?;
            let (reason, message) = (waiting.reason.unwrap_or_default(), waiting.message.unwrap_or_default());
            Some(Waiting { container: container.name.clone(), reason, message })
        };
        let containers = status.container_statuses.as_deref().unwrap_or_default();
        let own = state(containers.iter().find(|container| container.name == TRAINER)?)?;
        let others = status.init_container_statuses.iter().flatten().chain(containers).filter_map(state);
        let worse = std::iter::once(own.clone()).chain(others).find(|waiting| !waiting.is_ordinary());
        Some(worse.unwrap_or(own))
    }

    /// In the kubelet's words, which may be long.
    pub fn sentence(&self) -> String {
        let message: String = self.message.chars().take(LONGEST_MESSAGE).collect();
        format!("{}: {message}", self.reason)
    }

    /// It has not started yet, and nothing is known to keep it from that.
    pub fn is_ordinary(&self) -> bool {
        matches!(self.reason.as_str(), "ContainerCreating" | "PodInitializing")
    }
}

/// How far a pod that has not started has come, by its events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// When it last got on; `None`: not since its kubelet took it.
    pub at: Option<Timestamp>,
    pub is_pulling: bool,
}

/// The deletion of a pod, as the API server recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deletion {
    pub requested: Timestamp,
    /// When its grace period ends.
    pub due: Timestamp,
}

/// A pod of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodView {
    pub name: String,
    pub uid: String,
    /// Resource version: the state that was seen.
    pub version: Option<String>,
    /// Attempt it belongs to.
    pub attempt: u32,
    /// Position of its node in the job.
    pub node_rank: u32,
    /// Our scheduling gate is still set.
    pub gated: bool,
    /// The first of the gates of others that are set.
    pub other_gate: Option<String>,
    /// Its group in a queue of Kueue.
    pub group: Option<String>,
    /// What Kueue last said of that group, while its gate is set.
    pub admission: Option<String>,
    /// Node it is bound to.
    pub node: Option<String>,
    pub phase: Phase,
    /// The pod is ready, or would be without the sidecars that have ended.
    pub ready: bool,
    /// It has been deleted, by what the cache shows or by this controller's last write.
    pub deleting: bool,
    /// The same where the cache shows it.
    pub deletion: Option<Deletion>,
    /// The scheduler refuses it.
    pub unschedulable: Option<Unschedulable>,
    /// Why it is disturbed: reason and message of the condition `DisruptionTarget`.
    pub disruption: Option<(String, String)>,
    /// Why Kueue stops it.
    pub stopped_by_queue: Option<String>,
    /// Types of all conditions that are true.
    pub true_conditions: Vec<String>,
    /// Reason and message of the pod itself, such as `Evicted`.
    pub reason: Option<(String, String)>,
    pub waiting: Option<Waiting>,
    /// What its kubelet last said of it in an event, while its containers say nothing.
    pub warning: Option<Waiting>,
    /// How far it has come, by its events; `None`: they have not been read, or cannot be.
    pub progress: Option<Progress>,
    /// The init container that runs, or that failed.
    pub init: Option<InitContainer>,
    /// Containers next to the trainer that have ended or cannot start again.
    pub sidecars: Vec<Sidecar>,
    /// When the scheduler bound it.
    pub bound: Option<Timestamp>,
    /// The trainer container has ended.
    pub ended: Option<Ended>,
    /// When the last of its containers ended: all have, though the phase may not say so yet.
    pub stopped: Option<Timestamp>,
    /// When the kubelet took the pod.
    pub started: Option<Timestamp>,
    /// What it asks of a node.
    pub requests: Resources,
    /// It ends only when somebody deletes it: its containers are started again without end, as those of Deployments and DaemonSets are.
    pub is_lasting: bool,
    /// What it says of its nodes; kept while our gate holds it.
    pub rules: Option<Arc<NodeRules>>,
    /// Its priority, as the server resolved it.
    pub priority: i32,
    /// Its priority class, where that says `preemptionPolicy: Never`.
    pub never_preempts: Option<String>,
}

/// A kubelet needs a second or two from the end of the last container to the phase of the pod: it checks its containers once a second. A
/// shipper of logs needs a few more.
const SETTLING: SignedDuration = SignedDuration::from_secs(10);

impl PodView {
    /// Succeeded or failed, with all its containers: it holds nothing of its node any more.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    /// Its trainer has ended well, whatever its other containers do. What a pod that is being deleted says of its end counts with its phase.
    pub fn has_succeeded(&self) -> bool {
        let by_itself = !self.deleting || self.is_over();
        self.ended.as_ref().filter(|_| by_itself).map_or(self.phase == Phase::Succeeded, |ended| ended.code == 0)
    }

    /// Its trainer has failed, or the pod before it.
    pub fn has_failed(&self) -> bool {
        let by_itself = !self.deleting || self.is_over();
        self.ended.as_ref().filter(|_| by_itself).map_or(self.phase == Phase::Failed, |ended| ended.code != 0)
    }

    pub fn is_done(&self) -> bool {
        self.has_succeeded() || self.has_failed()
    }

    /// Whether a container of it may run, now or later: a pod on no node is never bound once it is deleted.
    pub fn may_run(&self) -> bool {
        !self.is_over() && self.stopped.is_none() && (self.node.is_some() || self.deletion.is_none())
    }

    /// It is on a node and has not started, and its containers do not say why.
    pub fn is_silent(&self) -> bool {
        let is_open = self.phase == Phase::Pending && self.node.is_some() && !self.deleting;
        is_open && self.waiting.as_ref().is_none_or(Waiting::is_ordinary)
    }

    /// Kueue has not admitted it yet.
    pub fn waits_for_kueue(&self) -> bool {
        self.other_gate.as_ref().is_some_and(|gate| gate.starts_with(kueue::GATES))
    }

    /// It is being deleted before it could start, but for its name: Kueue keeps the pods of a group until all of them have ended.
    pub fn is_lost_to_its_group(&self) -> bool {
        self.deleting && self.group.is_some()
    }

    /// What keeps it from starting, where anything is known to.
    pub fn hindrance(&self) -> Option<&Waiting> {
        self.waiting.as_ref().filter(|waiting| !waiting.is_ordinary()).or(self.warning.as_ref())
    }

    /// The container by whose end the pod is over, and that end: the trainer, or an init container that failed before it.
    pub fn end(&self) -> Option<(&str, &Ended)> {
        let init = || self.init.as_ref().and_then(|init| Some((init.name.as_str(), init.failure()?)));
        self.ended.as_ref().map(|ended| (TRAINER, ended)).or_else(init)
    }

    /// The container whose log says what the pod does: the trainer, or before it started the init container that runs or failed.
    pub fn logs(&self) -> Option<&str> {
        let has_started = self.ended.is_some() || self.phase == Phase::Running;
        let init = self.init.as_ref().filter(|_| !has_started);
        let may_have_started = has_started || self.phase != Phase::Pending;
        init.map(|init| init.name.as_str()).or_else(|| may_have_started.then_some(TRAINER))
    }

    /// Until when it is not deleted: its trainer has ended. Its kubelet is about to report that (a delete now would take its logs, and the
    /// kubelet would free the resources a second later), or other containers finish their work. `None`: it is over, runs, or has had enough
    /// time.
    pub fn settles(&self, now: Timestamp) -> Option<Timestamp> {
        let ended = self.stopped.or_else(|| self.ended.as_ref()?.at);
        let until = ended.filter(|_| !self.is_over() && !self.deleting)?.saturating_add(SETTLING).ok()?;
        (!clock::is_over(until, SETTLING, now)).then_some(until)
    }

    /// Reads one of our pods. Attempt and position are in its labels too, but its name cannot be changed.
    pub fn of(pod: &Pod) -> PodView {
        let (attempt, node_rank) = position(pod.metadata.name.as_deref().unwrap_or_default()).unwrap_or_default();
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let gates: Vec<&str> = spec
            .and_then(|spec| spec.scheduling_gates.as_deref())
            .unwrap_or_default()
            .iter()
            .map(|g| g.name.as_str())
            .collect();
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let is = |kind: &str, state: &str| conditions.iter().find(|c| c.type_ == kind && c.status == state);
        let because = |c: &PodCondition| (c.reason.clone().unwrap_or_default(), c.message.clone().unwrap_or_default());
        let containers = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
        let ends =
            containers.iter().map(|container| container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref());
        let ends: Option<Vec<Timestamp>> = ends.map(|end| end.map(|end| end.0)).collect();
        let is_all = spec.is_some_and(|spec| spec.containers.len() == containers.len());
        let trainer = containers.iter().find(|container| container.name == TRAINER);
        let sidecars = Sidecar::stopped(pod);
        // A sidecar that has ended makes the pod unready, though the trainer trains.
        let trains = !sidecars.is_empty() && trainer.is_some_and(|trainer| trainer.ready);
        let ContainerState { terminated, .. } = trainer.and_then(|trainer| trainer.state.clone()).unwrap_or_default();
        let node = spec.and_then(|spec| spec.node_name.clone()).filter(|name| !name.is_empty());
        PodView {
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            version: pod.metadata.resource_version.clone(),
            attempt,
            node_rank,
            gated: gates.contains(&labels::GANG_GATE),
            other_gate: gates.iter().find(|gate| **gate != labels::GANG_GATE).map(ToString::to_string),
            group: pod.metadata.labels.as_ref().and_then(|labels| labels.get(kueue::GROUP)).cloned(),
            admission: None,
            phase: match status.and_then(|status| status.phase.as_deref()) {
                Some("Running") => Phase::Running,
                Some("Succeeded") => Phase::Succeeded,
                Some("Failed") => Phase::Failed,
                Some("Unknown") => Phase::Unknown,
                // A kubelet keeps the phase it last reported until a pod is over: one that was short goes from Pending to Succeeded.
                _ if terminated.is_some() => Phase::Running,
                _ => Phase::Pending,
            },
            ready: is("Ready", "True").is_some() || trains,
            deleting: pod.metadata.deletion_timestamp.is_some(),
            deletion: pod.metadata.deletion_timestamp.as_ref().map(|due| {
                // The server sets the time at which the grace period ends.
                let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
                Deletion { requested: due.0.saturating_sub(grace).unwrap_or(due.0), due: due.0 }
            }),
            // A scheduler that lost the reply to its binding binds again, fails, and says so of a pod that is on its node.
            unschedulable: is("PodScheduled", "False")
                .filter(|_| node.is_none())
                .filter(|c| c.reason.as_deref().is_some_and(|reason| REFUSED.contains(&reason)))
                .map(|c| Unschedulable { message: because(c).1, since: None }),
            disruption: is("DisruptionTarget", "True").map(because),
            stopped_by_queue: is(kueue::STOPPED, "True").map(|c| because(c).1),
            true_conditions: conditions.iter().filter(|c| c.status == "True").map(|c| c.type_.clone()).collect(),
            reason: status
                .and_then(|status| Some((status.reason.clone()?, status.message.clone().unwrap_or_default()))),
            waiting: status.and_then(Waiting::of),
            warning: None,
            progress: None,
            init: InitContainer::of(pod),
            sidecars,
            bound: is("PodScheduled", "True").and_then(|c| c.last_transition_time.as_ref()).map(|time| time.0),
            ended: terminated.map(Ended::of),
            stopped: ends.filter(|_| is_all).and_then(|ends| ends.into_iter().max()),
            started: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            node,
            requests: spec.map(resources::of_pod).unwrap_or_default(),
            is_lasting: spec.is_some_and(|spec| {
                let is_restarted = spec.restart_policy.as_deref().is_none_or(|policy| policy == "Always");
                is_restarted && spec.active_deadline_seconds.is_none()
            }),
            rules: spec.filter(|_| gates.contains(&labels::GANG_GATE)).map(|spec| Arc::new(NodeRules::of(spec))),
            priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            never_preempts: spec
                .filter(|spec| spec.preemption_policy.as_deref() == Some("Never"))
                .map(|spec| spec.priority_class_name.clone().unwrap_or_default()),
        }
    }
}

/// The scheduler of pods that name none.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// What the scheduler says of a pod that it does not bind: it has looked at the nodes, or it has failed on the way (a claim or a volume that it
/// could not reserve, a webhook of its own).
const REFUSED: [&str; 2] = ["Unschedulable", "SchedulerError"];

/// An object of a job other than a pod, as it is in the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectView {
    pub uid: String,
    /// The job controls it.
    pub owned: bool,
    pub deleting: bool,
    /// The object as JSON, without its status.
    pub content: serde_json::Value,
}

impl ObjectView {
    /// True if the object has everything in `wanted`; what the server or others added does not matter.
    pub fn covers(&self, wanted: &serde_json::Value) -> bool {
        covers(&self.content, wanted)
    }
}

fn covers(is: &serde_json::Value, wanted: &serde_json::Value) -> bool {
    use serde_json::Value;
    match (is, wanted) {
        (Value::Object(is), Value::Object(wanted)) => {
            wanted.iter().all(|(key, value)| is.get(key).map_or(is_empty(value), |is| covers(is, value)))
        }
        (Value::Array(is), Value::Array(wanted)) => {
            is.len() == wanted.len() && is.iter().zip(wanted).all(|(is, wanted)| covers(is, wanted))
        }
        (is, wanted) => is == wanted,
    }
}

/// The server drops what is empty.
fn is_empty(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Null => true,
        Value::Object(map) => map.values().all(is_empty),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

/// Taint by which administrators give a node up
/// (<https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/#non-graceful-node-shutdown>).
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// A node that may take a pod, and what is free on it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeView {
    /// What decides whether a pod may go there.
    pub facts: NodeFacts,
    /// When it was registered.
    pub registered: Option<Timestamp>,
    /// Since when its kubelet does not report; `None`: it does, be it that the node is not ready.
    pub silent_since: Option<Timestamp>,
    /// It is not ready, and an administrator says by a taint that it will not come back as it was.
    pub out_of_service: bool,
    /// What its pods may take together.
    pub allocatable: Resources,
    /// Free: allocatable less what bound pods and claims of other jobs take.
    pub free: Resources,
    /// Its devices, or why the report of them cannot be used; `None`: there is no report.
    pub machine: Option<Result<Machine, String>>,
    /// GPUs that are allocated or planned by name, one bit each.
    pub taken: u32,
    /// What pods take that do not end by themselves.
    pub lasting: Resources,
    /// GPUs of `taken` that those pods hold, directly or by claims.
    pub lasting_gpus: u32,
    /// GPUs that the kubelet said were in use when the report was written.
    pub in_use: u32,
    /// GPUs that a driver offers for claims; `None`: none offers any.
    pub offered: Option<u32>,
}

impl NodeView {
    /// Reads a node. What is free there, and which devices it has, is filled in by others.
    pub fn of(node: &Node) -> NodeView {
        let status = node.status.as_ref();
        let ready = status
            .and_then(|status| status.conditions.as_deref())
            .unwrap_or_default()
            .iter()
            .find(|c| c.type_ == "Ready");
        let is_ready = ready.is_some_and(|condition| condition.status == "True");
        // `False` is a report: the containers go on, whatever the kubelet, its runtime or its network waits for.
        let silent_since = ready
            .filter(|condition| condition.status == "Unknown")
            .map(|condition| condition.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0));
        let facts = NodeFacts {
            name: node.metadata.name.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default().into(),
            taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            unschedulable: node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false),
            ready: is_ready,
        };
        let allocatable =
            status.and_then(|status| status.allocatable.as_ref()).map(resources::of_quantities).unwrap_or_default();
        let out_of_service = !is_ready && facts.taints.iter().any(|taint| taint.key == OUT_OF_SERVICE);
        let registered = node.metadata.creation_timestamp.as_ref().map(|time| time.0);
        NodeView { facts, registered, silent_since, out_of_service, allocatable, ..NodeView::default() }
    }

    /// Whether it is the node of that time, and has not been registered again since.
    pub fn was_there(&self, at: Timestamp) -> bool {
        self.registered.is_none_or(|registered| registered <= at)
    }

    /// Its devices, where there is a report that can be used.
    pub fn described(&self) -> Option<&Machine> {
        self.machine.as_ref()?.as_ref().ok()
    }

    /// How many GPUs it has: by its report, else by its allocatable resources.
    pub fn gpus(&self) -> u32 {
        let counted = u32::try_from(self.allocatable.get(GPU_RESOURCE) / 1000).unwrap_or(0);
        self.described().map_or(counted, |machine| machine.gpus.len() as u32)
    }
}
