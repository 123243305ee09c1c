//! GPU allocation for an attempt's pods: by claims or by the device plugin.

use super::view::NodeView;
use crate::job::total_gpus;
use std::collections::BTreeMap;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{DeviceAllocation, TrainJob};

/// Chooses the mechanism for a new attempt: claims if at least as many nodes offer them as have the
/// extended resource.
pub fn allocation(job: &TrainJob, nodes: &BTreeMap<String, NodeView>) -> Option<DeviceAllocation> {
    if total_gpus(job) == 0 {
        return None;
    }
    let offering = nodes.values().filter(|node| node.offered.is_some()).count();
    let counting = nodes.values().filter(|node| node.allocatable.get(GPU_RESOURCE) > 0).count();
    let claims = offering > 0 && offering >= counting;
    Some(if claims { DeviceAllocation::Claims } else { DeviceAllocation::DevicePlugin })
}

/// Returns the other mechanism if no node provides GPUs by this attempt's mechanism: its pods were
/// created before a driver existed, or while all drivers were down.
pub fn other(job: &TrainJob, nodes: &BTreeMap<String, NodeView>) -> Option<DeviceAllocation> {
    let chosen = job.status.as_ref()?.device_allocation?;
    let is_provided = |mechanism| {
        nodes.values().any(|node| match mechanism {
            DeviceAllocation::Claims => node.offered.is_some(),
            DeviceAllocation::DevicePlugin => node.allocatable.get(GPU_RESOURCE) > 0,
            DeviceAllocation::Unknown => false,
        })
    };
    allocation(job, nodes).filter(|now| *now != chosen && is_provided(*now) && !is_provided(chosen))
}
