//! `switchyard topo --cluster`: shows the domains of a cluster, its nodes, and the users of their
//! GPUs.

mod json;
mod screen;
mod svg;
#[cfg(test)]
mod tests;
mod users;

use super::devices::GANG;
use crate::args::{Cli, Output, TopoArgs};
use crate::failure::Failure;
use crate::output::{emit, width};
use crate::snapshot::{self, SnapshotFile};
use jiff::Timestamp;
use serde::Deserialize;
use std::collections::BTreeMap;
use switchyard_core::placement::gpus::{Level, MinLink};
use switchyard_crds::PlacementStatus;
use switchyard_crds::gpu_topology::{GPUTopology, GPUTopologyStatus, Nic};
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_ledger::offline::Cluster;
use switchyard_plan::cluster::machine::Machine;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{Excluded, is_stale};
use switchyard_plan::eligible::Unfit;
use switchyard_topology::report;
use switchyard_worker_contract::exit::Exit;
use users::Users;

/// The use of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Free,
    /// Split into MIG instances, or the driver requests a recovery action.
    NotUsable,
    /// In use by an unknown user.
    Unknown,
    /// Used by the user with this number.
    By(usize),
    /// The user with this number has this many GPUs; which ones is unknown.
    Counted(usize),
}

/// A node with its GPUs.
#[derive(Debug, Clone, PartialEq)]
struct NodeRow {
    name: String,
    /// Domain at each level, small to large.
    domains: Vec<Option<String>>,
    /// Number and use of each GPU. On nodes without a report, the numbers are only positions.
    gpus: Vec<(u32, Use)>,
    /// GPUs that a job could get now.
    free: usize,
    /// Working training NICs, and all of them; `None` if unknown.
    nics: Option<(usize, usize)>,
    /// Bandwidth of the ring over all GPUs, megabytes (10^6) per second.
    inside: Option<u32>,
    /// Total bandwidth of all GPUs to other nodes, megabytes (10^6) per second.
    outward: Option<u32>,
    /// Why no job can be placed on this node.
    excluded: Option<Excluded>,
    /// Training NICs that do not work.
    nics_down: Vec<String>,
    /// GPUs without NVLink to the others, if NVLink connects most of the node.
    unlinked: Vec<u32>,
}

/// A domain level.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LevelRow {
    key: String,
    level: Level,
}

/// A cluster for display.
#[derive(Debug, Clone, PartialEq)]
struct ClusterTopology {
    taken_at: Option<Timestamp>,
    /// Small to large; the last level is the whole cluster.
    levels: Vec<LevelRow>,
    /// Nodes with GPUs, by name.
    nodes: Vec<NodeRow>,
    /// Nodes without GPUs.
    without_gpus: usize,
    /// Namespace and name of GPU users, in node order.
    users: Vec<String>,
}

pub(super) fn show(cli: &Cli, args: &TopoArgs) -> Result<Exit, Failure> {
    let file = snapshot::read(&args.source)?;
    let topology = ClusterTopology::of(&file, &snapshot::cluster(&file)?);
    if cli.output == Output::Dot {
        return Err(Failure::usage("-o dot: draws one machine; expected table, yaml or json with --cluster"));
    }
    emit(cli.output, "ClusterTopology", &json::value(&topology), || screen::render(&topology, width(), args.full));
    Ok(Exit::Done)
}

/// Draws a job's placement in the cluster (SVG).
pub(crate) fn drawing(file: &SnapshotFile, cluster: &Cluster, job: &str, place: &PlacementStatus) -> String {
    let numbers = |node: &str, uuids: &[String]| {
        let machine = cluster.nodes().get(node).and_then(|view| view.described());
        let gpus = machine.into_iter().flat_map(|machine| &machine.gpus);
        gpus.filter(|gpu| uuids.contains(&gpu.uuid)).map(|gpu| gpu.index).collect()
    };
    let gpus = place.nodes.iter().map(|node| (node.node_name.as_str(), numbers(&node.node_name, &node.gpus)));
    svg::svg(&ClusterTopology::of(file, cluster), &svg::Gang { name: job, status: place, gpus: gpus.collect() })
}

