//! What is read off a job: its key, its attempt, its place, its stage.

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

/// A job for good: one of the same name that is made later has another UID, and a UID is worth nothing in another namespace than the job's,
/// where somebody else may write it into his objects.
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

/// Number of the attempt that a job is in.
pub fn attempt_of(job: &TrainJob) -> u32 {
    job.status.as_ref().and_then(|status| status.attempt).unwrap_or(0).unsigned_abs()
}

/// Neither complete nor failed.
pub fn is_live(job: &TrainJob) -> bool {
    !switchyard_plan::cluster::is_over(job)
}

/// True if a job stands in the queue by its status: it waits for room.
pub(crate) fn is_queued(job: &TrainJob) -> bool {
    let placed = job.status.as_ref().and_then(|status| status.condition(conditions::PLACED));
    is_live(job) && !job.spec.suspend && placed.is_some_and(|placed| placed.reason == conditions::NO_ROOM)
}

/// The place of a job that has one now.
pub fn placement_of(job: &TrainJob) -> Option<&PlacementStatus> {
    place_in(job.status.as_ref()?)
}

/// The place that a job with this status has.
pub fn place_in(status: &TrainJobStatus) -> Option<&PlacementStatus> {
    let is_over = status.is(conditions::COMPLETE) || status.is(conditions::FAILED);
    status.placement.as_ref().filter(|_| status.is(conditions::PLACED) && !is_over)
}

/// Whether a job has another place by its next status. A gang that starts again where it was has none in between.
pub fn is_another_place(job: &TrainJob, next: &TrainJobStatus) -> bool {
    placement_of(job) != place_in(next)
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
