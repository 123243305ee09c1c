//! Life cycle of a job in a cluster: from observed state to next actions. Pure: no client, no
//! clock.
//!
//! ```text
//! JobSnapshot ─> plan ─┬─> a decision: one status write, and nothing else       (attempt, place, end)
//!                      └─> actions: creates, releases, deletes, then the status  (what the decision implies)
//! ```
//!
//! **A reconcile either decides or acts, never both.** A decision (next attempt, placement, end of
//! the job) is one status write with a resource version, so two controllers cannot decide
//! differently. All actions are a pure function of the status and of existing objects, and object
//! names contain the attempt: repeating them, fully or partly, gives the same result. Crash safety
//! needs nothing else.
//!
//! Types on the way to a placement, each with its additions to the previous one:
//!
//! | type | adds |
//! |---|---|
//! | [`JobSnapshot`] | the job with all observations, and [`PlacementRules`]: the operator's settings and the time |
//! | `Attempt` | the valid job, the attempt's number, its pods by node rank, whether it is placed |
//! | [`PlacementRequest`] | nothing observed: a valid job and the rules. The ledger builds it for queued jobs |
//! | `GangDemand` | its pods' requirements of a node |
//! | `Candidates` | the nodes, each open or excluded with a reason |
//! | `PlacementStatusBuilder` | the placement that was found, to be converted to API types |

mod actions;
pub mod admitted;
pub mod allocation;
mod attempt;
pub mod avoidance;
pub mod blocker;
mod candidates;
pub mod clock;
pub mod containers;
mod cordon;
mod degraded;
mod demand;
mod draft;
pub mod events;
mod excluded;
pub mod fabric;
mod failure;
pub mod forecast;
pub mod gang;
pub mod levels;
pub mod machine;
pub mod ownership;
pub mod place_with_fabric;
mod placement_request;
pub mod preempted;
mod provisioning;
pub mod queue_order;
pub mod queue_policy;
mod ranks;
mod refusal;
mod replacement;
pub mod reserve;
mod retry;
mod step;
#[cfg(test)]
mod tests;
pub mod transport;
pub mod view;

pub use clock::is_stale;
pub use demand::Demand;
pub use draft::is_major_change;
pub use excluded::Excluded;
pub use placement_request::{Avoided, PlacementRequest, PlacementRules};
pub use refusal::{Change, NoPlacement};

use super::job::{LAST_ATTEMPT, dedicated_servers, pods};
use super::objects::{self, Kind, Object};
use super::status::{self, Draft, Ending};
use super::{ValidJob, validate};
use blocker::WriteError;
use events::EventDraft;
use forecast::Forecast;
use jiff::{SignedDuration, Timestamp};
use queue_order::JobAhead;
use std::collections::BTreeMap;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{ManagedBy, TrainJob, TrainJobStatus};
use switchyard_fabric::LogObservation;
use switchyard_worker_contract::event::Summary;
use view::{NodeView, ObjectView, PodView};

/// Minimum interval between status writes that only change figures.
pub const FIGURES_PERIOD: SignedDuration = SignedDuration::from_secs(10);

/// Minimum interval between status writes that only change a queued job's waiting message. With
/// more queued jobs than seconds in it, it is one second per job. Otherwise every pod exit in the
/// cluster would rewrite the status of every queued job.
const WAITING_PERIOD: SignedDuration = SignedDuration::from_secs(60);

/// Interval between those writes with this many queued jobs.
pub fn waiting_period(jobs: usize) -> SignedDuration {
    WAITING_PERIOD.max(SignedDuration::from_secs(i64::try_from(jobs).unwrap_or(i64::MAX)))
}

