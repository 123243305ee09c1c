//! Kueue's integration for plain pods: the pods of an attempt form one group, which it admits as a whole or not at all.
//!
//! A job says which queue it waits in as all kinds of Kueue do, by a label; its pods then carry the label as well. The group has a name of its
//! own in each attempt, since Kueue never replaces a pod of a group that says it cannot be retried: once all pods of an attempt have ended it
//! finishes their Workload, gives its quota back, and lets go of the pods.

use crate::ValidJob;
use crate::job::short_uid;
use k8s_openapi::api::events::v1::Event;
use std::collections::BTreeMap;
use switchyard_crds::TrainJob;

/// Label of a job, and of its pods: the LocalQueue that it waits in.
const QUEUE: &str = "kueue.x-k8s.io/queue-name";
/// Label of a job, and of its pods: the WorkloadPriorityClass that it has in the queue.
const PRIORITY: &str = "kueue.x-k8s.io/priority-class";
/// Label of a pod: its group, whose Workload has the same name.
pub const GROUP: &str = "kueue.x-k8s.io/pod-group-name";
/// Annotation of a pod: how many pods its group has.
const GROUP_COUNT: &str = "kueue.x-k8s.io/pod-group-total-count";
/// Annotation of a pod: `false` for a group in which no pod replaces another.
const RETRIABLE: &str = "kueue.x-k8s.io/retriable-in-group";
/// Annotation of a pod: its role in the group. Kueue works one out from the pod where it finds none.
const ROLE: &str = "kueue.x-k8s.io/role-hash";
/// Label of a pod: its position in the group. Kueue's topology-aware scheduling assigns nodes in this order.
const INDEX: &str = "kueue.x-k8s.io/pod-group-pod-index";
/// The role of all pods of a gang: what differs between them, such as the names of their claims, is nothing to the queue.
const ONLY_ROLE: &str = "main";
/// What the names of Kueue's scheduling gates begin with.
pub const GATES: &str = "kueue.x-k8s.io/";
/// Condition of a pod that Kueue stops, before it deletes it.
pub const STOPPED: &str = "TerminationTarget";

/// Longest part of a job's name in that of a group: with the rest it has to fit into a label.
const LONGEST_NAME: usize = 40;

/// The queue of a job's pods. The template comes before the job, as everywhere.
pub fn queue(job: &TrainJob) -> Option<&str> {
    let of_template = job.spec.template.as_ref().and_then(|template| template.metadata.as_ref()?.labels.as_ref());
    [of_template, job.metadata.labels.as_ref()]
        .into_iter()
        .flatten()
        .find_map(|labels| labels.get(QUEUE))
        .map(String::as_str)
}

/// Puts a pod into the group of its attempt, if its job has a queue.
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
    annotations.insert(ROLE.into(), ONLY_ROLE.into());
}

/// Name of the group of an attempt. The UID keeps out the Workload of an earlier job of the same name.
fn group(job: &TrainJob, valid: &ValidJob, attempt: u32) -> String {
    let name: String = valid.name.chars().take(LONGEST_NAME).collect();
    format!("{name}-{}-{attempt}", short_uid(job))
}

/// What Kueue last said of a Workload in its events.
pub fn last_words(events: &[Event]) -> Option<String> {
    let last = events.iter().max_by_key(|event| crate::cluster::clock::time_of(event))?;
    last.note.clone().filter(|note| !note.is_empty())
}
