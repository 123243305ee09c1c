//! Requirements that a job's pods have of a node.

use super::clock::is_stale;
use super::excluded::Excluded;
use super::machine::Machine;
use super::placement_request::PlacementRequest;
use super::ranks::RankRules;
use super::view::NodeView;
use jiff::Timestamp;
use switchyard_core::placement::gpus::MAX_GPUS;
use switchyard_core::quantity::Resources;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{DeviceAllocation, MinLink, TopologyMode};

/// Requirements that a pod has of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand {
    pub(super) rules: RankRules,
    /// Requested amounts, without GPUs.
    pub(super) amounts: Resources,
    pub(super) gpus: u32,
    /// `None` if it requests no GPUs, or if the mechanism is undecided.
    pub(super) allocation: Option<DeviceAllocation>,
    /// Nodes without a report must not be used.
    reported_only: bool,
}

impl Demand {
    pub fn of(request: &PlacementRequest<'_>) -> Demand {
        let PlacementRequest { job, valid, admitted, .. } = *request;
        let status = job.status.as_ref();
        let policy = &job.spec.topology_policy;
        Demand {
            rules: RankRules::of(admitted, &valid.pod.spec),
            amounts: admitted.requests.clone().without(GPU_RESOURCE),
            gpus: valid.pod.gpus,
            allocation: status.and_then(|status| status.device_allocation).filter(|_| valid.pod.gpus > 0),
            reported_only: policy.mode == TopologyMode::Required && policy.node_topology.min_link != MinLink::System,
        }
    }

    /// True if a node has room for a pod. Leaves GPU links and stale reports to the plan.
    pub fn has_room(&self, node: &NodeView) -> bool {
        let free = node.free_gpus(self.allocation);
        self.refused_by(node).is_none() && self.missing_on(node, free, Timestamp::UNIX_EPOCH).is_none()
    }

    /// True if a node provides GPUs, but not by these pods' mechanism: they may have to be
    /// recreated.
    pub fn provides_gpus_differently(&self, node: &NodeView) -> bool {
        let (claims, count_free) = (node.offered.is_some(), node.allocatable.get(GPU_RESOURCE) > 0);
        match self.allocation {
            Some(DeviceAllocation::Claims) => count_free && !claims,
            Some(DeviceAllocation::DevicePlugin) => claims && !count_free,
            Some(DeviceAllocation::Unknown) | None => false,
        }
    }

    /// Why the scheduler would reject a node for every pod, regardless of free resources.
    pub(super) fn refused_by(&self, node: &NodeView) -> Option<Excluded> {
        self.rules.refused_by(&node.facts).map(Excluded::Unfit)
    }

    /// True if pods may run on a node once it has room.
    pub(super) fn can_use(&self, node: &NodeView) -> bool {
        self.refused_by(node).is_none() && self.unknown_on(node, Timestamp::UNIX_EPOCH).is_none()
    }

    /// Number of GPUs on a node that are free for these pods.
    pub(super) fn gpus_free_on(&self, node: &NodeView) -> u32 {
        self.count_free(node, node.free_gpus(self.allocation))
    }

    fn count_free(&self, node: &NodeView, free: u32) -> u32 {
        let is_claim = self.allocation == Some(DeviceAllocation::Claims);
        let counted = if is_claim { u32::MAX } else { (node.free.get(GPU_RESOURCE) / 1000).clamp(0, 64) as u32 };
        free.count_ones().min(counted)
    }

    /// Information about a node's GPUs that is required but missing.
    fn unknown_on(&self, node: &NodeView, now: Timestamp) -> Option<Excluded> {
        let is_claim = self.allocation == Some(DeviceAllocation::Claims);
        match &node.machine {
            _ if self.gpus == 0 => None,
            Some(Err(why)) if is_claim || self.reported_only => Some(Excluded::Report(why.clone())),
            None if is_claim || self.reported_only => Some(Excluded::NoReport),
            Some(Ok(Machine { observed: Some(at), .. })) if self.reported_only && is_stale(*at, now) => {
                Some(Excluded::Stale(*at))
            }
            _ if is_claim && node.offered.is_none() => Some(Excluded::NoSlice),
            _ => None,
        }
    }

    /// What a node with these free GPUs lacks.
    pub(super) fn missing_on(&self, node: &NodeView, free: u32, now: Timestamp) -> Option<Excluded> {
        if let Some(unknown) = self.unknown_on(node, now) {
            return Some(unknown);
        }
        if self.gpus > 0 {
            let free = self.count_free(node, free);
            if free < self.gpus {
                return Some(Excluded::Gpus { free, all: node.gpus() });
            }
        }
        let resource = self.amounts.names().find(|name| node.free.get(name) < self.amounts.get(name))?;
        let (free, requested) = (node.free.get(resource).max(0), self.amounts.get(resource));
        Some(Excluded::Short { name: resource.to_string(), free, requested })
    }
}

/// A job to be placed, with its pods' requirements.
#[derive(Debug)]
pub(super) struct GangDemand<'a> {
    pub request: &'a PlacementRequest<'a>,
    pub pod: Demand,
}

impl<'a> GangDemand<'a> {
    pub fn of(request: &'a PlacementRequest<'a>) -> GangDemand<'a> {
        GangDemand { request, pod: Demand::of(request) }
    }

    /// GPUs per pod.
    pub fn gpus(&self) -> u32 {
        self.pod.gpus
    }
}

impl NodeView {
    /// Bit mask of GPUs that are free for pods with this allocation mechanism.
    pub(super) fn free_gpus(&self, allocation: Option<DeviceAllocation>) -> u32 {
        let count_free = u32::try_from(self.free.get(GPU_RESOURCE) / 1000).unwrap_or(0);
        let Some(machine) = self.described() else {
            return ((1_u64 << count_free.min(self.gpus()).min(MAX_GPUS as u32)) - 1) as u32;
        };
        match allocation {
            Some(DeviceAllocation::Claims) => machine.usable & self.offered.unwrap_or(0) & !self.taken,
            _ => {
                let left = machine.usable & !self.taken;
                // The kubelet's report may be a minute old, but the number of free GPUs is current.
                let known = left & !self.in_use;
                let left = if known.count_ones() < count_free { left } else { known };
                if count_free == 0 { 0 } else { left }
            }
        }
    }
}
