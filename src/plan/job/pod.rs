//! Requirements of a job's pods, read once from the manifest without building a pod.

use crate::resources;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_crds::names::{GPU_RESOURCE, TRAINER};
use switchyard_crds::{DeviceAllocation, TrainJob, TrainJobStatus};

/// The user's pod with its trainer.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestedPod {
    /// The template with a trainer container that has the limits of
    /// `spec.trainer.resourcesPerNode`.
    pub spec: PodSpec,
    /// Number of GPUs of the trainer.
    pub gpus: u32,
}

impl RequestedPod {
    pub(super) fn of(job: &TrainJob) -> RequestedPod {
        let template = job.spec.template.as_ref().and_then(|template| template.spec.clone());
        let mut spec = template.unwrap_or_default();
        if trainer(&spec).is_none() {
            spec.containers.insert(0, Container { name: TRAINER.into(), ..Container::default() });
        }
        let limits = job.spec.trainer.resources_per_node.iter().flat_map(|resources| &resources.limits);
        if let Some(trainer) = trainer_mut(&mut spec) {
            let resources = trainer.resources.get_or_insert_default();
            for (name, quantity) in limits {
                resources.limits.get_or_insert_default().entry(name.clone()).or_insert_with(|| quantity.clone());
            }
        }
        RequestedPod { spec, gpus: gpus(job) }
    }

    /// Requests that the scheduler counts for a pod of an attempt with this status. Switchyard's
    /// own additions request nothing, except the devices in the status. Without a status: the
    /// user's requests.
    pub fn requests(&self, status: Option<&TrainJobStatus>) -> Resources {
        let Some(status) = status else { return resources::pod_requests(&self.spec) };
        let mut spec = self.spec.clone();
        if let Some(trainer) = trainer_mut(&mut spec) {
            set_devices(trainer, status);
        }
        resources::pod_requests(&spec)
    }
}

/// Sets the extended resources of a trainer: adds fabric devices, and removes GPUs that are
/// allocated by a claim.
pub(crate) fn set_devices(trainer: &mut Container, status: &TrainJobStatus) {
    let resources = trainer.resources.get_or_insert_default();
    for resource in status.fabric.iter().flat_map(|fabric| &fabric.resources) {
        let limits = resources.limits.get_or_insert_default();
        limits.entry(resource.name.clone()).or_insert_with(|| resource.quantity.clone());
    }
    if status.device_allocation == Some(DeviceAllocation::Claims) {
        for amounts in [&mut resources.limits, &mut resources.requests].into_iter().flatten() {
            amounts.remove(GPU_RESOURCE);
        }
    }
}

/// GPUs that each pod's trainer requests in a job without roles. The template takes precedence over
/// `spec.trainer.resourcesPerNode`, as in the pod.
pub fn gpus(job: &TrainJob) -> u32 {
    let template = job.spec.template.as_ref().and_then(|template| template.spec.as_ref());
    let resources = template.and_then(trainer).and_then(|trainer| trainer.resources.as_ref());
    let of_template =
        resources.and_then(|resources| resources.limits.as_ref()).filter(|l| l.contains_key(GPU_RESOURCE));
    let limits = of_template.or(job.spec.trainer.resources_per_node.as_ref().map(|resources| &resources.limits));
    limits.and_then(gpus_of).unwrap_or(0)
}

/// GPUs among these limits, `None` if they do not mention any.
pub(super) fn gpus_of(limits: &BTreeMap<String, Quantity>) -> Option<u32> {
    limits.contains_key(GPU_RESOURCE).then(|| {
        let count = resources::of_quantities(limits).get(GPU_RESOURCE) / 1000;
        u32::try_from(count.max(0)).unwrap_or(u32::MAX)
    })
}

/// The trainer container.
pub(crate) fn trainer(spec: &PodSpec) -> Option<&Container> {
    spec.containers.iter().find(|container| container.name == TRAINER)
}

pub(crate) fn trainer_mut(spec: &mut PodSpec) -> Option<&mut Container> {
    spec.containers.iter_mut().find(|container| container.name == TRAINER)
}
