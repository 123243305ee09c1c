//! The life of a job in a cluster: from what is observed to what is done next. Pure: no client, no clock.
//!
//! ```text
//! Snapshot, now ─> plan ─┬─> a decision: one status write, and nothing else       (attempt, place, end)
//!                        └─> actions: creates, releases, deletes, then the status  (what the decision asks for)
//! ```
//!
//! **A reconcile decides or acts, never both.** A decision (next attempt, place of the gang, end of the job) is one write of the
//! status under its resource version, so two controllers cannot decide differently. Everything that follows from it is a pure
//! function of the status and of what exists, with names that contain the attempt: done twice, or half and then again, it ends
//! the same. That is all there is to crash safety here.

mod attempt;
mod clock;
mod degraded;
mod draft;
pub mod events;
pub mod fabric;
mod failure;
pub mod gang;
pub mod levels;
pub mod machine;
mod refusal;
mod sites;
#[cfg(test)]
mod tests;
pub mod transport;
pub mod turn;
pub mod view;

pub use draft::major;
pub use refusal::{Change, NoPlace};
pub use sites::{Excluded, is_old};

use super::objects::{self, Defaults, Object};
use super::status::{self, Draft, Ending};
use super::{ValidJob, validate};
use events::EventDraft;
use jiff::{SignedDuration, Timestamp};
use levels::Levels;
use std::collections::BTreeMap;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{ManagedBy, TrainJob, TrainJobStatus};
use switchyard_fabric::Seen;
use switchyard_worker_contract::event::Summary;
use view::{NodeView, ObjectView, PodView};

/// Seconds between two writes of a status in which only figures change.
pub const FIGURES_PERIOD: SignedDuration = SignedDuration::from_secs(10);

/// Everything that one reconcile looks at.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The job.
    pub job: &'a TrainJob,
    /// Its pods of all attempts, in the order of attempt and node rank.
    pub pods: &'a [&'a PodView],
    /// Other objects with names of the job's objects, by kind and name.
    pub objects: &'a BTreeMap<(&'static str, String), ObjectView>,
    /// All nodes by name.
    pub nodes: &'a BTreeMap<String, NodeView>,
    /// Settings of the operator.
    pub defaults: &'a Defaults,
    /// Levels of domains of nodes.
    pub levels: &'a Levels,
    /// Nodes that are held for a job ahead in the queue, in words.
    pub held_for: Option<&'a str>,
    /// The job of higher priority that this attempt gives way to.
    pub gives_way_to: Option<&'a str>,
    /// GPUs that the pods of the current attempt really have, by node rank, as far as it is known.
    pub actual: &'a BTreeMap<u32, Vec<String>>,
    /// What the last try to write met.
    pub trouble: Option<&'a str>,
    /// Last figures of the training.
    pub summary: Option<&'a Summary>,
    /// What the logs of the current attempt say of links between ranks, by node rank.
    pub seen: &'a BTreeMap<u32, Seen>,
    /// When this controller last wrote the status.
    pub status_written: Option<Timestamp>,
}

/// One write other than the status.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Creates an object of the job.
    Create(Object),
    /// Sets the fields of an object that somebody changed.
    Repair(Object),
    /// Lifts our gate of a pod and pins it to its node.
    Release {
        /// Name of the pod.
        pod: String,
        /// Its UID.
        uid: String,
        /// The patch.
        patch: serde_json::Value,
    },
    /// Deletes an object, if it still has this UID and this version.
    Delete {
        /// Kind.
        kind: &'static str,
        /// Name.
        name: String,
        /// UID.
        uid: String,
        /// Resource version, where the decision depends on the state; `None`: whatever became of it.
        version: Option<String>,
    },
}

/// What is to be done for a job now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reconciliation {
    /// Writes, in order: other objects before pods.
    pub actions: Vec<Action>,
    /// The status to write after the actions; `None`: it is right.
    pub status: Option<TrainJobStatus>,
    /// Sent once the status is written.
    pub events: Vec<EventDraft>,
    /// A pod whose absence the decision stands on. The server is asked before it is written: the job may have been seen newer than its
    /// pods, by a controller that has just begun or that works beside another one.
    pub absent: Option<String>,
    /// When to look again even if nothing changes.
    pub wake: Option<Timestamp>,
    /// The gang has no room: look again when resources become free.
    pub waiting: bool,
}

impl Reconciliation {
    fn wake_at(&mut self, at: Timestamp) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }
}

