//! Pods that got other GPUs than planned, and the bandwidth this costs.

use super::attempt::Attempt;
use super::events::{self, EventDraft};
use super::gang;
use crate::job::GangPod;
use crate::status::Draft;
use switchyard_crds::{PlacementStatus, conditions};

/// Writes to the status which pods got other GPUs than planned, and the bandwidth this costs.
pub(super) fn report(
    attempt: &Attempt<'_>,
    placement: Option<&PlacementStatus>,
    draft: &mut Draft<'_>,
) -> Option<EventDraft> {
    let nodes = placement.map(|placement| placement.nodes.as_slice()).unwrap_or_default();
    let degraded_pods: Vec<String> = attempt
        .snapshot
        .actual
        .iter()
        .filter_map(|(rank, actual)| {
            let planned = nodes.get(*rank as usize)?;
            let machine = attempt.snapshot.nodes.get(&planned.node_name)?.described()?;
            let (_, members) = GangPod::new(attempt.snapshot.job, attempt.valid, attempt.number, *rank).collective();
            let what = gang::compare(machine, members as usize, &planned.gpus, actual)?;
            Some(format!("pod {rank} on {}: {what}", planned.node_name))
        })
        .collect();
    let previous_state = draft.next.condition(conditions::PLACEMENT_DEGRADED).map(|c| c.status.clone());
    let Some(first) = degraded_pods.first() else {
        if previous_state.is_some_and(|previous_state| previous_state == "True") {
            let text = "all pods have GPUs as good as planned".to_string();
            draft.condition(conditions::PLACEMENT_DEGRADED, "False", "AsPlanned", text);
        }
        return None;
    };
    let others = if degraded_pods.len() > 1 {
        format!("; {} other pods are affected too", degraded_pods.len() - 1)
    } else {
        String::new()
    };
    let text = format!("{first}{others}");
    draft.condition(conditions::PLACEMENT_DEGRADED, "True", "OtherDevices", text.clone());
    previous_state
        .is_none_or(|previous_state| previous_state != "True")
        .then(|| EventDraft::warning(events::DEGRADED, text))
}
