//! The next step of an attempt, from creating the first pod to the end of all pods.
//!
//! ```text
//! pods gated ─> all exist ─> place (decision) ─> gates lifted ─> bound ─> running ─> all succeeded ─> Complete
//!      ^                                              │             │         │
//!      └──────────────── next attempt <── too late ───┴── failure ──┴─────────┘
//! ```

use super::admitted::Admitted;
use super::attempt::Attempt;
use super::blocker::{self, WriteError};
use super::containers::Sidecar;
use super::events::{self, EventDraft};
use super::place_with_fabric::{PlacementFailure, PlacementWithFabric, WrongFabric, place_with_fabric};
use super::view::{Phase, PodView};
use super::{
    Action, JobSnapshot, PlacementRequest, Reconciliation, WaitReason, actions, clock, cordon, degraded, end, fabric,
    failure, preempted, provisioning, replacement, retry, transport, waiting_period,
};
use crate::ValidJob;
use crate::objects::{self, Object};
use crate::restart;
use crate::slices;
use crate::status::{self, Draft, Ending};
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{DeviceAllocation, TrainJob, TrainJobStatus};

/// Plans the next step of an attempt.
pub(super) fn step(snapshot: &JobSnapshot<'_>, valid: &ValidJob, number: u32) -> Reconciliation {
    let attempt = Attempt::of(snapshot, valid, number);
    if attempt.placed && attempt.is_complete() {
        let pods = attempt.pods.len();
        let subject = match &snapshot.job.spec.success_policy {
            Some(policy) => format!("role {} is", policy.role),
            None if pods == 1 => "the node is".to_string(),
            None => format!("all {pods} nodes are"),
        };
        let text = format!("{subject} done in attempt {number}");
        return end(snapshot, Ending::complete(text));
    }
    if let Some(by) = snapshot.preempted_by.filter(|_| attempt.placed) {
        return retry::after_preemption(&attempt, by);
    }
    if let Some(result) = retry::after_lost_gate(&attempt) {
        return result;
    }
    let verdict = failure::assess(&attempt);
    if let failure::Assessment::Failed(failed) = &verdict {
        return retry::after_failure(&attempt, failed);
    }
    if let Some(left) = cordon::evacuation(&attempt) {
        return retry::after_failure(&attempt, &left);
    }
    if let Some(why) = transport::policy_violation(snapshot.job).filter(|_| attempt.placed) {
        return end(snapshot, Ending::failed(conditions::TRANSPORT_DIFFERS, why));
    }
    if let Some(result) = retry::after_lost_placement(&attempt) {
        return result;
    }
    let mut result = if !attempt.placed { gather(&attempt) } else { follow(&attempt) };
    if let failure::Assessment::Recheck(at) = verdict {
        result.wake_at(at);
    }
    let old = attempt.snapshot.pods.iter().filter(|pod| pod.attempt < attempt.number);
    if let Some(at) = old.filter_map(|pod| pod.settles(attempt.now())).min() {
        result.wake_at(at);
    }
    result
}