/// All inputs of one job's reconcile.
#[derive(Debug, Clone, Copy)]
pub struct JobSnapshot<'a> {
    pub job: &'a TrainJob,
    /// Its pods of all attempts, ordered by attempt and node rank.
    pub pods: &'a [&'a PodView],
    /// UIDs by name of pods that have the job as controller and the name of one of its pods, but
    /// lack the label.
    pub unlabelled: &'a BTreeMap<String, String>,
    /// Other objects with the names of the job's objects, by kind and name.
    pub objects: &'a BTreeMap<(Kind, String), ObjectView>,
    /// All nodes by name.
    pub nodes: &'a BTreeMap<String, NodeView>,
    /// Nodes that pods of jobs run on but that no longer exist, with the time since when.
    pub missing: &'a BTreeMap<String, Timestamp>,
    pub rules: PlacementRules<'a>,
    /// The job ahead in the queue that holds a reservation.
    pub ahead: Option<&'a JobAhead>,
    /// Until when the job holds no reservation at the head of the queue, because it held one for
    /// too long.
    pub cooldown_until: Option<Timestamp>,
    /// Forecast of the job's start, if it was waiting before.
    pub forecast: Option<Forecast>,
    /// Number of queued jobs.
    pub queue_length: usize,
    /// The job of higher priority that preempts this attempt.
    pub preempted_by: Option<&'a str>,
    /// Actual GPUs of the current attempt's pods, by node rank, where known.
    pub actual: &'a BTreeMap<u32, Vec<String>>,
    /// Error of the last failed write.
    pub write_error: Option<&'a WriteError>,
    /// Latest training figures.
    pub summary: Option<&'a Summary>,
    /// Observations about links between ranks from the current attempt's logs, by node rank.
    pub log_observations: &'a BTreeMap<u32, LogObservation>,
    /// When this controller last wrote the status.
    pub status_written: Option<Timestamp>,
    pub silence: Silence<'a>,
    /// Administrator's upper bound of `gangPolicy.scheduleTimeoutSeconds`.
    pub longest_schedule_timeout: SignedDuration,
    /// A scheduler with the name in the job's template has been observed: if it is silent now, it
    /// is busy or restarting.
    pub scheduler_is_known: bool,
    /// Nodes that are avoided because they failed this job, or failed other jobs too often.
    pub avoided_nodes: &'a BTreeMap<String, Avoided>,
    /// When the first of the avoided nodes may be used again.
    pub avoidance_ends: Option<Timestamp>,
    /// A job of the namespace that gets the quota of this job's pods while this job is not placed.
    pub quota_recipient: Option<&'a str>,
    /// The API server rejects pods that do not set `runAsNonRoot`.
    pub restricted: bool,
    /// Class of the ProvisioningRequests for gangs that lack nodes. `None` if they are disabled, or
    /// if the cluster does not have that kind.
    pub provisioning_class: Option<&'a str>,
}

/// Handling of nodes that have stopped reporting.
#[derive(Debug, Clone, Copy)]
pub struct Silence<'a> {
    /// Grace period, counted from the node's last report and from the ranks' last progress.
    pub grace: SignedDuration,
    /// Reason why no node is declared lost at present: too many nodes went silent at once.
    pub mass_outage: Option<&'a str>,
    /// When that mass outage last ended.
    pub outage_ended: Option<Timestamp>,
    /// When the ranks were last seen to make progress.
    pub progress: Option<Timestamp>,
    /// The controller has just started and has not read the ranks' progress yet.
    pub progress_unread: bool,
}

/// One write other than the status.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Creates an object of the job.
    Create(Object),
    /// Restores modified fields of an object.
    Repair(Object),
    /// Lifts our gate from a pod and pins it to its node.
    Release { pod: String, uid: String, patch: serde_json::Value },
    /// Deletes an object if it still has this UID and version.
    Delete {
        kind: Kind,
        name: String,
        uid: String,
        /// Resource version if the decision depends on the object's state. `None` deletes it in any
        /// state.
        version: Option<String>,
    },
}