/// Plans the next step of a job.
pub fn plan(snapshot: &Snapshot<'_>, now: Timestamp) -> Reconciliation {
    let job = snapshot.job;
    if job.spec.managed_by != ManagedBy::TrainJobController {
        return Reconciliation::default();
    }
    if job.metadata.deletion_timestamp.is_some() {
        return Reconciliation { actions: remove(snapshot.pods), ..Reconciliation::default() };
    }
    if is_over(job) {
        return after_the_end(snapshot, now);
    }
    let valid = match validate(job) {
        Ok(valid) => valid,
        Err(faults) => {
            let text: Vec<String> = faults.iter().map(ToString::to_string).collect();
            return end(snapshot, now, Ending::failed(conditions::INVALID_SPEC, text.join("; ")));
        }
    };
    if job.spec.suspend {
        return suspended(snapshot, now);
    }
    alive(snapshot, &valid, now)
}

/// What is left of a job that is gone: its pods, which are not left to the slow garbage collection.
pub fn remove(pods: &[&PodView]) -> Vec<Action> {
    pods.iter().filter(|pod| !pod.deleting).map(|pod| delete_pod(pod)).collect()
}

fn delete_pod(pod: &PodView) -> Action {
    Action::Delete { kind: "Pod", name: pod.name.clone(), uid: pod.uid.clone(), version: None }
}

/// Deletes a pod as it was seen. One that has ended meanwhile stays, for its log.
fn delete_unfinished(pod: &PodView) -> Action {
    Action::Delete { kind: "Pod", name: pod.name.clone(), uid: pod.uid.clone(), version: pod.version.clone() }
}

/// Complete or failed: nothing follows.
pub fn is_over(job: &TrainJob) -> bool {
    job.status.as_ref().is_some_and(status::is_over)
}

/// Number of the current attempt: never below that of a pod that exists, whatever somebody wrote into the status.
fn attempt_number(snapshot: &Snapshot<'_>) -> Option<u32> {
    let written = snapshot.job.status.as_ref().and_then(|status| status.attempt).map(i32::unsigned_abs);
    let observed = snapshot.pods.iter().map(|pod| pod.attempt).max();
    written.max(observed).filter(|attempt| *attempt > 0)
}

fn alive(snapshot: &Snapshot<'_>, valid: &ValidJob, now: Timestamp) -> Reconciliation {
    let status = snapshot.job.status.clone().unwrap_or_default();
    let resumed = status::reason_of(&status, conditions::SUCCEEDED) == Some(Stage::Suspended.reason());
    let (Some(attempt), false) = (attempt_number(snapshot), resumed) else {
        return begin(snapshot, valid, resumed, now);
    };
    if status.attempt != Some(attempt as i32) {
        let mut draft = Draft::new(snapshot.job, now);
        draft.next.attempt = Some(attempt as i32);
        return draft.decide(Vec::new());
    }
    let mut result = attempt::step(snapshot, valid, attempt, now);
    if let (Some(seconds), Some(start)) = (snapshot.job.spec.active_deadline_seconds, &status.start_time) {
        let deadline = start.0.saturating_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX);
        if deadline <= now {
            let text = format!("the job ran for more than {seconds} s (spec.activeDeadlineSeconds)");
            return end(snapshot, now, Ending::failed(conditions::DEADLINE_EXCEEDED, text));
        }
        result.wake_at(deadline);
    }
    result
}

/// The first attempt, or the first one after the job was suspended.
fn begin(snapshot: &Snapshot<'_>, valid: &ValidJob, resumed: bool, now: Timestamp) -> Reconciliation {
    // Schema and rules are the server's to check, but not for what was stored before it knew them. Only here: what has begun goes on,
    // even if a later version would refuse it.
    if let Err(faults) = switchyard_crds::validate::stored(snapshot.job) {
        let text: Vec<String> = faults.iter().map(ToString::to_string).collect();
        return end(snapshot, now, Ending::failed(conditions::INVALID_SPEC, text.join("; ")));
    }
    let attempt = attempt_number(snapshot).map_or(1, |attempt| attempt + 1);
    let mut draft = Draft::new(snapshot.job, now);
    draft.next.attempt = Some(attempt as i32);
    draft.next.attempt_time = Some(status::time(now));
    draft.next.start_time = Some(status::time(now));
    draft.next.restarts.get_or_insert_default();
    draft.next.placement = None;
    draft.next.device_allocation = gang::allocation(snapshot.job, snapshot.nodes);
    draft.next.fabric = fabric::before(snapshot.job, valid, snapshot.defaults, snapshot.nodes);
    draft.count(&[], snapshot.job.spec.trainer.num_nodes);
    draft.stage(Stage::Placing, "creating the pods".into());
    draft.condition(conditions::PLACED, "False", "Placing", "the pods are not created yet".into());
    let mut events = Vec::new();
    if resumed {
        draft.condition(conditions::SUSPENDED, "False", "Resumed", "spec.suspend is false".into());
        events.push(EventDraft::normal(events::RESUMED, format!("attempt {attempt} begins")));
    }
    let conflicts = objects::conflicts(snapshot.job, valid, snapshot.defaults);
    if !conflicts.is_empty() {
        let text: Vec<String> = conflicts.iter().map(ToString::to_string).collect();
        let text = text.join("; ");
        events.push(EventDraft::warning(events::MERGE_CONFLICT, text.clone()));
        draft.condition(conditions::TEMPLATE_MERGED, "False", "Overridden", text);
    }
    draft.decide(events)
}

