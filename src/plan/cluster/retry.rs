//! Decisions that start another attempt: after a failure, a preemption or a scheduling timeout, and
//! for pods that must request other devices.

use super::attempt::Attempt;
use super::avoidance::{FIRST_PAUSE, MAX_NODES, NodeFault, UNSCHEDULABLE, record_faults};
use super::events::{self, EventDraft};
use super::failure::{PodFailure, preempted};
use super::queue_policy::attained;
use super::view::{PodView, Unschedulable};
use super::{JobSnapshot, Premise, Reconciliation, allocation, avoidance, clock, end, fabric};
use crate::restart::{self, Class};
use crate::status::{self, Draft, Ending};
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{PlacedNode, labels};
use switchyard_worker_contract::exit::Exit;

/// Delay before a gang that the scheduler did not bind in time is retried.
const ROLLBACK_PAUSE: SignedDuration = SignedDuration::from_secs(10);

/// Decides after a failure. A missing pod, and a deleted or silent node, must be confirmed first.
pub(super) fn after_failure(attempt: &Attempt<'_>, failed: &PodFailure) -> Reconciliation {
    let is_seen = attempt.existing().iter().any(|pod| pod.name == failed.pod);
    let premise = failed.premise().or_else(|| (!is_seen).then(|| Premise::Absent(failed.pod.clone())));
    let mut result = Reconciliation { premise, ..restart_or_end(attempt, failed) };
    if failed.is_eviction {
        release_nodes(&mut result);
    }
    result
}

/// Decides after a preemption by a job of higher priority.
pub(super) fn after_preemption(attempt: &Attempt<'_>, by: &str) -> Reconciliation {
    let pod = attempt.existing().first().map(|pod| pod.name.clone()).unwrap_or_default();
    let mut result = restart_or_end(attempt, &preempted(pod, by));
    release_nodes(&mut result);
    result
}

/// Decides for a large job whose node list is lost because its slices were deleted or belong to
/// another owner.
pub(super) fn after_lost_placement(attempt: &Attempt<'_>) -> Option<Reconciliation> {
    let placement = attempt.snapshot.job.status.as_ref()?.placement.as_ref()?;
    let named = placement.slices.as_ref().filter(|_| attempt.placed && placement.nodes.is_empty())?;
    let pod = attempt.existing().first()?.name.clone();
    let cause = format!(
        "its node is no longer known: PlacementSlices {}-0 to {}, which hold the job's placement, were deleted or belong to another owner",
        named.name_prefix,
        named.count - 1
    );
    let mut result = restart_or_end(attempt, &PodFailure::unknown_state(Class::Infrastructure, pod, cause));
    if let Some(next) = &mut result.status {
        next.placement = None;
    }
    Some(result)
}

/// Gives up this attempt's nodes, because other jobs need them.
fn release_nodes(result: &mut Reconciliation) {
    if let Some(next) = &mut result.status {
        next.placement = None;
        // The reason must not be `Restarting`: with it the job would keep its nodes.
        for condition in next.conditions.iter_mut().filter(|condition| condition.type_ == conditions::PLACED) {
            condition.reason = conditions::PREEMPTED.to_string();
        }
    }
}

/// Starts another attempt, or ends the job.
fn restart_or_end(attempt: &Attempt<'_>, failed: &PodFailure) -> Reconciliation {
    let status = attempt.snapshot.job.status.as_ref();
    let restarts = status.and_then(|status| status.restarts.clone()).unwrap_or_default();
    let policy = &attempt.snapshot.job.spec.failure_policy;
    let mut result = match restart::decide_at(&failed.failure, policy, &restarts, attempt.now()) {
        restart::Decision::GiveUp(why) => {
            let message = format!("{}; {why}", failed.sentence());
            end(&attempt.snapshot, Ending::failed(why.reason(), message))
        }
        restart::Decision::Restart(next) => {
            let pause = restart::pause(restarts.total, attempt.duration());
            let mut draft = attempt.draft();
            next_attempt(attempt, &mut draft, attempt.now().saturating_add(pause).unwrap_or(attempt.now()));
            draft.next.restarts = Some(next);
            draft.condition(conditions::PLACED, "False", conditions::RESTARTING, failed.sentence());
            let wait = if pause.is_zero() { String::new() } else { format!(" in {} s", pause.as_secs()) };
            let text = format!("attempt {} starts{wait}: {}", attempt.number + 1, failed.sentence());
            draft.stage(Stage::Restarting, text.clone());
            draft.decide(vec![EventDraft::warning(events::RESTARTING, text)])
        }
    };
    if let Some(next) = &mut result.status {
        record_faults(&mut next.node_failures, failed.node_faults(), attempt.now());
    }
    // Exit codes of init containers do not follow the worker's convention.
    let is_of_trainer = attempt.existing().iter().any(|pod| pod.name == failed.pod && pod.ended.is_some());
    if is_of_trainer && failed.failure.code == Some(Exit::Hung.code().into()) {
        result.status = result.status.map(|next| {
            let mut draft = Draft::of(attempt.snapshot.job, next, attempt.now());
            draft.condition(conditions::PROGRESSING, "False", conditions::HUNG, failed.sentence());
            draft.next
        });
    }
    result
}

