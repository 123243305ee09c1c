//! Inputs of a reconcile: reduced views of Kubernetes objects. They contain only what plans need,
//! so a test can describe a situation in a few lines.

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
    /// All containers succeeded.
    Succeeded,
    /// A container failed, or the pod was terminated.
    Failed,
    /// The node does not respond.
    Unknown,
}

/// Why the scheduler does not bind a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unschedulable {
    pub message: String,
    /// Since when this controller has seen the refusal while no pod of an earlier attempt could be
    /// in the way. The condition's transition time cannot be used because it precedes the lifting
    /// of the gate.
    pub since: Option<Timestamp>,
}

/// Maximum length of a kubelet message that is shown, in characters.
const MAX_MESSAGE: usize = 500;

/// Why the trainer is not running yet: the state of its own container, or of one that must start
/// before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Waiting {
    pub container: String,
    /// The kubelet's reason, such as `ImagePullBackOff`.
    pub reason: String,
    pub message: String,
}

impl Waiting {
    /// Waiting state of a pod. A container that cannot start takes precedence over one that has not
    /// started yet.
    fn of(status: &PodStatus) -> Option<Waiting> {
        let state = |container: &ContainerStatus| {
            let waiting = container.state.as_ref()?.waiting.clone()?;
            let (reason, message) = (waiting.reason.unwrap_or_default(), waiting.message.unwrap_or_default());
            Some(Waiting { container: container.name.clone(), reason, message })
        };
        let containers = status.container_statuses.as_deref().unwrap_or_default();
        let own = state(containers.iter().find(|container| container.name == TRAINER)?)?;
        let others = status.init_container_statuses.iter().flatten().chain(containers).filter_map(state);
        let worse = std::iter::once(own.clone()).chain(others).find(|waiting| !waiting.is_starting());
        Some(worse.unwrap_or(own))
    }

    /// The kubelet's message, shortened.
    pub fn sentence(&self) -> String {
        let message: String = self.message.chars().take(MAX_MESSAGE).collect();
        format!("{}: {message}", self.reason)
    }

    /// Whether it is merely still starting, without a known obstacle.
    pub fn is_starting(&self) -> bool {
        matches!(self.reason.as_str(), "ContainerCreating" | "PodInitializing")
    }
}

/// Startup progress of a pod, from its events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Time of the last progress. `None` if there was none since the kubelet accepted the pod.
    pub at: Option<Timestamp>,
    pub is_pulling: bool,
}

/// Deletion of a pod, as recorded by the API server.
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
    /// Resource version of the observed state.
    pub version: Option<String>,
    /// Attempt that it belongs to.
    pub attempt: u32,
    /// Rank of its node in the job.
    pub node_rank: u32,
    /// Our scheduling gate is still set.
    pub gated: bool,
    /// The first gate that is set by another controller.
    pub other_gate: Option<String>,
    /// Its Kueue pod group.
    pub group: Option<String>,
    /// Kueue's last message about that group, while its gate is set.
    pub admission: Option<String>,
    /// Node that it is bound to.
    pub node: Option<String>,
    pub phase: Phase,
    /// The pod is ready, or would be but for sidecars that have ended.
    pub ready: bool,
    /// It has been deleted, according to the cache or to this controller's last write.
    pub deleting: bool,
    /// Its deletion, according to the cache.
    pub deletion: Option<Deletion>,
    /// The scheduler refuses it.
    pub unschedulable: Option<Unschedulable>,
    /// Reason and message of the condition `DisruptionTarget`.
    pub disruption: Option<(String, String)>,
    /// Why Kueue stops it.
    pub stopped_by_queue: Option<String>,
    /// Types of all conditions that are true.
    pub true_conditions: Vec<String>,
    /// Reason and message of the pod's own status, such as `Evicted`.
    pub reason: Option<(String, String)>,
    pub waiting: Option<Waiting>,
    /// The kubelet's last warning event about it, while its container states show no error.
    pub warning: Option<Waiting>,
    /// Startup progress from its events. `None` if they have not been read or cannot be read.
    pub progress: Option<Progress>,
    /// The init container that is running or has failed.
    pub init: Option<InitContainer>,
    /// Containers next to the trainer that have ended or cannot restart.
    pub sidecars: Vec<Sidecar>,
    /// When the scheduler bound it.
    pub bound: Option<Timestamp>,
    /// How the trainer container ended.
    pub ended: Option<Ended>,
    /// When its last container ended. Set once all have ended, even if the phase does not show that
    /// yet.
    pub stopped: Option<Timestamp>,
    /// When the kubelet accepted the pod.
    pub started: Option<Timestamp>,
    /// Its resource requests.
    pub requests: Resources,
    /// It ends only when it is deleted: its containers are restarted indefinitely, as in
    /// Deployments and DaemonSets.
    pub is_lasting: bool,
    /// Its node rules, kept while our gate is set.
    pub rules: Option<Arc<NodeRules>>,
    /// Its priority, as resolved by the server.
    pub priority: i32,
    /// Its priority class if that has `preemptionPolicy: Never`.
    pub never_preempts: Option<String>,
}

