//! Resources that pods need to reach the fabric: devices, and shared memory for NCCL's buffers.
//! Decided before the pods are created, from what the nodes offer.

use super::gang::is_rdma_resource;
use super::profile::training_ports;
use super::profile::{Count, Profile, ResourceRule, Site};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeSet;
use switchyard_core::quantity::{Resources, parse_quantity};
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{FabricMode, FabricResource};

/// Size of `/dev/shm` if no profile sets it. NCCL needs 9.6 MB per connection inside a node, and
/// data loaders need more.
const SHARED_MEMORY: &str = "16Gi";

/// The part of a job's requests that concerns the fabric.
#[derive(Debug, Clone, Copy)]
pub struct FabricRequest<'a> {
    /// Allowed transports between nodes.
    pub mode: FabricMode,
    /// Number of nodes in the gang.
    pub nodes: u32,
    /// GPUs per pod.
    pub gpus: u32,
    /// Requests per pod.
    pub requests: &'a Resources,
}

/// Resources that pods request in addition to the job's own: an RDMA device, and what the profile
/// adds. Empty if the job names an RDMA device itself. Also empty if several match, because
/// guessing could pick one that does not lead to the fabric.
pub fn required_resources(
    request: FabricRequest<'_>,
    profile: Option<&Profile>,
    sites: &[Site<'_>],
) -> Vec<FabricResource> {
    let Some(profile) = profile else { return Vec::new() };
    if request.gpus == 0 || request.nodes < 2 || request.mode == FabricMode::Disabled {
        return Vec::new();
    }
    let has_own = request.requests.names().any(is_rdma_resource);
    let mut found: Vec<FabricResource> = Vec::new();
    for rule in &profile.resources {
        let names = offered(rule, request, sites);
        let [name] = names.iter().collect::<Vec<_>>()[..] else { continue };
        let is_device = is_rdma_resource(name);
        let is_given = is_device && (has_own || found.iter().any(|other| is_rdma_resource(&other.name)));
        if is_given || request.requests.get(name) > 0 {
            continue;
        }
        let of = &profile.name;
        let (quantity, reason) = match (rule.count, &rule.quantity) {
            (_, Some(quantity)) => (quantity.clone(), format!("profile {of}: a fixed amount")),
            (Some(Count::All), _) => {
                (share(name, request, sites), format!("profile {of}: the pod's share of the node"))
            }
            (Some(Count::PerNIC), _) => (nics(request, sites), format!("profile {of}: one for each NIC near the GPUs")),
            (Some(Count::One) | None, _) => ("1".into(), format!("profile {of}: one gives all devices of the node")),
        };
        found.push(FabricResource { name: name.clone(), quantity: Quantity(quantity), reason });
    }
    found
}

/// Resources matching this rule that enough nodes offer.
fn offered(rule: &ResourceRule, request: FabricRequest<'_>, sites: &[Site<'_>]) -> BTreeSet<String> {
    let least = rule.quantity.as_deref().and_then(parse_quantity).map_or(1, |amount| (amount * 1000.0) as i64);
    let fits = |name: &str| match rule.name.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == rule.name,
    };
    let names: BTreeSet<&str> =
        sites.iter().flat_map(|site| site.allocatable.names()).filter(|name| fits(name)).collect();
    let is_enough = |name: &&str| {
        let nodes = sites.iter().filter(|site| site.allocatable.get(name) >= least);
        nodes.count() >= request.nodes as usize
    };
    names.into_iter().filter(is_enough).map(str::to_string).collect()
}

/// Devices in proportion to the pod's share of the node's GPUs; at least one.
fn share(name: &str, request: FabricRequest<'_>, sites: &[Site<'_>]) -> String {
    let of_site = |site: &Site<'_>| {
        let gpus = (site.allocatable.get(GPU_RESOURCE) / 1000).max(1);
        let devices = site.allocatable.get(name) / 1000;
        (devices * i64::from(request.gpus) / gpus).min(devices)
    };
    let least = sites.iter().filter(|site| site.allocatable.get(name) > 0).map(of_site).min();
    least.unwrap_or(1).max(1).to_string()
}

/// Training ports in proportion to the pod's share of the GPUs.
fn nics(request: FabricRequest<'_>, sites: &[Site<'_>]) -> String {
    let of_site = |site: &Site<'_>| {
        let facts = site.facts?;
        Some(training_ports(facts).count() * request.gpus as usize / facts.gpus.len().max(1))
    };
    sites.iter().filter_map(of_site).min().unwrap_or(1).max(1).to_string()
}

/// Size of `/dev/shm`: the profile's size, but at most half of the pod's memory limit, which
/// includes it.
pub fn shared_memory(profile: Option<&Profile>, memory: Option<&Quantity>) -> Quantity {
    let wanted = profile.and_then(|profile| profile.shared_memory.as_deref()).unwrap_or(SHARED_MEMORY);
    let half = memory.and_then(|memory| parse_quantity(&memory.0)).map(|bytes| bytes / 2.0);
    match half {
        Some(half) if half < parse_quantity(wanted).unwrap_or(f64::MAX) => Quantity(format!("{}", half as u64)),
        _ => Quantity(wanted.to_string()),
    }
}
