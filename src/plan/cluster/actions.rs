//! Actions of an attempt: creates and repairs objects and claims, writes NCCL files, lifts gates,
//! and deletes pods and objects of older attempts.

use super::attempt::Attempt;
use super::ownership::position;
use super::view::{ObjectView, PodView};
use super::{Action, JobSnapshot, delete_owned, delete_unfinished, fabric, provisioning};
use crate::objects::{self, Kind, Object};
use crate::slices;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::{DeviceAllocation, PlacementStatus};

/// Restores labels that pods have lost. The job's Service, NetworkPolicy and PodDisruptionBudget
/// select its pods by them.
pub(super) fn labels(attempt: &Attempt<'_>) -> Vec<Action> {
    let JobSnapshot { job, unlabelled, .. } = attempt.snapshot;
    let known = unlabelled.iter().filter_map(|(name, uid)| Some((position(name)?, uid)));
    // An attempt or rank number that this job has not reached yet is forged.
    let known = known.filter(|((of, rank), _)| *of <= attempt.number && *rank < attempt.valid.request.nodes);
    let labelled = known.map(|((of, rank), uid)| objects::label_patch(job, attempt.valid, of, rank, uid));
    labelled.map(|pod| Action::Repair(Object::Pod(Box::new(pod)))).collect()
}

/// Creates or repairs the objects other than pods. Returns one sentence for each object that cannot
/// be created.
pub(super) fn objects(attempt: &Attempt<'_>, actions: &mut Vec<Action>) -> Vec<String> {
    let JobSnapshot { job, objects: existing, .. } = attempt.snapshot;
    let mut name_conflicts = Vec::new();
    let config = objects::config_map(job, attempt.valid, attempt.number).map(Object::ConfigMap);
    for object in objects::shared(job, attempt.valid).into_iter().chain(config) {
        if let Object::Secret(_) = object {
            // The operator has no read access to Secrets, so it cannot observe this one. It is
            // created with the first pods of every attempt.
            if attempt.existing().is_empty() {
                actions.push(Action::Create(object));
            }
            continue;
        }
        let (kind, name) = (object.kind(), object.name().to_string());
        match existing.get(&(kind, name.clone())) {
            None => actions.push(Action::Create(object)),
            Some(view) if !view.owned => {
                name_conflicts.push(name_taken(kind, &name));
            }
            Some(view) if view.deleting => {}
            Some(view) if view.covers(&object.content()) => {}
            // An immutable object cannot be repaired, and its content was correct when it was
            // created.
            Some(_) if kind == Kind::ConfigMap => {}
            Some(_) => actions.push(Action::Repair(object)),
        }
    }
    actions.extend(old_objects(attempt));
    actions.extend(slices(attempt, &mut name_conflicts));
    name_conflicts
}

/// Deletes objects of other attempts: their claims hold devices, and all of them count against the
/// namespace's quotas.
pub(super) fn old_objects<'a>(attempt: &'a Attempt<'_>) -> impl Iterator<Item = Action> + 'a {
    let is_per_attempt =
        |kind: Kind| matches!(kind, Kind::ConfigMap | Kind::ResourceClaim) || provisioning::is_part(kind);
    let is_current = move |name: &str| objects::is_of_attempt(attempt.valid, attempt.number, name);
    delete_owned(&attempt.snapshot, move |kind, name| is_per_attempt(kind) && !is_current(name))
}

/// Recreates deleted slices of the current placement, and deletes slices that no status can
/// reference any more. Slices of an attempt without a placement stay, because the status that
/// references them may not have been observed yet.
fn slices(attempt: &Attempt<'_>, name_conflicts: &mut Vec<String>) -> Vec<Action> {
    let JobSnapshot { job, objects: existing, .. } = attempt.snapshot;
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let named: BTreeSet<String> = slices::of(job).map(slices::names).into_iter().flatten().collect();
    let exists = |name: &String| existing.contains_key(&(Kind::PlacementSlice, name.clone()));
    let mut actions = Vec::new();
    if let Some(placement) = placement.filter(|_| attempt.placed && !named.iter().all(exists)) {
        let all = objects::placement_slices(job, placement).into_iter();
        let all = all.map(|slice| Object::PlacementSlice(Box::new(slice)));
        actions.extend(all.filter_map(|slice| create_missing(slice, existing, name_conflicts)));
    }
    let is_past = |name: &str| {
        let of = objects::named_attempt(job, name);
        of.is_some_and(|of| of < attempt.number || (of == attempt.number && attempt.placed))
    };
    let is_leftover = |kind, name: &str| kind == Kind::PlacementSlice && is_past(name) && !named.contains(name);
    actions.extend(delete_owned(&attempt.snapshot, is_leftover));
    actions
}