/// Time allowed between the end of the containers and the final pod phase. A kubelet needs a second
/// or two, because it checks containers once a second. A log shipper needs a few more.
const SETTLE_TIME: SignedDuration = SignedDuration::from_secs(10);

impl PodView {
    /// Whether the pod with all its containers has succeeded or failed. It then holds no resources
    /// of its node.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    /// Whether its trainer has succeeded, regardless of other containers. For a pod that is being
    /// deleted, the exit code counts only once the phase is final.
    pub fn has_succeeded(&self) -> bool {
        let by_itself = !self.deleting || self.is_over();
        self.ended.as_ref().filter(|_| by_itself).map_or(self.phase == Phase::Succeeded, |ended| ended.code == 0)
    }

    /// Whether its trainer has failed, or the pod before the trainer ran.
    pub fn has_failed(&self) -> bool {
        let by_itself = !self.deleting || self.is_over();
        self.ended.as_ref().filter(|_| by_itself).map_or(self.phase == Phase::Failed, |ended| ended.code != 0)
    }

    pub fn is_done(&self) -> bool {
        self.has_succeeded() || self.has_failed()
    }

    /// Whether one of its containers may run now or later. An unbound pod is never bound once it is
    /// deleted.
    pub fn can_run(&self) -> bool {
        !self.is_over() && self.stopped.is_none() && (self.node.is_some() || self.deletion.is_none())
    }

    /// Whether it is bound and has not started, while its container states give no reason.
    pub fn is_silent(&self) -> bool {
        let is_open = self.phase == Phase::Pending && self.node.is_some() && !self.deleting;
        is_open && self.waiting.as_ref().is_none_or(Waiting::is_starting)
    }

    /// Whether Kueue has not admitted it yet.
    pub fn waits_for_kueue(&self) -> bool {
        self.other_gate.as_ref().is_some_and(|gate| gate.starts_with(kueue::GATES))
    }

    /// Whether it is being deleted but its name stays in use: Kueue keeps the pods of a group until
    /// all of them have ended.
    pub fn is_held_by_group(&self) -> bool {
        self.deleting && self.group.is_some()
    }

    /// The known obstacle that keeps it from starting, if any.
    pub fn blocker(&self) -> Option<&Waiting> {
        self.waiting.as_ref().filter(|waiting| !waiting.is_starting()).or(self.warning.as_ref())
    }

    /// The container whose exit ended the pod, and that exit: the trainer, or an init container
    /// that failed before it.
    pub fn end(&self) -> Option<(&str, &Ended)> {
        let init = || self.init.as_ref().and_then(|init| Some((init.name.as_str(), init.failure()?)));
        self.ended.as_ref().map(|ended| (TRAINER, ended)).or_else(init)
    }

    /// The container whose log is relevant: the trainer, or, before it has started, the init
    /// container that is running or has failed.
    pub fn logs(&self) -> Option<&str> {
        let has_started = self.ended.is_some() || self.phase == Phase::Running;
        let init = self.init.as_ref().filter(|_| !has_started);
        let can_have_started = has_started || self.phase != Phase::Pending;
        init.map(|init| init.name.as_str()).or_else(|| can_have_started.then_some(TRAINER))
    }

    /// Until when the pod must not be deleted after its trainer has ended. Its kubelet is about to
    /// report the end (deleting now would lose its logs, and the kubelet frees the resources a
    /// second later anyway), or other containers are finishing. `None` if the pod is over, still
    /// runs, or has had enough time.
    pub fn settles(&self, now: Timestamp) -> Option<Timestamp> {
        let ended = self.stopped.or_else(|| self.ended.as_ref()?.at);
        let until = ended.filter(|_| !self.is_over() && !self.deleting)?.saturating_add(SETTLE_TIME).ok()?;
        (!clock::is_over(until, SETTLE_TIME, now)).then_some(until)
    }