fn suspended(snapshot: &Snapshot<'_>, now: Timestamp) -> Reconciliation {
    let mut draft = Draft::new(snapshot.job, now);
    let is_new = status::reason_of(&draft.next, conditions::SUCCEEDED) != Some(Stage::Suspended.reason());
    draft.stage(Stage::Suspended, "spec.suspend is true; no pods run".into());
    draft.condition(conditions::SUSPENDED, "True", "Suspended", "spec.suspend is true".into());
    draft.condition(conditions::PLACED, "False", "Suspended", "spec.suspend is true".into());
    draft.next.placement = None;
    draft.next.attempt_time = None;
    let attempt = attempt_number(snapshot);
    let current: Vec<&PodView> = snapshot.pods.iter().copied().filter(|pod| Some(pod.attempt) == attempt).collect();
    draft.count(&current, snapshot.job.spec.trainer.num_nodes);
    if is_new {
        return draft
            .decide(vec![EventDraft::normal(events::SUSPENDED, "the job is suspended; its pods are deleted".into())]);
    }
    let mut result = draft.act(snapshot, now);
    result.actions = remove(snapshot.pods);
    // A claim without a pod has no devices, but not before its controller has seen that.
    result.actions.extend(give_back(snapshot, |kind, _| kind == objects::CLAIM));
    result
}

/// Deletes those of the job's own objects whose kind and name are such.
fn give_back(snapshot: &Snapshot<'_>, is_such: impl Fn(&str, &str) -> bool) -> impl Iterator<Item = Action> {
    let objects = snapshot.objects.iter().filter(|(_, view)| view.owned && !view.deleting);
    objects.filter(move |((kind, name), _)| is_such(kind, name)).map(|((kind, name), view)| Action::Delete {
        kind,
        name: name.clone(),
        uid: view.uid.clone(),
        version: None,
    })
}

/// The decision that ends a job.
fn end(snapshot: &Snapshot<'_>, now: Timestamp, ending: Ending) -> Reconciliation {
    let mut draft = Draft::new(snapshot.job, now);
    let attempt = attempt_number(snapshot);
    let current: Vec<&PodView> = snapshot.pods.iter().copied().filter(|pod| Some(pod.attempt) == attempt).collect();
    draft.count(&current, snapshot.job.spec.trainer.num_nodes);
    // What still runs is deleted right after this, and the status of a finished job does not change again.
    draft.rest();
    draft.newest_figures(snapshot, &current, now);
    let event = match ending.is_complete() {
        true => EventDraft::normal(events::COMPLETE, ending.message().to_string()),
        false => EventDraft::warning(events::FAILED, ending.message().to_string()),
    };
    draft.end(ending);
    draft.decide(vec![event])
}

/// A finished job only gives back what it holds. Nothing is created.
fn after_the_end(snapshot: &Snapshot<'_>, now: Timestamp) -> Reconciliation {
    let mut result = Reconciliation::default();
    let job = snapshot.job;
    for pod in snapshot.pods.iter().filter(|pod| !pod.is_over() && !pod.deleting) {
        match pod.settles(now) {
            Some(until) => result.wake_at(until),
            None => result.actions.push(delete_unfinished(pod)),
        }
    }
    // A budget or claim that outlives its pods hurts nobody, but a finished job owes the cluster nothing.
    result.actions.extend(give_back(snapshot, |kind, _| kind == objects::BUDGET || kind == objects::CLAIM));
    let ended = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
    if let (Some(seconds), Some(ended)) = (job.spec.ttl_seconds_after_finished, ended) {
        let due = ended.0.saturating_add(SignedDuration::from_secs(seconds.into())).unwrap_or(Timestamp::MAX);
        if due <= now {
            let (name, uid) =
                (job.metadata.name.clone().unwrap_or_default(), job.metadata.uid.clone().unwrap_or_default());
            result.actions.push(Action::Delete { kind: "TrainJob", name, uid, version: None });
        } else {
            result.wake_at(due);
        }
    }
    result
}