/// Message for an object name that is already in use.
fn name_taken(kind: Kind, name: &str) -> String {
    format!("{kind} {name} exists and does not belong to this job: delete it, or choose another name for the job")
}

/// Creates the claims that do not exist yet. Conflicting names are added to `name_conflicts`.
pub(super) fn claims(
    attempt: &Attempt<'_>,
    placement: Option<&PlacementStatus>,
    name_conflicts: &mut Vec<String>,
) -> Vec<Action> {
    let JobSnapshot { job, objects: existing, rules, .. } = attempt.snapshot;
    if job.status.as_ref().and_then(|status| status.device_allocation) != Some(DeviceAllocation::Claims) {
        return Vec::new();
    }
    let nodes = placement.map(|placement| placement.nodes.as_slice()).unwrap_or_default();
    let has_gpus = |rank: u32| attempt.valid.role_of(rank).is_none_or(|role| role.valid.pod.gpus > 0);
    let with_gpus = (0_u32..).zip(nodes).filter(|(rank, _)| has_gpus(*rank));
    let claims = with_gpus.filter_map(|(rank, node)| {
        let claim = objects::claim(job, attempt.valid, rules.defaults, attempt.number, rank, node);
        create_missing(Object::Claim(Box::new(claim)), existing, name_conflicts)
    });
    claims.collect()
}

/// Creates the NCCL files unless they exist.
pub(super) fn fabric_configs(attempt: &Attempt<'_>, name_conflicts: &mut Vec<String>) -> Vec<Action> {
    let JobSnapshot { job, objects: existing, .. } = attempt.snapshot;
    let configs = objects::fabric_configs(job, attempt.valid, attempt.number).into_iter().map(Object::ConfigMap);
    configs.filter_map(|config| create_missing(config, existing, name_conflicts)).collect()
}

/// Creates an object that does not exist.
fn create_missing(
    object: Object,
    existing: &BTreeMap<(Kind, String), ObjectView>,
    name_conflicts: &mut Vec<String>,
) -> Option<Action> {
    match existing.get(&(object.kind(), object.name().to_string())) {
        None => Some(Action::Create(object)),
        Some(view) => {
            name_conflicts.extend((!view.owned).then(|| name_taken(object.kind(), object.name())));
            None
        }
    }
}

/// Lifts the gates of all pods that still have one.
pub(super) fn releases(attempt: &Attempt<'_>) -> Vec<Action> {
    let gated = attempt.existing().into_iter().filter(|pod| pod.gated && !pod.deleting);
    gated
        .filter_map(|pod| {
            let interface = fabric::interface(attempt.snapshot.job, attempt.valid, pod.node_rank);
            let planned = attempt.planned(pod.node_rank)?;
            let mut patch = objects::placement_patch(pod.rules.as_deref()?, planned, interface);
            if let Some((request, class)) = provisioning::consumed(attempt) {
                objects::annotate_consumer(&mut patch, request, class);
            }
            Some(Action::Release { pod: pod.name.clone(), uid: pod.uid.clone(), patch })
        })
        .collect()
}

/// Deletes pods of older attempts that are still running, and pods that ended two or more attempts
/// ago. The pods of the last failure stay for their logs.
pub(super) fn old_pods(attempt: &Attempt<'_>) -> Vec<Action> {
    let is_old = |pod: &PodView| {
        pod.attempt < attempt.number && !pod.deleting && (!pod.is_over() || pod.attempt + 1 < attempt.number)
    };
    let old = attempt.snapshot.pods.iter().filter(|pod| is_old(pod) && pod.settles(attempt.now()).is_none());
    old.map(|pod| delete_unfinished(pod)).collect()
}
