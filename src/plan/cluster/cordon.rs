//! Nodes that an administrator cordons under a running job: the job stays, or saves a checkpoint
//! and resumes elsewhere.

use super::attempt::Attempt;
use super::failure::PodFailure;
use super::view::PodView;
use crate::eligible::{NodeRules, Unfit, can_run};
use crate::restart::Class;
use switchyard_crds::Disruption;

/// A pod of a placed job whose node has been cordoned since.
fn cordoned<'a>(attempt: &Attempt<'a>) -> Option<(&'a PodView, &'a str)> {
    // A job that tolerates the cordon could be placed on the same node again.
    let mut pods = attempt.existing().into_iter().filter(|pod| attempt.placed && !pod.is_done() && !pod.deleting);
    pods.find_map(|pod| {
        let node = attempt.snapshot.nodes.get(pod.node.as_ref()?)?;
        let rules = NodeRules::of(&attempt.valid.of_pod(pod.node_rank).pod.spec);
        (can_run(&rules, &node.facts) == Err(Unfit::Cordoned)).then_some((pod, node.facts.name.as_str()))
    })
}

/// Why the job leaves its nodes now, `None` if it stays.
pub(super) fn evacuation(attempt: &Attempt<'_>) -> Option<PodFailure> {
    let policy = attempt.snapshot.job.spec.gang_policy.disruption;
    let (pod, node) = cordoned(attempt).filter(|_| policy == Disruption::Checkpoint)?;
    let cause = "the node is cordoned, and the job leaves it (gangPolicy.disruption: Checkpoint)".to_string();
    Some(PodFailure {
        node: Some(node.to_string()),
        ..PodFailure::unknown_state(Class::Preemption, pod.name.clone(), cause)
    })
}

/// Says that a drain waits for the job. `None` if none of its nodes is cordoned.
pub(super) fn drain_note(attempt: &Attempt<'_>) -> Option<String> {
    let (_, node) = cordoned(attempt)?;
    Some(format!(
        "node {node} is cordoned: a drain waits until the job ends (gangPolicy.disruption: Protect) or is suspended"
    ))
}
