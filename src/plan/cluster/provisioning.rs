//! Requests nodes from the cluster autoscaler while more nodes would help, and withdraws the
//! request when the gang is placed.
//!
//! A gang that lacks nodes gets one ProvisioningRequest for all its pods. It is kept while the gang
//! waits, the pods reference it when they are released, and then it is deleted. A request never
//! changes after it has ended, so it is recreated later.

use super::attempt::Attempt;
use super::refusal::NoPlace;
use super::view::ObjectView;
use super::{Action, clock, give_back};
use crate::kueue;
use crate::objects::{self, Kind, Object};
use crate::status::Draft;
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::{DeviceAllocation, ProvisioningRequestStatus, conditions};

/// Delay before a request that has ended is recreated.
const AGAIN: SignedDuration = SignedDuration::from_mins(10);

/// Conditions that end a request when they are true. The autoscaler does nothing more for it then.
const ENDS: [&str; 3] = ["Failed", "CapacityRevoked", "BookingExpired"];

/// Whether objects of this kind belong to a node request.
pub(super) fn is_part(kind: Kind) -> bool {
    matches!(kind, Kind::ProvisioningRequest | Kind::PodTemplate)
}

/// Result of requesting nodes.
#[derive(Default)]
pub(super) struct Asked {
    pub actions: Vec<Action>,
    /// For the status.
    pub words: Option<String>,
    /// When to act again.
    pub wake: Option<Timestamp>,
}

/// Requests nodes for an unplaced gang, if more nodes would help and a provisioning class is
/// configured.
pub(super) fn ask(
    attempt: &Attempt<'_>,
    admitted: &super::admitted::Admitted,
    why: &NoPlace,
    draft: &mut Draft<'_>,
) -> Asked {
    let super::JobSnapshot { job, objects: existing, rules, provisioning_class, .. } = attempt.snapshot;
    let by_claims = job.status.as_ref().and_then(|status| status.device_allocation) == Some(DeviceAllocation::Claims);
    let Some((name, view)) = request(attempt) else {
        draft.next.conditions.retain(|condition| condition.type_ != conditions::NODES_REQUESTED);
        // Kueue requests nodes for its queues itself. Claims refer to GPUs of existing nodes.
        let class = provisioning_class.filter(|_| why.lacks_nodes && !by_claims && kueue::queue(job).is_none());
        let Some(class) = class else { return Asked::default() };
        let made = objects::provisioning(job, attempt.valid, rules.defaults, attempt.number, admitted, class);
        let at = |object: &Object| existing.get(&(object.kind(), object.name().to_string()));
        if made.iter().filter_map(at).any(|view| !view.owned) {
            return Asked::default();
        }
        let missing = made.into_iter().filter(|object| at(object).is_none()).map(Action::Create);
        return Asked { actions: missing.collect(), ..Asked::default() };
    };
    let Verdict { state, reason, message, ended } = verdict(view);
    let words = format!("ProvisioningRequest {name} asks for {} nodes: {message}", attempt.pods.len());
    draft.condition(conditions::NODES_REQUESTED, state, &reason, words.clone());
    let mut asked = Asked { words: Some(words), ..Asked::default() };
    if let Some(again) = ended.map(|ended| ended.saturating_add(AGAIN).unwrap_or(Timestamp::MAX)) {
        if clock::is_over(again, AGAIN, attempt.now()) {
            asked.actions = given_back(attempt);
        } else {
            asked.wake = Some(again);
        }
    }
    asked
}

/// The request that a placed gang's pods consume, and its class.
pub(super) fn consumed<'a>(attempt: &Attempt<'a>) -> Option<(&'a str, &'a str)> {
    Some((request(attempt)?.0, attempt.snapshot.provisioning_class?))
}

/// The request of this attempt.
fn request<'a>(attempt: &Attempt<'a>) -> Option<(&'a str, &'a ObjectView)> {
    let place = (Kind::ProvisioningRequest, objects::provisioning_name(attempt.valid, attempt.number));
    let ((_, name), view) = attempt.snapshot.objects.get_key_value(&place)?;
    Some((name.as_str(), view)).filter(|(_, view)| view.owned)
}

/// Deletes the objects of the node request.
pub(super) fn given_back(attempt: &Attempt<'_>) -> Vec<Action> {
    give_back(&attempt.snapshot, |kind, _| is_part(kind)).collect()
}

/// State of a request as reported by the autoscaler.
struct Verdict {
    state: &'static str,
    reason: String,
    message: String,
    /// Since when the request has ended.
    ended: Option<Timestamp>,
}

fn verdict(view: &ObjectView) -> Verdict {
    let status = serde_json::from_value(view.content["status"].clone()).unwrap_or_default();
    let ProvisioningRequestStatus { conditions } = status;
    let of = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
    let is_true = |kind: &&str| of(kind).is_some_and(|condition| condition.status == "True");
    let end = ENDS.into_iter().find(is_true).and_then(of);
    let said = end.or_else(|| of("Provisioned")).or_else(|| of("Accepted"));
    let Some(said) = said else {
        let message = "the autoscaler has not said anything yet".to_string();
        return Verdict { state: "Unknown", reason: "Requested".into(), message, ended: None };
    };
    let has_nodes = said.type_ == "Provisioned" && said.status == "True";
    let state = if end.is_some() {
        "False"
    } else if has_nodes {
        "True"
    } else {
        "Unknown"
    };
    let words = if said.message.is_empty() { &said.reason } else { &said.message };
    let message = format!("{} is {}: {}", said.type_, said.status, words.trim_end_matches('.'));
    // Other controllers' reasons may be empty in objects that the server has not validated.
    let reason = if said.reason.is_empty() || end.is_some() { said.type_.clone() } else { said.reason.clone() };
    Verdict { state, reason, message, ended: end.map(|end| end.last_transition_time.0) }
}