impl ClusterTopology {
    fn of(file: &SnapshotFile, cluster: &Cluster) -> ClusterTopology {
        let views: Vec<&NodeView> = cluster.nodes().values().collect();
        let reports = reports(file);
        let domains = cluster.levels().domains(&views);
        let mut users = Users::of(file, cluster);
        let mut nodes = Vec::new();
        for (position, view) in views.iter().enumerate().filter(|(_, view)| view.gpus() > 0) {
            let status = reports.get(view.facts.name.as_str());
            let excluded = excluded(view, file.taken_at);
            let gpus = users.of_node(view);
            let unused = gpus.iter().filter(|(_, used)| *used == Use::Free).count();
            let counted = usize::try_from(view.free.get(GPU_RESOURCE) / 1000).unwrap_or(0);
            // If GPUs are only allocated by claims, the node counts none.
            let most = if view.allocatable.get(GPU_RESOURCE) > 0 { counted } else { unused };
            let is_closed = matches!(excluded, Some(Excluded::Unfit(_)));
            nodes.push(NodeRow {
                name: view.facts.name.clone(),
                domains: domains.iter().map(|level| level.of[position].clone()).collect(),
                free: if is_closed { 0 } else { unused.min(most) },
                gpus,
                nics: view.described().map(|machine| {
                    (
                        machine.nics.len(),
                        status.map_or(machine.nics.len(), |status| all_nics(status, machine.nics.len())),
                    )
                }),
                inside: view.described().map(|machine| machine.shape.ring[machine.shape.all() as usize]),
                outward: view.described().map(|machine| machine.shape.outward(machine.shape.all(), Some(GANG))),
                excluded,
                nics_down: status.map(nics_down).unwrap_or_default(),
                unlinked: view.described().map(unlinked).unwrap_or_default(),
            });
        }
        ClusterTopology {
            taken_at: file.taken_at,
            levels: domains.into_iter().map(|level| LevelRow { key: level.key, level: level.level }).collect(),
            without_gpus: views.len() - nodes.len(),
            nodes,
            users: users.names(),
        }
    }
}

/// Reports by node. Unreadable reports are omitted; [`excluded`] returns their errors.
fn reports(file: &SnapshotFile) -> BTreeMap<String, GPUTopologyStatus> {
    let reports = file.items.iter().filter(|item| item["kind"] == "GPUTopology");
    let read = |item| {
        let report = GPUTopology::deserialize(item).ok()?;
        Some((report.metadata.name?, report.status?))
    };
    reports.filter_map(read).collect()
}

/// Why a node accepts no job at all.
fn excluded(view: &NodeView, now: Option<Timestamp>) -> Option<Excluded> {
    if !view.facts.ready {
        return Some(Excluded::Unfit(Unfit::NotReady));
    }
    if view.facts.unschedulable {
        return Some(Excluded::Unfit(Unfit::Cordoned));
    }
    match (&view.machine, now) {
        (None, _) => Some(Excluded::NoReport),
        (Some(Err(why)), _) => Some(Excluded::Report(why.clone())),
        (Some(Ok(machine)), Some(now)) => machine.observed.filter(|at| is_stale(*at, now)).map(Excluded::Stale),
        _ => None,
    }
}

/// GPUs outside the largest NVLink-connected set, if that set is most of the node. Separately
/// bridged pairs are normal.
fn unlinked(machine: &Machine) -> Vec<u32> {
    let sets = (1..=machine.shape.all()).filter(|set| machine.shape.link(*set) == MinLink::NVLink);
    let joined = sets.max_by_key(|set| set.count_ones()).unwrap_or(0);
    if 2 * joined.count_ones() as usize <= machine.gpus.len() {
        return Vec::new();
    }
    let gpus = machine.gpus.iter().enumerate().filter(|(position, _)| joined >> position & 1 == 0);
    gpus.map(|(_, gpu)| gpu.index).collect()
}

/// NICs of the kind that carries training traffic here, working or not.
fn all_nics(status: &GPUTopologyStatus, working: usize) -> usize {
    status.nics.iter().filter(|nic| is_rdma_port(nic)).count().max(working)
}

fn is_rdma_port(nic: &Nic) -> bool {
    nic.rdma_device.is_some() && nic.virtual_function_of.is_none()
}

fn nics_down(status: &GPUTopologyStatus) -> Vec<String> {
    let working = report::devices(status).map(|named| named.nics).unwrap_or_default();
    let down = status.nics.iter().enumerate().filter(|(number, nic)| is_rdma_port(nic) && !working.contains(number));
    down.filter_map(|(_, nic)| nic.rdma_device.clone()).collect()
}