/// Next actions for a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reconciliation {
    /// Writes, in order: other objects before pods.
    pub actions: Vec<Action>,
    /// The status to write after the actions, `None` if it is up to date.
    pub status: Option<TrainJobStatus>,
    /// Events to send once the status is written.
    pub events: Vec<EventDraft>,
    /// Premise of the decision, which is verified with the API server before the decision is
    /// written: the watch cache may be stale, and a controller that has just started, or that runs
    /// concurrently with another, may have seen a newer version of the job than of its pods.
    pub premise: Option<Premise>,
    /// When to reconcile again even if nothing changes.
    pub wake: Option<Timestamp>,
    /// The gang is not placed: reconcile again when resources become free.
    pub wait_reason: Option<WaitReason>,
}

/// Condition that must hold before an attempt is given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Premise {
    /// The pod of this name does not exist.
    Absent(String),
    /// The pod of this name is not bound.
    Unbound(String),
    /// The node of this name does not exist.
    NodeGone(String),
    /// The node of this name is silent or does not exist.
    NodeSilent(String),
}

/// What an unplaced gang waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// Room: at the head of the queue the gang reserves nodes.
    Room {
        /// Nodes that have room for a pod now.
        open: u32,
    },
    /// Another fabric: the gang reserves nothing.
    Fabric,
}

impl Reconciliation {
    fn wake_at(&mut self, at: Timestamp) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }
}

/// Plans the next step of a job.
pub fn plan(snapshot: &JobSnapshot<'_>) -> Reconciliation {
    let job = snapshot.job;
    if job.spec.managed_by != ManagedBy::TrainJobController {
        return Reconciliation::default();
    }
    if job.metadata.deletion_timestamp.is_some() {
        return Reconciliation { actions: delete_pods(snapshot.pods), ..Reconciliation::default() };
    }
    if is_over(job) {
        return clean_up(snapshot);
    }
    let valid = match validate(job) {
        Ok(valid) if valid.engine.as_ref().is_some_and(|engine| engine.dedicated_servers() > 0) => {
            let fault = dedicated_servers("Ranks in a cluster: servers have no pods of their own yet");
            return end(snapshot, Ending::failed(conditions::INVALID_SPEC, fault.to_string()));
        }
        Ok(valid) => valid,
        Err(faults) => {
            let text: Vec<String> = faults.iter().map(ToString::to_string).collect();
            return end(snapshot, Ending::failed(conditions::INVALID_SPEC, text.join("; ")));
        }
    };
    if job.spec.suspend {
        return plan_suspended(snapshot);
    }
    plan_running(snapshot, &valid)
}

/// Deletes the pods of a deleted job, because the garbage collector is slow.
pub fn delete_pods(pods: &[&PodView]) -> Vec<Action> {
    pods.iter().filter(|pod| !pod.deleting).map(|pod| delete_pod(pod)).collect()
}

fn delete_pod(pod: &PodView) -> Action {
    Action::Delete { kind: Kind::Pod, name: pod.name.clone(), uid: pod.uid.clone(), version: None }
}

/// Deletes a pod only in the version that was seen. If it has ended since, it stays for its log.
fn delete_unfinished(pod: &PodView) -> Action {
    Action::Delete { kind: Kind::Pod, name: pod.name.clone(), uid: pod.uid.clone(), version: pod.version.clone() }
}

/// Whether the job is complete or failed.
pub fn is_over(job: &TrainJob) -> bool {
    job.status.as_ref().is_some_and(status::is_over)
}

/// Number of the current attempt. Never below the attempt of an existing pod, even if the status
/// was edited.
fn attempt_number(snapshot: &JobSnapshot<'_>) -> Option<u32> {
    let written = snapshot.job.status.as_ref().and_then(|status| status.attempt).map(i32::unsigned_abs);
    let observed = snapshot.pods.iter().map(|pod| pod.attempt).max();
    written.max(observed).filter(|attempt| *attempt > 0)
}

