//! The exact GPUs of a pod as a ResourceClaim. The scheduler allocates them, and no other pod can
//! have them at the same time.

use super::{Defaults, metadata, object};
use crate::eligible::DEVICES;
use crate::job::{ValidJob, trainer_mut};
use k8s_openapi::api::core::v1::{PodResourceClaim, PodSpec, ResourceClaim as Reference};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;
use switchyard_crds::{DeviceAllocation, PlacedNode, TrainJob, labels};

/// Makes the trainer use the claim for its GPUs, if this attempt allocates GPUs by claims.
pub(super) fn attach(spec: &mut PodSpec, job: &TrainJob, name: &str) {
    let allocation = job.status.as_ref().and_then(|status| status.device_allocation);
    if allocation != Some(DeviceAllocation::Claims) {
        return;
    }
    let Some(trainer) = trainer_mut(spec) else { return };
    let resources = trainer.resources.get_or_insert_default();
    resources.claims.get_or_insert_default().push(Reference { name: DEVICES.into(), request: None });
    spec.resource_claims.get_or_insert_default().push(PodResourceClaim {
        name: DEVICES.into(),
        resource_claim_name: Some(name.into()),
        resource_claim_template_name: None,
    });
}

/// The claim of a placed pod.
///
/// A device without the attribute must not cause an error, which would abort the allocation of the
/// whole pod, so the lookup uses `?` (kubernetes/kubernetes api/resource/v1/types.go).
pub fn claim(
    job: &TrainJob,
    valid: &ValidJob,
    defaults: &Defaults,
    attempt: u32,
    node_rank: u32,
    node: &PlacedNode,
) -> ResourceClaim {
    let mut metadata = metadata(job, valid.pod_name(attempt, node_rank));
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(labels::ATTEMPT.into(), attempt.to_string());
    labels.insert(labels::NODE_RANK.into(), node_rank.to_string());
    let names: Vec<String> = node.gpus.iter().map(|uuid| json!(uuid).to_string()).collect();
    let expression =
        format!(r#"device.attributes["{}"].?uuid.orValue("") in [{}]"#, defaults.gpu_driver, names.join(","));
    object(
        metadata,
        json!({"spec": {"devices": {"requests": [{"name": "gpus", "exactly": {
            "deviceClassName": defaults.gpu_class,
            "allocationMode": "ExactCount",
            "count": node.gpus.len(),
            "selectors": [{"cel": {"expression": expression}}],
        }}]}}}),
    )
}
