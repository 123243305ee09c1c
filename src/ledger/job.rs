//! Key, identity, attempt, placement and stage of a job.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use switchyard_crds::{PlacementStatus, TrainJob, TrainJobStatus, conditions};

/// Namespace and name of a job.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub namespace: String,
    pub name: String,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Permanent identity of a job. A job created later under the same name has another UID. The
/// namespace is part of it because users of other namespaces can write the UID into their own
/// objects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId {
    pub namespace: String,
    pub uid: String,
}

impl JobId {
    pub fn of(job: &ObjectMeta) -> JobId {
        JobId { namespace: job.namespace.clone().unwrap_or_default(), uid: job.uid.clone().unwrap_or_default() }
    }
}

/// Number of the current attempt.
pub fn attempt_of(job: &TrainJob) -> u32 {
    job.status.as_ref().and_then(|status| status.attempt).unwrap_or(0).unsigned_abs()
}

/// Neither complete nor failed.
pub fn is_live(job: &TrainJob) -> bool {
    !switchyard_plan::cluster::is_over(job)
}

/// Whether a job is queued for room according to its status.
pub(crate) fn is_queued(job: &TrainJob) -> bool {
    let placed = job.status.as_ref().and_then(|status| status.condition(conditions::PLACED));
    is_live(job) && !job.spec.suspend && placed.is_some_and(|placed| placed.reason == conditions::NO_ROOM)
}

/// The current placement of a job.
pub fn placement_of(job: &TrainJob) -> Option<&PlacementStatus> {
    placement_in(job.status.as_ref()?)
}

/// The current placement of a job with this status.
pub fn placement_in(status: &TrainJobStatus) -> Option<&PlacementStatus> {
    let is_over = status.is(conditions::COMPLETE) || status.is(conditions::FAILED);
    status.placement.as_ref().filter(|_| status.is(conditions::PLACED) && !is_over)
}

/// Whether the next status changes the placement. A gang that restarts on its old nodes has no
/// placement in between.
pub fn changes_placement(job: &TrainJob, next: &TrainJobStatus) -> bool {
    placement_of(job) != placement_in(next)
}

pub fn key_of(metadata: &ObjectMeta) -> Key {
    Key { namespace: metadata.namespace.clone().unwrap_or_default(), name: metadata.name.clone().unwrap_or_default() }
}

/// Stage of the job: the reason of its summary condition.
pub fn stage_of(status: &TrainJobStatus) -> Option<&str> {
    summary_of(status).map(|condition| condition.reason.as_str())
}

/// Message of the summary condition; empty without one.
pub fn message_of(status: &TrainJobStatus) -> &str {
    summary_of(status).map_or("", |condition| condition.message.as_str())
}

fn summary_of(status: &TrainJobStatus) -> Option<&Condition> {
    status.condition(conditions::SUCCEEDED)
}
