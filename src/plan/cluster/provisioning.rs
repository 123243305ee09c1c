//! Requests nodes from the cluster autoscaler while more nodes would help, and withdraws the
//! request when the gang is placed.
//!
//! A gang that lacks nodes gets one ProvisioningRequest for all its pods. It is kept while the gang
//! waits, the pods reference it when they are released, and then it is deleted. A request never
//! changes after it has ended, so it is recreated later.

use super::attempt::Attempt;
use super::refusal::NoPlacement;
use super::view::ObjectView;
use super::{Action, clock, delete_owned};
use crate::kueue;
use crate::objects::{self, Kind, Object};
use crate::status::Draft;
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::{DeviceAllocation, ProvisioningRequestStatus, conditions};

/// Delay before a request that has ended is recreated.
const RETRY_DELAY: SignedDuration = SignedDuration::from_mins(10);

/// Conditions that end a request when they are true. The autoscaler does nothing more for it then.
const TERMINAL_CONDITIONS: [&str; 3] = ["Failed", "CapacityRevoked", "BookingExpired"];

/// Whether objects of this kind belong to a node request.
pub(super) fn is_part(kind: Kind) -> bool {
    matches!(kind, Kind::ProvisioningRequest | Kind::PodTemplate)
}

/// Result of requesting nodes.
#[derive(Default)]
pub(super) struct NodeRequest {
    pub actions: Vec<Action>,
    /// For the status.
    pub message: Option<String>,
    /// When to act again.
    pub wake: Option<Timestamp>,
}

/// Requests nodes for an unplaced gang, if more nodes would help and a provisioning class is
/// configured.
pub(super) fn request_nodes(
    attempt: &Attempt<'_>,
    admitted: &super::admitted::Admitted,
    why: &NoPlacement,
    draft: &mut Draft<'_>,
) -> NodeRequest {
    let super::JobSnapshot { job, objects: existing, rules, provisioning_class, .. } = attempt.snapshot;
    let uses_claims = job.status.as_ref().and_then(|status| status.device_allocation) == Some(DeviceAllocation::Claims);
    let Some((name, view)) = request(attempt) else {
        draft.next.conditions.retain(|condition| condition.type_ != conditions::NODES_REQUESTED);
        // Kueue requests nodes for its queues itself. Claims refer to GPUs of existing nodes.
        let class = provisioning_class.filter(|_| why.lacks_nodes && !uses_claims && kueue::queue(job).is_none());
        let Some(class) = class else { return NodeRequest::default() };
        let made = objects::provisioning(job, attempt.valid, rules.defaults, attempt.number, admitted, class);
        let at = |object: &Object| existing.get(&(object.kind(), object.name().to_string()));
        if made.iter().filter_map(at).any(|view| !view.owned) {
            return NodeRequest::default();
        }
        let missing = made.into_iter().filter(|object| at(object).is_none()).map(Action::Create);
        return NodeRequest { actions: missing.collect(), ..NodeRequest::default() };
    };
    let RequestState { state, reason, message, ended } = request_state(view);
    let message = format!("ProvisioningRequest {name} requests {} nodes: {message}", attempt.pods.len());
    draft.condition(conditions::NODES_REQUESTED, state, &reason, message.clone());
    let mut node_request = NodeRequest { message: Some(message), ..NodeRequest::default() };
    if let Some(retry_at) = ended.map(|ended| ended.saturating_add(RETRY_DELAY).unwrap_or(Timestamp::MAX)) {
        if clock::is_over(retry_at, RETRY_DELAY, attempt.now()) {
            node_request.actions = withdraw(attempt);
        } else {
            node_request.wake = Some(retry_at);
        }
    }
    node_request
}

/// The request that a placed gang's pods consume, and its class.
pub(super) fn consumed<'a>(attempt: &Attempt<'a>) -> Option<(&'a str, &'a str)> {
    Some((request(attempt)?.0, attempt.snapshot.provisioning_class?))
}

/// The request of this attempt.
fn request<'a>(attempt: &Attempt<'a>) -> Option<(&'a str, &'a ObjectView)> {
    let key = (Kind::ProvisioningRequest, objects::provisioning_name(attempt.valid, attempt.number));
    let ((_, name), view) = attempt.snapshot.objects.get_key_value(&key)?;
    Some((name.as_str(), view)).filter(|(_, view)| view.owned)
}

/// Deletes the objects of the node request.
pub(super) fn withdraw(attempt: &Attempt<'_>) -> Vec<Action> {
    delete_owned(&attempt.snapshot, |kind, _| is_part(kind)).collect()
}

/// State of a request as reported by the autoscaler.
struct RequestState {
    state: &'static str,
    reason: String,
    message: String,
    /// Since when the request has ended.
    ended: Option<Timestamp>,
}

fn request_state(view: &ObjectView) -> RequestState {
    let status = serde_json::from_value(view.content["status"].clone()).unwrap_or_default();
    let ProvisioningRequestStatus { conditions } = status;
    let of = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
    let is_true = |kind: &&str| of(kind).is_some_and(|condition| condition.status == "True");
    let end = TERMINAL_CONDITIONS.into_iter().find(is_true).and_then(of);
    let latest = end.or_else(|| of("Provisioned")).or_else(|| of("Accepted"));
    let Some(latest) = latest else {
        let message = "the autoscaler has not responded yet".to_string();
        return RequestState { state: "Unknown", reason: "Requested".into(), message, ended: None };
    };
    let has_nodes = latest.type_ == "Provisioned" && latest.status == "True";
    let state = if end.is_some() {
        "False"
    } else if has_nodes {
        "True"
    } else {
        "Unknown"
    };
    let message = if latest.message.is_empty() { &latest.reason } else { &latest.message };
    let message = format!("{} is {}: {}", latest.type_, latest.status, message.trim_end_matches('.'));
    // Other controllers' reasons may be empty in objects that the server has not validated.
    let reason = if latest.reason.is_empty() || end.is_some() { latest.type_.clone() } else { latest.reason.clone() };
    RequestState { state, reason, message, ended: end.map(|end| end.last_transition_time.0) }
}
