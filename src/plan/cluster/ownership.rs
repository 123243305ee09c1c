//! Maps objects to their job, attempt and node rank.

use crate::job::LAST_ATTEMPT;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use switchyard_crds::labels;

/// Attempt and node rank from the name of a pod or its claim. `None` if we never generate this
/// name.
pub fn position(name: &str) -> Option<(u32, u32)> {
    let mut parts = name.rsplit('-');
    let mut number = || {
        let part = parts.next()?;
        let number: u32 = part.parse().ok()?;
        (number.to_string() == part).then_some(number)
    };
    let (node_rank, attempt) = (number()?, number()?);
    (attempt > 0 && attempt <= LAST_ATTEMPT).then_some((attempt, node_rank))
}

/// The TrainJob that owns this pod. An ownerReference is not enough, because anyone who can create
/// pods can set it. Only the controller sets the label (an admission policy enforces this), and the
/// name must be one that this job generates.
pub fn parent(pod: &ObjectMeta) -> Option<&OwnerReference> {
    let label = pod.labels.as_ref()?.get(labels::JOB_UID)?;
    named_parent(pod).filter(|owner| *label == owner.uid)
}

/// Same as [`parent`], but accepts a pod without the label: the label was removed, or the rest is
/// forged.
pub fn named_parent(pod: &ObjectMeta) -> Option<&OwnerReference> {
    let owner = controller(pod)?;
    let name = pod.name.as_deref()?;
    let rest = name.strip_prefix(owner.name.as_str())?.strip_prefix('-')?;
    let (attempt, node_rank) = position(name)?;
    (rest == format!("{attempt}-{node_rank}")).then_some(owner)
}

/// UID of the TrainJob that controls an object.
pub fn owner(metadata: &ObjectMeta) -> Option<&str> {
    controller(metadata).map(|owner| owner.uid.as_str())
}

/// The TrainJob in an object's controller reference.
fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let ours = |owner: &&OwnerReference| {
        owner.controller == Some(true) && owner.kind == "TrainJob" && owner.api_version == labels::API_VERSION
    };
    owners.iter().find(ours)
}
