//! Which job an object belongs to, and which attempt and node of it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use switchyard_crds::labels;

/// Attempt and node rank in the name of a pod, or of its claim; `None`: no such name is ever given.
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

/// The highest number of an attempt. With more digits the name of a pod could be longer than a host name may be, 63 characters. Pauses between
/// attempts keep a job from getting there within a year.
pub const LAST_ATTEMPT: u32 = 99_999;

/// The TrainJob whose pod this is. An ownerReference is not enough: whoever may create pods writes what he likes into it. The label is set
/// by the controller only (an admission policy keeps it so), and the name is one that this job gives.
pub fn parent(pod: &ObjectMeta) -> Option<&OwnerReference> {
    let label = pod.labels.as_ref()?.get(labels::JOB_UID)?;
    named_parent(pod).filter(|owner| *label == owner.uid)
}

/// The same for a pod that may lack the label: somebody removed it, or forged the rest.
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

/// The TrainJob that controls an object, as it says of itself.
fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let ours = |owner: &&OwnerReference| {
        owner.controller == Some(true) && owner.kind == "TrainJob" && owner.api_version == labels::API_VERSION
    };
    owners.iter().find(ours)
}