/// Before placement: creates missing objects, then places the gang.
fn gather(attempt: &Attempt<'_>) -> Reconciliation {
    let status = attempt.snapshot.job.status.as_ref();
    let not_before = status.and_then(|status| status.attempt_time.as_ref()).map(|time| time.0);
    if let Some(not_before) = not_before.filter(|at| !clock::is_over(*at, restart::MAX_PAUSE, attempt.now())) {
        // The decision to restart has already written the stage and its reason.
        let mut result = attempt.draft().act(&attempt.snapshot);
        result.actions = actions::old_pods(attempt);
        result.actions.extend(actions::old_objects(attempt));
        result.wake_at(not_before);
        return result;
    }
    let mut actions = actions::old_pods(attempt);
    let labels = actions::labels(attempt);
    let name_conflicts = actions::objects(attempt, &mut actions);
    let missing = attempt.pods.iter().filter(|pod| pod.is_none()).count();
    let numbered = (0_u32..).zip(&attempt.pods).filter(|(_, pod)| pod.is_none());
    let numbered = numbered.filter(|(rank, _)| !attempt.is_unlabelled(*rank));
    let (job, defaults) = (attempt.snapshot.job, attempt.snapshot.rules.defaults);
    actions.extend(numbered.map(|(rank, _)| {
        let mut pod = objects::pod(job, attempt.valid, defaults, attempt.number, rank);
        if attempt.snapshot.restricted {
            objects::run_as_non_root(&mut pod);
        }
        Action::Create(Object::Pod(Box::new(pod)))
    }));
    let desired = attempt.pods.len();
    let is_unlabelled = !labels.is_empty();
    actions.extend(labels);
    if missing > 0 || is_unlabelled || attempt.existing().iter().any(|pod| pod.deleting) {
        let write_error = attempt.snapshot.write_error;
        if let Some(write_error) = write_error.filter(|write_error| write_error.is_final(attempt.now())) {
            return end(&attempt.snapshot, Ending::failed(conditions::PERMANENT_FAILURE, write_error.sentence()));
        }
        if let Some(write_error) = write_error.filter(|write_error| write_error.is_quota())
            && let Some(result) = retry::yield_quota(attempt, &write_error.text)
        {
            return result;
        }
        let mut draft = attempt.draft();
        WriteError::record(write_error, &mut draft);
        let text = match (write_error, name_conflicts.first()) {
            (Some(write_error), _) => write_error.sentence(),
            (None, Some(conflict)) => conflict.clone(),
            (None, None) => format!("{} of {desired} pods exist", desired - missing),
        };
        // After a failure the stage stays Restarting, with the cause, until all pods of the next
        // attempt exist.
        let is_restart = is_restart(status);
        if !is_restart || write_error.is_some() {
            let stage = if is_restart { Stage::Restarting } else { Stage::Placing };
            draft.stage(stage, text);
        }
        let mut result = draft.act(&attempt.snapshot);
        result.actions = actions;
        write_error.and_then(WriteError::ends).into_iter().for_each(|at| result.wake_at(at));
        return result;
    }
    if let Some(wait) = replacement::wait(attempt) {
        let mut draft = attempt.draft();
        if let Some(text) = wait.text {
            draft.stage(if is_restart(status) { Stage::Restarting } else { Stage::Placing }, text);
        }
        let mut result = draft.act(&attempt.snapshot);
        result.actions = actions;
        result.wake_at(wait.wake);
        return result;
    }
    let mut result = place(attempt);
    if result.status.is_none() || result.wait_reason.is_some() {
        actions.append(&mut result.actions);
        result.actions = actions;
    }
    result
}

fn is_restart(status: Option<&TrainJobStatus>) -> bool {
    status.and_then(|status| status::reason_of(status, conditions::SUCCEEDED)) == Some(Stage::Restarting.reason())
}