/// Restarts the gang if another client removed our gate from a pod before the gang was placed: that
/// pod starts alone, on any node. If instead the condition is missing, the status was edited, and
/// the gang may be running.
pub(super) fn after_lost_gate(attempt: &Attempt<'_>) -> Option<Reconciliation> {
    let placed = attempt.snapshot.job.status.as_ref()?.condition(conditions::PLACED)?;
    let alone = attempt.existing().into_iter().find(|pod| !pod.gated && placed.status == "False")?;
    let starts = match &alone.node {
        Some(node) => format!("was started on node {node} without its gang"),
        None => "may start without its gang".into(),
    };
    let pause = backoff(attempt.number);
    let text = format!(
        "pod {} {starts}, because another client removed its scheduling gate {}: attempt {} follows in {} s",
        alone.name,
        labels::GANG_GATE,
        attempt.number + 1,
        pause.as_secs()
    );
    let mut draft = attempt.draft();
    next_attempt(attempt, &mut draft, attempt.now().saturating_add(pause).unwrap_or(attempt.now()));
    draft.next.placement = None;
    draft.condition(conditions::PLACED, "False", conditions::GATE_REMOVED, text.clone());
    draft.stage(Stage::Placing, text.clone());
    Some(draft.decide(vec![EventDraft::warning(events::GATE_REMOVED, text)]))
}

/// How long a scheduler's refusal must last before the gang is rolled back.
const REFUSED_FOR: SignedDuration = SignedDuration::from_secs(10);

/// Rolls back a gang if the scheduler refuses one of its pods.
///
/// # Errors
/// The time until which the scheduler may still bind the pods.
pub(super) fn after_refusal(attempt: &Attempt<'_>) -> Option<Result<Reconciliation, Timestamp>> {
    attempt.placed_at()?;
    let refused = refused(attempt);
    let since = refused.iter().filter_map(|(_, why, _)| why.since).min()?;
    let due = since.saturating_add(REFUSED_FOR).unwrap_or(Timestamp::MAX);
    if !clock::is_over(due, REFUSED_FOR, attempt.now()) {
        return Some(Err(due));
    }
    let named = refused.iter().take(MAX_NAMED).map(|(pod, why, node)| {
        format!("pod {} on node {}: {}", pod.name, node.node_name, avoidance::scheduler_message(&why.message))
    });
    let named: Vec<String> = named.collect();
    let (count, all) = (refused.len(), attempt.pods.len());
    let text = format!("the scheduler refuses {count} of {all} pods: {}", named.join("; "));
    let (pod, ..) = refused.first()?;
    // Retry at once because the gang moves to other nodes. Nodes beyond the remembered ones could
    // be retried endlessly, so then pause first.
    let pause = if count > MAX_NODES { FIRST_PAUSE } else { SignedDuration::ZERO };
    let not_before = attempt.now().saturating_add(pause).unwrap_or(attempt.now());
    Some(Ok(rolled_back(attempt, pod, conditions::UNSCHEDULABLE, text, not_before)))
}