fn plan_running(snapshot: &JobSnapshot<'_>, valid: &ValidJob) -> Reconciliation {
    let now = snapshot.rules.now;
    let status = snapshot.job.status.clone().unwrap_or_default();
    let resumed = status::reason_of(&status, conditions::SUCCEEDED) == Some(Stage::Suspended.reason());
    let number = attempt_number(snapshot);
    if let Some(number) = number.filter(|number| *number >= LAST_ATTEMPT) {
        let text = format!(
            "status.attempt: got {number}; expected less than {LAST_ATTEMPT}, because no further attempt is possible: delete the job and create it again"
        );
        return end(snapshot, Ending::failed(conditions::PERMANENT_FAILURE, text));
    }
    let (Some(attempt), false) = (number, resumed) else {
        return start_first_attempt(snapshot, valid, resumed);
    };
    if status.attempt != Some(attempt as i32) {
        let mut draft = Draft::new(snapshot.job, now);
        draft.next.attempt = Some(attempt as i32);
        return draft.decide(Vec::new());
    }
    let mut result = step::step(snapshot, valid, attempt);
    if let (Some(seconds), Some(deadline)) = (snapshot.job.spec.active_deadline_seconds, clock::deadline(snapshot.job))
    {
        if deadline <= now {
            let text = format!("the job ran for more than {seconds} s (spec.activeDeadlineSeconds)");
            return end(snapshot, Ending::failed(conditions::DEADLINE_EXCEEDED, text));
        }
        result.wake_at(deadline);
    }
    result
}

/// Starts the first attempt, or the first one after the job was suspended.
fn start_first_attempt(snapshot: &JobSnapshot<'_>, valid: &ValidJob, resumed: bool) -> Reconciliation {
    let now = snapshot.rules.now;
    // Schema and rules are enforced by the server, but not for jobs that were stored before they
    // existed. Check only here: a started job keeps running even if a later version would reject
    // it.
    if let Err(faults) = switchyard_crds::validate::stored(snapshot.job) {
        let text: Vec<String> = faults.iter().map(ToString::to_string).collect();
        return end(snapshot, Ending::failed(conditions::INVALID_SPEC, text.join("; ")));
    }
    let attempt = attempt_number(snapshot).map_or(1, |attempt| attempt + 1);
    let mut draft = Draft::new(snapshot.job, now);
    draft.next.attempt = Some(attempt as i32);
    draft.next.attempt_time = Some(status::time(now));
    draft.next.start_time = Some(status::time(now));
    draft.next.restarts.get_or_insert_default();
    (draft.next.placement, draft.next.placed_time, draft.next.placed_limit_seconds) = (None, None, None);
    draft.next.device_allocation = allocation::allocation(snapshot.job, snapshot.nodes);
    draft.next.fabric = fabric::pod_resources(snapshot.job, valid, snapshot.rules.defaults, snapshot.nodes);
    draft.count(&[], pods(snapshot.job));
    draft.start_over();
    draft.stage(Stage::Placing, "creating the pods".into());
    draft.condition(conditions::PLACED, "False", "Placing", "the pods are not created yet".into());
    let mut events = Vec::new();
    if resumed {
        draft.condition(conditions::SUSPENDED, "False", "Resumed", "spec.suspend is false".into());
        events.push(EventDraft::normal(events::RESUMED, format!("attempt {attempt} begins")));
    }
    let conflicts = objects::conflicts(snapshot.job, valid, snapshot.rules.defaults);
    if !conflicts.is_empty() {
        let text: Vec<String> = conflicts.iter().map(ToString::to_string).collect();
        let text = text.join("; ");
        events.push(EventDraft::warning(events::MERGE_CONFLICT, text.clone()));
        draft.condition(conditions::TEMPLATE_MERGED, "False", "Overridden", text);
    }
    draft.decide(events)
}