/// All pods exist: places the whole gang, or waits.
fn place(attempt: &Attempt<'_>) -> Reconciliation {
    let pods = attempt.existing();
    let mut draft = attempt.draft();
    let uses_claims = attempt.snapshot.job.status.as_ref().and_then(|status| status.device_allocation)
        == Some(DeviceAllocation::Claims);
    if let Some(text) = pods.iter().find_map(|pod| foreign_gate(pod, uses_claims)) {
        // The reason must not be `Restarting`: with it the job would keep its nodes, while other
        // jobs may be admitted first.
        draft.condition(conditions::PLACED, "False", conditions::GATED, text.clone());
        draft.stage(Stage::Queued, text);
        return draft.act(&attempt.snapshot);
    }
    if pods.iter().any(|pod| pod.rules.as_ref().is_some_and(|rules| !rules.is_known())) {
        // Rules are read within seconds. Those that cannot be read are left to the scheduler.
        return draft.act(&attempt.snapshot);
    }
    if let Some(absent) = pods.iter().find_map(|pod| pod.rules.as_ref()?.absent.first()) {
        // The scheduler would not report on this pod, or would reject one node after the other.
        draft.condition(conditions::PLACED, "False", conditions::ABSENT, absent.clone());
        draft.stage(Stage::Queued, absent.clone());
        return draft.act(&attempt.snapshot);
    }
    let JobSnapshot { job, nodes, rules, .. } = attempt.snapshot;
    let admitted = Admitted::of(attempt.valid, job.status.as_ref(), pods.iter().copied());
    let avoided_nodes = attempt.snapshot.avoided_nodes;
    let request = PlacementRequest { job, valid: attempt.valid, rules, admitted: &admitted, avoided_nodes };
    match place_with_fabric(&request, nodes) {
        Ok(PlacementWithFabric { mut placed, fabric: decided }) => {
            fabric::report(&mut draft, decided);
            placed.status.slices = slices::named(&attempt.valid.name, attempt.number, &placed.status.nodes);
            let overtaking = attempt.snapshot.ahead.and_then(|ahead| ahead.describe_overtaking(&placed.status));
            let reason = overtaking.into_iter().fold(placed.status.reason.clone(), |reason, why| reason + "; " + &why);
            draft.next.placement = Some(placed.status);
            draft.next.placed_time.get_or_insert_with(|| status::time(attempt.now()));
            draft.next.placed_limit_seconds = placed_limit(job);
            draft.condition(conditions::PLACED, "True", "Placed", reason.clone());
            let overlap = replacement::overlap_warning(attempt);
            draft.stage(Stage::Starting, with_remarks(format!("0 of {} pods run", pods.len()), overlap.clone()));
            let overlap = overlap.map(|text| EventDraft::warning(events::OLD_POD_MAY_RUN, text));
            draft.decide([EventDraft::normal(events::PLACED, reason)].into_iter().chain(overlap).collect())
        }
        Err(PlacementFailure::WrongFabric(found)) => {
            let WrongFabric { why, decided, .. } = *found;
            if decided.is_some() {
                fabric::report_findings(&mut draft, decided);
            }
            wait_for_fabric(attempt, draft, why)
        }
        Err(PlacementFailure::NoRoom(refused)) => {
            let open = refused.open;
            let preemptions = preempted::history(job, attempt.now()).map(|often| {
                let JobSnapshot { ahead, forecast, .. } = &attempt.snapshot;
                let resumes = preempted::resumption(*ahead, forecast.as_ref(), attempt.now());
                resumes.into_iter().fold(format!("preempted {often}"), |often, resumes| often + "; " + &resumes)
            });
            let ahead = attempt.snapshot.ahead.map(ToString::to_string);
            let forecast = attempt.snapshot.forecast.map(|forecast| forecast.message(attempt.now()));
            let cooldown = attempt.snapshot.cooldown_until.map(|until| {
                format!(
                    "its reservation reached queue.longestReservationSeconds, and it gets no other one until {until}"
                )
            });
            let why = ahead
                .into_iter()
                .chain(cooldown)
                .chain(forecast)
                .chain(preemptions)
                .fold(refused.to_string(), |why, more| why + "; " + &more);
            let restarted = retry::recreate_for_allocation(attempt, &why).or_else(|| retry::yield_quota(attempt, &why));
            if let Some(result) = restarted {
                return result;
            }
            let node_request = provisioning::request_nodes(attempt, &admitted, &refused, &mut draft);
            let why = node_request.message.into_iter().fold(why, |why, words| why + "; " + &words);
            let is_new = status::reason_of(&draft.next, conditions::PLACED) != Some(conditions::NO_ROOM);
            draft.condition(conditions::PLACED, "False", conditions::NO_ROOM, why.clone());
            draft.stage(Stage::Queued, why.clone());
            let mut result = draft.act(&attempt.snapshot);
            result.wait_reason = Some(WaitReason::Room { open });
            result.actions = node_request.actions;
            node_request.wake.into_iter().for_each(|at| result.wake_at(at));
            attempt.snapshot.avoidance_ends.into_iter().for_each(|at| result.wake_at(at));
            // Forecasts change as time passes, and a job has none before it is in the queue.
            let period = waiting_period(attempt.snapshot.queue_length);
            let is_update_due = attempt.snapshot.forecast.map_or(is_new, |forecast| forecast.window.is_ok());
            let at = attempt.now().checked_add(period).ok().filter(|_| is_update_due);
            at.into_iter().for_each(|at| result.wake_at(at));
            if is_new {
                result.events.push(EventDraft::normal(events::NO_ROOM, why));
            }
            result
        }
    }
}

/// The limit that the queue relies on from now on. A gang that restarts on its nodes has not been
/// queued with a higher limit.
fn placed_limit(job: &TrainJob) -> Option<i64> {
    let limit = job.spec.active_deadline_seconds;
    let previous = job.status.as_ref().filter(|status| status.placement.is_some());
    previous.and_then(|status| status.placed_limit_seconds).into_iter().chain(limit).min()
}

/// Says which other gate holds a pod and what it waits for, `None` if there is no other gate.
fn foreign_gate(pod: &PodView, uses_claims: bool) -> Option<String> {
    let gate = pod.other_gate.as_ref()?;
    Some(match (&pod.group, &pod.admission) {
        // Kueue reports this only in the Workload, not in an event.
        (Some(group), None) if uses_claims && pod.waits_for_kueue() => format!(
            "waiting for Kueue to admit Workload {group}; its GPUs are allocated by claims, and Kueue 0.18 and later admits no pods that name \
             claims (docs/queueing.md#kueue)"
        ),
        (Some(_), Some(message)) if pod.waits_for_kueue() => format!("waiting for Kueue: {message}"),
        (Some(group), None) if pod.waits_for_kueue() => format!("waiting for Kueue to admit Workload {group}"),
        _ => format!("another scheduling gate holds pod {}: {gate}", pod.name),
    })
}

