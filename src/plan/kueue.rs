//! Kueue integration for plain pods: the pods of an attempt form one group, which Kueue admits as a
//! whole or not at all.
//!
//! A job selects its queue with a label, like all kinds that Kueue supports, and its pods carry the
//! label as well. Each attempt has its own group name, because Kueue never replaces a pod of a
//! group that is not retriable: once all pods of an attempt have ended, it finishes their Workload,
//! releases the quota, and releases the pods.

use crate::ValidJob;
use crate::job::short_uid;
use k8s_openapi::api::events::v1::Event;
use std::collections::BTreeMap;
use switchyard_crds::TrainJob;

/// Label of a job and its pods: the LocalQueue.
const QUEUE: &str = "kueue.x-k8s.io/queue-name";
/// Label of a job and its pods: the WorkloadPriorityClass.
const PRIORITY: &str = "kueue.x-k8s.io/priority-class";
/// Pod label: its group, whose Workload has the same name.
pub const GROUP: &str = "kueue.x-k8s.io/pod-group-name";
/// Pod annotation: the number of pods in its group.
const GROUP_COUNT: &str = "kueue.x-k8s.io/pod-group-total-count";
/// Pod annotation: `false` for a group in which pods are never replaced.
const RETRIABLE: &str = "kueue.x-k8s.io/retriable-in-group";
/// Pod annotation: its role in the group. Kueue derives a role from the pod if this is missing.
const ROLE: &str = "kueue.x-k8s.io/role-hash";
/// Pod label: its index in the group. Kueue's topology-aware scheduling assigns nodes in this
/// order.
const INDEX: &str = "kueue.x-k8s.io/pod-group-pod-index";
/// Role of all pods of a gang without roles. Differences between them, such as claim names, are
/// irrelevant to the queue.
const ONLY_ROLE: &str = "main";
/// Prefix of Kueue's scheduling gates.
pub const GATES: &str = "kueue.x-k8s.io/";
/// Condition of a pod that Kueue stops, set before Kueue deletes the pod.
pub const STOPPED: &str = "TerminationTarget";

/// Maximum length of the job name in a group name, which must fit into a label.
const MAX_NAME: usize = 40;

/// The queue of a job's pods. The template takes precedence over the job, as everywhere.
pub fn queue(job: &TrainJob) -> Option<&str> {
    let of_template = job.spec.template.as_ref().and_then(|template| template.metadata.as_ref()?.labels.as_ref());
    [of_template, job.metadata.labels.as_ref()]
        .into_iter()
        .flatten()
        .find_map(|labels| labels.get(QUEUE))
        .map(String::as_str)
}

/// Adds a pod to the group of its attempt, if its job has a queue.
pub(crate) fn join(
    job: &TrainJob,
    valid: &ValidJob,
    (attempt, node_rank): (u32, u32),
    labels: &mut BTreeMap<String, String>,
    annotations: &mut BTreeMap<String, String>,
) {
    let Some(queue) = queue(job) else { return };
    labels.insert(QUEUE.into(), queue.into());
    if let Some(priority) = job.metadata.labels.as_ref().and_then(|labels| labels.get(PRIORITY)) {
        labels.entry(PRIORITY.into()).or_insert_with(|| priority.clone());
    }
    labels.insert(GROUP.into(), group(job, valid, attempt));
    labels.insert(INDEX.into(), node_rank.to_string());
    annotations.insert(GROUP_COUNT.into(), valid.request.nodes.to_string());
    annotations.insert(RETRIABLE.into(), "false".into());
    let role = valid.role_of(node_rank).map_or(ONLY_ROLE, |role| &role.name);
    annotations.insert(ROLE.into(), role.into());
}

/// Group name of an attempt. It contains the UID to avoid the Workload of an earlier job of the
/// same name.
fn group(job: &TrainJob, valid: &ValidJob, attempt: u32) -> String {
    let name: String = valid.name.chars().take(MAX_NAME).collect();
    format!("{name}-{}-{attempt}", short_uid(job))
}

/// Kueue's last message about a Workload, from its events.
pub fn last_message(events: &[Event]) -> Option<String> {
    let last = events.iter().max_by_key(|event| crate::cluster::clock::time_of(event))?;
    last.note.clone().filter(|note| !note.is_empty())
}