fn plan_suspended(snapshot: &JobSnapshot<'_>) -> Reconciliation {
    let now = snapshot.rules.now;
    let mut draft = Draft::new(snapshot.job, now);
    let is_new = status::reason_of(&draft.next, conditions::SUCCEEDED) != Some(Stage::Suspended.reason());
    draft.start_over();
    draft.stage(Stage::Suspended, "spec.suspend is true; no pods run".into());
    draft.condition(conditions::SUSPENDED, "True", "Suspended", "spec.suspend is true".into());
    draft.condition(conditions::PLACED, "False", "Suspended", "spec.suspend is true".into());
    draft.next.placement = None;
    draft.next.attempt_time = None;
    let attempt = attempt_number(snapshot);
    let current: Vec<&PodView> = snapshot.pods.iter().copied().filter(|pod| Some(pod.attempt) == attempt).collect();
    draft.count(&current, pods(snapshot.job));
    if is_new {
        return draft
            .decide(vec![EventDraft::normal(events::SUSPENDED, "the job is suspended; its pods are deleted".into())]);
    }
    let mut result = draft.act(snapshot);
    result.actions = delete_pods(snapshot.pods);
    // A claim without a pod holds no devices, but only once the claim controller has noticed.
    result.actions.extend(delete_owned(snapshot, |kind, _| kind == Kind::ResourceClaim || provisioning::is_part(kind)));
    result
}

/// Deletes the job's own objects that match.
fn delete_owned(snapshot: &JobSnapshot<'_>, matches: impl Fn(Kind, &str) -> bool) -> impl Iterator<Item = Action> {
    let objects = snapshot.objects.iter().filter(|(_, view)| view.owned && !view.deleting);
    objects.filter(move |((kind, name), _)| matches(*kind, name)).map(|((kind, name), view)| Action::Delete {
        kind: *kind,
        name: name.clone(),
        uid: view.uid.clone(),
        version: None,
    })
}

/// Decides the end of a job.
fn end(snapshot: &JobSnapshot<'_>, ending: Ending) -> Reconciliation {
    let now = snapshot.rules.now;
    let mut draft = Draft::new(snapshot.job, now);
    let attempt = attempt_number(snapshot);
    let current: Vec<&PodView> = snapshot.pods.iter().copied().filter(|pod| Some(pod.attempt) == attempt).collect();
    draft.count(&current, pods(snapshot.job));
    // Pods that still run are deleted right after this, and the status of a finished job does not
    // change again.
    draft.clear_running();
    draft.newest_figures(snapshot, &current);
    let event = match ending.is_complete() {
        true => EventDraft::normal(events::COMPLETE, ending.message().to_string()),
        false => EventDraft::warning(events::FAILED, ending.message().to_string()),
    };
    draft.end(ending);
    draft.decide(vec![event])
}

/// A finished job only releases its resources. Nothing is created.
fn clean_up(snapshot: &JobSnapshot<'_>) -> Reconciliation {
    let now = snapshot.rules.now;
    let mut result = Reconciliation::default();
    let job = snapshot.job;
    for pod in snapshot.pods.iter().filter(|pod| !pod.is_over() && !pod.deleting) {
        match pod.settles(now) {
            Some(until) => result.wake_at(until),
            None => result.actions.push(delete_unfinished(pod)),
        }
    }
    // A PodDisruptionBudget or claim that outlives its pods is harmless, but a finished job should
    // leave nothing behind.
    result.actions.extend(delete_owned(snapshot, |kind, _| {
        matches!(kind, Kind::PodDisruptionBudget | Kind::ResourceClaim) || provisioning::is_part(kind)
    }));
    let ended = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
    if let (Some(seconds), Some(ended)) = (job.spec.ttl_seconds_after_finished, ended) {
        let due = ended.0.saturating_add(SignedDuration::from_secs(seconds.into())).unwrap_or(Timestamp::MAX);
        if due <= now {
            let (name, uid) =
                (job.metadata.name.clone().unwrap_or_default(), job.metadata.uid.clone().unwrap_or_default());
            result.actions.push(Action::Delete { kind: Kind::TrainJob, name, uid, version: None });
        } else {
            result.wake_at(due);
        }
    }
    result
}