/// There is room, but the job must not start on the fabric of these nodes. Changes of nodes, ports
/// or other jobs may resolve that.
fn wait_for_fabric(attempt: &Attempt<'_>, mut draft: Draft<'_>, why: String) -> Reconciliation {
    if let Some(result) = retry::recreate_for_devices(attempt, &why) {
        return result;
    }
    let is_new = status::reason_of(&draft.next, conditions::PLACED) != Some(conditions::FABRIC_NOT_READY);
    draft.condition(conditions::FABRIC_READY, "False", conditions::FABRIC_NOT_READY, why.clone());
    draft.condition(conditions::PLACED, "False", conditions::FABRIC_NOT_READY, why.clone());
    draft.stage(Stage::Queued, why.clone());
    let mut result = draft.act(&attempt.snapshot);
    result.wait_reason = Some(WaitReason::Fabric);
    attempt.snapshot.avoidance_ends.into_iter().for_each(|at| result.wake_at(at));
    if is_new {
        result.events.push(EventDraft::warning(events::FABRIC_NOT_READY, why));
    }
    result
}

/// Follows a placed gang: lifts its gates and watches its pods until they end.
fn follow(attempt: &Attempt<'_>) -> Reconciliation {
    let mut actions = actions::old_pods(attempt);
    actions.extend(actions::labels(attempt));
    let mut name_conflicts = actions::objects(attempt, &mut actions);
    let placement = attempt.snapshot.job.status.as_ref().and_then(|status| status.placement.as_ref());
    // Gates are lifted together, after all claims and NCCL files exist.
    let mut taken = Vec::new();
    let mut missing = actions::claims(attempt, placement, &mut taken);
    missing.extend(actions::fabric_configs(attempt, &mut taken));
    if missing.is_empty() && taken.is_empty() {
        actions.extend(actions::releases(attempt));
    }
    actions.extend(missing);
    let refused = retry::after_refused_write(attempt, &taken);
    let refused = refused.or_else(|| retry::after_refusal(attempt)).transpose();
    name_conflicts.extend(taken);
    if attempt.all(|pod| !pod.gated) {
        actions.extend(provisioning::withdraw(attempt));
    }
    if let Some(result) = refused.as_ref().ok().cloned().flatten().or_else(|| retry::after_timeout(attempt)) {
        return result;
    }
    let desired = attempt.pods.len();
    let is_settled =
        |pod: &PodView| pod.has_succeeded() || pod.is_done() && attempt.valid.ignores_failure(pod.node_rank);
    let gone = (0_u32..)
        .zip(&attempt.pods)
        .filter(|(rank, pod)| pod.is_none() && attempt.valid.ignores_failure(*rank))
        .count();
    let running = gone + attempt.count(|pod| pod.phase == Phase::Running || is_settled(pod));
    let mut draft = attempt.draft();
    if attempt.all(|pod| !pod.gated) && draft.next.is(conditions::OBJECTS_REFUSED) {
        let text = "the API server has accepted the objects that the pods need".to_string();
        draft.condition(conditions::OBJECTS_REFUSED, "False", conditions::ACCEPTED, text);
    }
    let is_new = status::reason_of(&draft.next, conditions::SUCCEEDED) != Some(Stage::Running.reason());
    let mut events = Vec::new();
    events.extend(degraded::report(attempt, placement, &mut draft));
    events.extend(transport::report(&attempt.snapshot, attempt.valid, &mut draft));
    let write_error =
        attempt.snapshot.write_error.map(WriteError::sentence).or_else(|| name_conflicts.first().cloned());
    let silent = failure::silent_node(attempt);
    if let Some(text) = write_error {
        draft.stage(if running == desired { Stage::Running } else { Stage::Starting }, text);
    } else if running == desired {
        let ended = attempt.count(PodView::is_done);
        let text = if ended == 0 {
            format!("{desired} of {desired} nodes train")
        } else {
            let are = if ended == 1 { "is" } else { "are" };
            format!("{} of {desired} nodes train, {ended} {are} done", desired - ended)
        };
        let before = status::message_of(&draft.next, conditions::SUCCEEDED).unwrap_or_default();
        let cordoned = cordon::drain_note(attempt);
        if let Some(news) = cordoned.as_ref().filter(|cordoned| !before.contains(*cordoned)) {
            events.push(EventDraft::warning(events::NODE_CORDONED, news.clone()));
        }
        let training = attempt.existing().into_iter().filter(|pod| !pod.is_done());
        let stopped = Sidecar::sentence(training.map(|pod| (pod.name.as_str(), pod.sidecars.as_slice())));
        let remarks = silent.into_iter().chain(cordoned).chain(replacement::overlap_warning(attempt)).chain(stopped);
        draft.stage(Stage::Running, with_remarks(text, remarks));
        if is_new {
            let of = if attempt.number > 1 { format!(" in attempt {}", attempt.number) } else { String::new() };
            let text = if desired == 1 { "the pod runs".into() } else { format!("all {desired} pods run") };
            events.push(EventDraft::normal(events::RUNNING, text + &of));
        }
    } else if is_new {
        // Once all pods have run, the stage stays Running: a restarting kubelet briefly reports
        // fewer.
        draft.stage(Stage::Starting, with_remarks(starting(attempt, running), replacement::overlap_warning(attempt)));
    }
    let due = no_progress(attempt, &mut draft);
    let mut result = draft.act(&attempt.snapshot);
    result.actions = actions;
    due.into_iter().for_each(|due| result.wake_at(due));
    result.events = if result.status.is_some() { events } else { Vec::new() };
    if running < desired
        && let Some(at) = attempt.placed_at()
    {
        result.wake_at(attempt.schedule_deadline(at));
        let scheduler_report_due = Some(attempt.scheduler_report_due(at)).filter(|by| *by > attempt.now());
        scheduler_report_due.into_iter().for_each(|by| result.wake_at(by));
    }
    if let Err(at) = refused {
        result.wake_at(at);
    }
    result
}