/// Rolls back a placed gang whose pods stay gated because the API server refuses a claim, an NCCL
/// file, or the patch that lifts a gate. While the gang waits for a quota or for a name to become
/// free, no other job could use its nodes.
///
/// # Errors
/// The time until which the server may still accept the write.
pub(super) fn after_refused_write(
    attempt: &Attempt<'_>,
    taken: &[String],
) -> Option<Result<Reconciliation, Timestamp>> {
    let placed = attempt.placed_at()?;
    let gated = attempt.existing().into_iter().find(|pod| pod.gated && pod.node.is_none() && !pod.deleting)?;
    let refused = attempt.snapshot.write_error.filter(|write_error| write_error.is_refusal);
    let refused = refused.map(|write_error| (write_error.since.max(placed), write_error.sentence()));
    let (since, reason) = refused.or_else(|| Some((placed, taken.first()?.clone())))?;
    let due = since.saturating_add(REFUSED_FOR).unwrap_or(Timestamp::MAX);
    if !clock::is_over(due, REFUSED_FOR, attempt.now()) {
        return Some(Err(due));
    }
    let pause = backoff(attempt.number);
    let not_before = attempt.now().saturating_add(pause).unwrap_or(attempt.now());
    let text = format!("the API server refuses objects that the pods need: {reason}");
    let mut result = rolled_back(attempt, gated, conditions::REFUSED, text.clone(), not_before);
    result.status = result.status.map(|mut next| {
        // Its transition time must be the time of the latest refusal.
        next.conditions.retain(|condition| condition.type_ != conditions::OBJECTS_REFUSED);
        let mut draft = Draft::of(attempt.snapshot.job, next, attempt.now());
        draft.condition(conditions::OBJECTS_REFUSED, "True", conditions::REFUSED, text);
        draft.next
    });
    Some(Ok(result))
}

/// Maximum number of pods that a message names.
const MAX_NAMED: usize = 3;

/// Pods that the scheduler refuses, and their planned nodes.
fn refused<'a>(attempt: &Attempt<'a>) -> Vec<(&'a PodView, &'a Unschedulable, &'a PlacedNode)> {
    let open = attempt.existing().into_iter().filter(|pod| pod.node.is_none() && !pod.gated && !pod.deleting);
    open.filter_map(|pod| Some((pod, pod.unschedulable.as_ref()?, attempt.planned(pod.node_rank)?))).collect()
}

/// Starts the next attempt of a gang that the scheduler did not bind as a whole. `unbound` is on no
/// node.
fn rolled_back(
    attempt: &Attempt<'_>,
    unbound: &PodView,
    reason: &str,
    text: String,
    not_before: Timestamp,
) -> Reconciliation {
    let premise = Some(Premise::Unbound(unbound.name.clone()));
    let mut draft = attempt.draft();
    next_attempt(attempt, &mut draft, not_before);
    draft.next.placement = None;
    draft.condition(conditions::PLACED, "False", reason, text.clone());
    draft.stage(Stage::Placing, format!("attempt {} follows: {text}", attempt.number + 1));
    let refused = refused(attempt);
    let faults = refused.iter().map(|(_, why, node)| NodeFault {
        node: node.node_name.clone(),
        reason: UNSCHEDULABLE.into(),
        message: avoidance::scheduler_message(&why.message),
    });
    record_faults(&mut draft.next.node_failures, faults, attempt.now());
    Reconciliation { premise, ..draft.decide(vec![EventDraft::warning(events::ROLLED_BACK, text)]) }
}

/// Rolls back a gang that the scheduler did not bind as a whole in time.
pub(super) fn after_timeout(attempt: &Attempt<'_>) -> Option<Reconciliation> {
    let at = attempt.placed_at()?;
    let unbound: Vec<&PodView> = attempt.existing().into_iter().filter(|pod| pod.node.is_none()).collect();
    let first = unbound.first()?;
    if !clock::is_over(attempt.schedule_deadline(at), attempt.schedule_timeout(), attempt.now()) {
        return None;
    }
    let message =
        unbound.iter().find_map(|pod| Some(format!("pod {}: {}", pod.name, pod.unschedulable.as_ref()?.message)));
    let pause = if message.is_some() { ROLLBACK_PAUSE } else { backoff(attempt.number) };
    let unresponsive_scheduler =
        || unbound.iter().find_map(|pod| Some(format!("pod {}: {}", pod.name, attempt.unresponsive_scheduler(pod)?)));
    let (open, all) = (unbound.len(), attempt.pods.len());
    let seconds = attempt.schedule_timeout().as_secs();
    let why = message.or_else(unresponsive_scheduler).unwrap_or_else(|| "the scheduler gives no reason".into());
    let text = format!("{open} of {all} pods not scheduled within {seconds} s: {why}");
    let not_before = attempt.now().saturating_add(pause).unwrap_or(attempt.now());
    Some(rolled_back(attempt, first, "ScheduleTimeout", text, not_before))
}