    /// Reads one of our pods. Attempt and rank come from its name rather than its labels, because
    /// the name cannot be changed.
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
        let reason_and_message =
            |c: &PodCondition| (c.reason.clone().unwrap_or_default(), c.message.clone().unwrap_or_default());
        let containers = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
        let finish_times =
            containers.iter().map(|container| container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref());
        let finish_times: Option<Vec<Timestamp>> = finish_times.map(|end| end.map(|end| end.0)).collect();
        let is_all = spec.is_some_and(|spec| spec.containers.len() == containers.len());
        let trainer = containers.iter().find(|container| container.name == TRAINER);
        let sidecars = Sidecar::not_running(pod);
        // A sidecar that has ended makes the pod unready although the trainer is running.
        let is_trainer_ready = !sidecars.is_empty() && trainer.is_some_and(|trainer| trainer.ready);
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
                // A kubelet keeps the last reported phase until the pod is over: a short pod goes
                // directly from Pending to Succeeded.
                _ if terminated.is_some() => Phase::Running,
                _ => Phase::Pending,
            },
            ready: is("Ready", "True").is_some() || is_trainer_ready,
            deleting: pod.metadata.deletion_timestamp.is_some(),
            deletion: pod.metadata.deletion_timestamp.as_ref().map(|due| {
                // `deletionTimestamp` is the end of the grace period.
                let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
                Deletion { requested: due.0.saturating_sub(grace).unwrap_or(due.0), due: due.0 }
            }),
            // A scheduler that lost the response to its binding tries again, fails, and reports
            // that on a pod that is already bound.
            unschedulable: is("PodScheduled", "False")
                .filter(|_| node.is_none())
                .filter(|c| c.reason.as_deref().is_some_and(|reason| REFUSED.contains(&reason)))
                .map(|c| Unschedulable { message: reason_and_message(c).1, since: None }),
            disruption: is("DisruptionTarget", "True").map(reason_and_message),
            stopped_by_queue: is(kueue::STOPPED, "True").map(|c| reason_and_message(c).1),
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
            stopped: finish_times.filter(|_| is_all).and_then(|finish_times| finish_times.into_iter().max()),
            started: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            node,
            requests: resources::held_by(pod),
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

/// Scheduler of pods that name none.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Reasons on a pod that the scheduler does not bind: no node fits, or scheduling failed on the way
/// (a claim or volume that could not be reserved, one of the scheduler's webhooks).
const REFUSED: [&str; 2] = ["Unschedulable", "SchedulerError"];

/// An existing object of a job other than a pod.
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
    /// True if the object contains everything in `wanted`. Additions by the server or other clients
    /// are ignored.
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

/// The server drops empty values.
fn is_empty(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Null => true,
        Value::Object(map) => map.values().all(is_empty),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

/// Taint that marks a node as permanently down
/// (<https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/#non-graceful-node-shutdown>).
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// A node that may take pods, and its free resources.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeView {
    /// Facts that decide whether a pod may run there.
    pub facts: NodeFacts,
    /// When it was registered.
    pub registered: Option<Timestamp>,
    /// Since when its kubelet has stopped reporting. `None` if it reports, even if it reports
    /// NotReady.
    pub silent_since: Option<Timestamp>,
    /// It is not ready, and an administrator has marked it as permanently down with a taint.
    pub out_of_service: bool,
    /// Total resources for pods.
    pub allocatable: Resources,
    /// Allocatable minus the usage of bound pods and of other jobs' claims.
    pub free: Resources,
    /// Its devices, or why their report is unusable. `None` if there is no report.
    pub machine: Option<Result<Machine, String>>,
    /// Bit mask of GPUs that are allocated or planned individually.
    pub taken: u32,
    /// Resources of pods that do not end by themselves.
    pub lasting: Resources,
    /// GPUs in `taken` that those pods hold, directly or by claims.
    pub lasting_gpus: u32,
    /// GPUs in use according to the kubelet when the report was written.
    pub in_use: u32,
    /// GPUs that a driver offers for claims, `None` if no driver offers any.
    pub offered: Option<u32>,
}

impl NodeView {
    /// Reads a node. The caller fills in free resources and devices.
    pub fn of(node: &Node) -> NodeView {
        let status = node.status.as_ref();
        let ready = status
            .and_then(|status| status.conditions.as_deref())
            .unwrap_or_default()
            .iter()
            .find(|c| c.type_ == "Ready");
        let is_ready = ready.is_some_and(|condition| condition.status == "True");
        // `False` is a report: the containers keep running, whatever the kubelet, its runtime or
        // its network is waiting for.
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

    /// Whether the node existed at that time and has not been registered again since.
    pub fn existed_at(&self, at: Timestamp) -> bool {
        self.registered.is_none_or(|registered| registered <= at)
    }

    /// Its devices, if it has a usable report.
    pub fn described(&self) -> Option<&Machine> {
        self.machine.as_ref()?.as_ref().ok()
    }

    /// Number of GPUs, from its report or else from its allocatable resources.
    pub fn gpus(&self) -> u32 {
        let counted = u32::try_from(self.allocatable.get(GPU_RESOURCE) / 1000).unwrap_or(0);
        self.described().map_or(counted, |machine| machine.gpus.len() as u32)
    }
}