/// Default time without progress after which the ranks' watchdogs would have reacted.
const PROGRESS_TIMEOUT: i32 = 600;
/// Maximum delay until a step is known here: logs of many jobs are read in rotation.
const MAX_READ_DELAY: SignedDuration = SignedDuration::from_secs(300);

/// Reports that no step has been seen for a long time, or returns when that will be the case. It
/// detects what the watchdogs cannot, a process that is stopped together with all others, but also
/// long validations. It only reports and triggers no action.
fn no_progress(attempt: &Attempt<'_>, draft: &mut Draft<'_>) -> Option<Timestamp> {
    let last = attempt.snapshot.silence.progress.filter(|_| draft.next.is(conditions::PROGRESSING))?;
    let policy = &attempt.snapshot.job.spec.failure_policy;
    let seconds = policy.progress_timeout_seconds.unwrap_or(PROGRESS_TIMEOUT).max(PROGRESS_TIMEOUT);
    let limit = SignedDuration::from_secs(seconds.into()).saturating_add(MAX_READ_DELAY);
    let due = last.saturating_add(limit).unwrap_or(Timestamp::MAX);
    if !clock::is_over(due, limit, attempt.now()) {
        return Some(due);
    }
    let step = draft.next.trainer_status.as_ref().map_or(0, |figures| figures.step);
    let text = format!("no step has been reported since step {step} at {}", status::time(last).0);
    draft.condition(conditions::PROGRESSING, "False", conditions::NO_PROGRESS, text);
    None
}

/// Appends remarks to a sentence.
fn with_remarks(text: String, remarks: impl IntoIterator<Item = String>) -> String {
    remarks.into_iter().fold(text, |text, remark| text + "; " + &remark)
}

/// Says what pods that are not running wait for.
fn starting(attempt: &Attempt<'_>, running: usize) -> String {
    let desired = attempt.pods.len();
    let why = attempt.existing().into_iter().find_map(|pod| {
        let why = match (pod.blocker(), &pod.unschedulable) {
            (Some(waiting), _) => blocker::start_remedy(waiting).sentence(&waiting.sentence()),
            (None, Some(why)) => format!("not scheduled: {}", why.message),
            (None, None) => match &pod.init {
                Some(init) => init.sentence(),
                None => attempt.unresponsive_scheduler(pod)?,
            },
        };
        let on = pod.node.as_ref().map_or_else(String::new, |node| format!(" on node {node}"));
        Some(format!("; pod {}{on}: {why}", pod.name))
    });
    format!("{running} of {desired} pods run{}", why.unwrap_or_default())
}