/// Backoff for a gang that no scheduler reacted to, or whose objects the API server refused. It
/// grows because a job that can never start would otherwise hold nodes almost all the time.
fn backoff(attempt: u32) -> SignedDuration {
    ROLLBACK_PAUSE.saturating_mul(1 << attempt.min(16)).min(restart::MAX_PAUSE)
}

/// Longest backoff of a gang that released its namespace quota to another gang.
const LONGEST_QUOTA_PAUSE: SignedDuration = SignedDuration::from_secs(120);

/// Releases all pods of a gang that is not placed, if another job of the namespace comes first, or
/// could start, and needs the quota that they use.
pub(super) fn yield_quota(attempt: &Attempt<'_>, why: &str) -> Option<Reconciliation> {
    let other = attempt.snapshot.quota_recipient.filter(|_| !attempt.existing().is_empty())?;
    let pause = backoff(attempt.number).min(LONGEST_QUOTA_PAUSE);
    let mut draft = attempt.draft();
    next_attempt(attempt, &mut draft, attempt.now().saturating_add(pause).unwrap_or(attempt.now()));
    let text = format!(
        "job {other} comes first for the namespace's quota: the pods are deleted, and recreated in {} s; {why}",
        pause.as_secs()
    );
    draft.condition(conditions::PLACED, "False", conditions::QUOTA, text.clone());
    draft.stage(Stage::Queued, text.clone());
    Some(draft.decide(vec![EventDraft::normal(events::QUOTA_LEFT, text)]))
}

/// Recreates the pods if the nodes now offer devices that they did not offer before: a pod's
/// requests are immutable.
pub(super) fn recreate_for_devices(attempt: &Attempt<'_>, why: &str) -> Option<Reconciliation> {
    let JobSnapshot { job, nodes, rules, .. } = attempt.snapshot;
    let wanted = fabric::pod_resources(job, attempt.valid, rules.defaults, nodes)?.resources;
    let current = job.status.as_ref().and_then(|status| status.fabric.as_ref()).map(|fabric| &fabric.resources);
    if wanted.is_empty() || current == Some(&wanted) {
        return None;
    }
    let names: Vec<&str> = wanted.iter().map(|resource| resource.name.as_str()).collect();
    Some(restart_for_changed_nodes(
        attempt,
        conditions::FABRIC_NOT_READY,
        format!("the nodes now offer {}", names.join(", ")),
        why,
    ))
}

/// Recreates the pods if the nodes now provide GPUs by the other mechanism, which is also fixed
/// when a pod is created.
pub(super) fn recreate_for_allocation(attempt: &Attempt<'_>, why: &str) -> Option<Reconciliation> {
    let mechanism = allocation::other(attempt.snapshot.job, attempt.snapshot.nodes)?;
    Some(restart_for_changed_nodes(
        attempt,
        conditions::NO_ROOM,
        format!("the nodes now provide GPUs by {mechanism:?}"),
        why,
    ))
}

/// Starts another attempt because the nodes have changed. Repeated changes back off, for example
/// while a driver keeps restarting. The event has the condition's reason.
fn restart_for_changed_nodes(attempt: &Attempt<'_>, reason: &'static str, change: String, why: &str) -> Reconciliation {
    let mut draft = attempt.draft();
    let pause = restart::pause(attempt.number as i32 - 1, attempt.duration());
    next_attempt(attempt, &mut draft, attempt.now().saturating_add(pause).unwrap_or(attempt.now()));
    let wait = if pause.is_zero() { String::new() } else { format!(" in {} s", pause.as_secs()) };
    let text = format!("{change}: the pods are recreated{wait}; {why}");
    draft.condition(conditions::PLACED, "False", reason, text.clone());
    draft.stage(Stage::Placing, text.clone());
    draft.decide(vec![EventDraft::normal(reason, text)])
}

fn next_attempt(attempt: &Attempt<'_>, draft: &mut Draft<'_>, not_before: Timestamp) {
    let ran = attained(attempt.snapshot.job, attempt.now()).as_secs();
    draft.next.ran_seconds = (ran > 0).then_some(ran);
    draft.next.attempt = Some(attempt.number as i32 + 1);
    draft.next.attempt_time = Some(status::time(not_before));
    let JobSnapshot { job, nodes, rules, .. } = attempt.snapshot;
    draft.next.device_allocation = allocation::allocation(job, nodes);
    draft.next.fabric = fabric::pod_resources(job, attempt.valid, rules.defaults, nodes);
    draft.count(&[], attempt.valid.request.nodes as i32);
    draft.start_over();
}
