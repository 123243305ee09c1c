//! Converts a [`Matrix`] to a `GPUTopology`, as precisely as a matrix allows.
//!
//! A matrix has path classes where a `GPUTopology` has paths, so the paths are reconstructed
//! ([`super::tree`]). Addresses and UUIDs are made up, and `sources` says so. For two GPUs joined
//! by NVLink the matrix hides the PCIe path. It becomes the nearest path that other devices prove;
//! without proof the NUMA nodes decide. A pair that the result cannot represent exactly comes out
//! farther, never nearer, and is named in the warnings.

mod notes;

use super::matrix::Matrix;
use super::tree::{TooManyBuses, paths};
use notes::{Discrepancy, Notes};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::gpu_model::{self, GpuModel, MAX_LINKS};
use switchyard_core::path::{PathClass, path_class};
use switchyard_crds::gpu_topology::{
    Cpus, Facts, GPUTopology, GPUTopologySpec, GPUTopologyStatus, Gpu, Link, LinkKind, LinkVia, Nic, NumaNode,
    PathClass as Reported,
};
use switchyard_worker_contract::CpuList;

/// Characters of the node name used in a UUID, which a `GPUTopology` limits to 96 characters.
const MAX_NAME_IN_UUID: usize = 80;

/// Facts that a matrix does not contain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    pub name: String,
    /// Product name of the GPUs.
    pub gpu_model: Option<String>,
    pub rates: Vec<NicRate>,
}

/// The rate of one NIC, or of all NICs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicRate {
    /// Column or RDMA device; `None` for every NIC without its own rate.
    pub nic: Option<String>,
    /// One-way rate in megabits (10^6) per second.
    pub megabits_per_second: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    pub topology: GPUTopology,
    /// Warnings for the user, one line each.
    pub warnings: Vec<String>,
}

/// Why a matrix and its options do not yield a `GPUTopology`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// A rate for a NIC that the matrix does not have.
    #[error("got a rate for {got}; expected one of the NICs of the matrix: {expected}")]
    NoSuchNic {
        got: String,
        /// Valid names.
        expected: String,
    },
    /// A tree that exceeds PCI's bus numbers.
    #[error("{label}: {source}")]
    TooManyBuses { label: String, source: TooManyBuses },
}

/// Builds the `GPUTopology`.
///
/// # Errors
/// A rate for a NIC that the matrix does not have, or more devices below one root complex than PCI
/// can number.
pub fn import(matrix: &Matrix, options: &Options) -> Result<Imported, ImportError> {
    let with_numa = numa_by_cpus(matrix);
    let matrix = with_numa.as_ref().unwrap_or(matrix);
    let rates = rates(matrix, &options.rates)?;
    let paths = paths(matrix.devices(), |a, b| matrix.class(a, b))
        .map_err(|source| ImportError::TooManyBuses { label: matrix.label(source.device), source })?;
    let numa = numa_nodes_of_devices(matrix);
    let mut notes = Notes { numbered_by_cpus: with_numa.is_some(), pcie_only: matrix.pcie_only, ..Notes::default() };
    let assumed = rates.iter().filter(|rate| rate.is_none()).count();
    if assumed > 0 {
        notes.rates = Some(format!(
            "rates are unknown for {assumed} of {} NICs and assumed to be 10 Gbit/s: give them with --nic-gbps",
            rates.len()
        ));
    }
    let model = options.gpu_model.as_deref().map(|name| known_model(matrix, name, &mut notes));
    let class = |a: usize, b: usize| path_class(&paths[a], &paths[b], numa[a], numa[b]);

    let gpus: Vec<Gpu> = matrix
        .gpus
        .iter()
        .enumerate()
        .map(|(device, gpu)| Gpu {
            index: gpu.index,
            uuid: uuid(&options.name, gpu.index),
            bus_id: paths[device].last().cloned(),
            model: model.as_ref().map(|(name, _)| name.clone()),
            numa_node: numa[device],
            pcie_root: paths[device].first().cloned(),
            pcie_path: paths[device].clone(),
            ..Gpu::default()
        })
        .collect();
    // Keep column order so that NIC2 stays NIC2: nvidia-smi lists NICs by name.
    let nics: Vec<Nic> = matrix
        .nics
        .iter()
        .zip(rates)
        .zip(gpus.len()..)
        .map(|((nic, rate), device)| Nic {
            name: nic.name().to_owned(),
            bus_id: paths[device].last().cloned(),
            rdma_device: nic.device.clone(),
            rate_megabits_per_second: rate,
            numa_node: numa[device],
            pcie_path: paths[device].clone(),
            ..Nic::default()
        })
        .collect();
    let links = links(matrix, &gpus, model.and_then(|(_, model)| model), class);
    note_discrepancies(matrix, &numa, class, &mut notes);
    let numa_nodes = numa_nodes(matrix);
    let usable = CpuList::new(matrix.gpus.iter().filter_map(|gpu| gpu.cpus.as_ref()).flat_map(CpuList::iter));
    let status = GPUTopologyStatus {
        gpu_count: u32::try_from(gpus.len()).ok(),
        nic_count: u32::try_from(nics.len()).ok(),
        sources: notes.sources(matrix, &numa_nodes),
        cpus: (!usable.is_empty()).then(|| Cpus { usable: Some(usable.to_string()), ..Cpus::default() }),
        numa_nodes,
        gpus,
        links,
        nics,
        ..GPUTopologyStatus::default()
    };
    let mut topology = GPUTopology::new(&options.name, GPUTopologySpec {});
    topology.status = Some(status);
    Ok(Imported { topology, warnings: notes.warnings() })
}

fn uuid(node: &str, index: u32) -> String {
    let node: String = node.chars().take(MAX_NAME_IN_UUID).collect();
    format!("GPU-import-{node}-{index}")
}

fn rates(matrix: &Matrix, given: &[NicRate]) -> Result<Vec<Option<u64>>, ImportError> {
    let is = |nic: &super::matrix::Nic, name: &str| nic.label == name || nic.device.as_deref() == Some(name);
    for name in given.iter().filter_map(|rate| rate.nic.as_deref()) {
        if !matrix.nics.iter().any(|nic| is(nic, name)) {
            let names: Vec<&str> = matrix.nics.iter().map(super::matrix::Nic::name).collect();
            let expected = if names.is_empty() { "it has none".to_owned() } else { names.join(", ") };
            return Err(ImportError::NoSuchNic { got: name.to_owned(), expected });
        }
    }
    let rate = |nic: &super::matrix::Nic| {
        let own = given.iter().rev().find(|rate| rate.nic.as_deref().is_some_and(|name| is(nic, name)));
        let all = || given.iter().rev().find(|rate| rate.nic.is_none());
        own.or_else(all).map(|rate| rate.megabits_per_second)
    };
    Ok(matrix.nics.iter().map(rate).collect())
}

/// The matrix with NUMA nodes by the CPUs of its GPUs, numbered by their first CPU. Drivers before
/// about 440 print no NUMA affinity. `None` if there is one, or if two CPU lists overlap without
/// being equal.
fn numa_by_cpus(matrix: &Matrix) -> Option<Matrix> {
    if matrix.gpus.iter().any(|gpu| gpu.numa.is_some() || gpu.cpus.is_none()) {
        return None;
    }
    let mut lists: Vec<&CpuList> = matrix.gpus.iter().filter_map(|gpu| gpu.cpus.as_ref()).collect();
    lists.sort_by_key(|list| list.first());
    lists.dedup();
    let overlap = |(a, b): (usize, usize)| !lists[a].intersection(lists[b]).is_empty();
    if lists.is_empty() || pairs(lists.len()).any(overlap) {
        return None;
    }
    let node = |gpu: &super::matrix::Gpu| {
        let position = lists.iter().position(|list| Some(*list) == gpu.cpus.as_ref())?;
        Some(CpuList::new([u32::try_from(position).ok()?]))
    };
    let nodes: Vec<Option<CpuList>> = matrix.gpus.iter().map(node).collect();
    let mut matrix = matrix.clone();
    matrix.gpus.iter_mut().zip(nodes).for_each(|(gpu, node)| gpu.numa = node);
    Some(matrix)
}

/// The NUMA node of each device.
///
/// The text gives the NUMA nodes of GPUs. From a list the first one is used, because the others are
/// mostly GPU memory. A NIC belongs to the NUMA node of the devices to which it is NODE or nearer,
/// unless those are in several NUMA nodes or another device of that NUMA node is SYS to the NIC.
fn numa_nodes_of_devices(matrix: &Matrix) -> Vec<Option<u32>> {
    let mut numa: Vec<Option<u32>> = matrix.gpus.iter().map(|gpu| gpu.numa.as_ref()?.first()).collect();
    numa.resize(matrix.devices(), None);
    loop {
        let mut found = false;
        for nic in matrix.gpus.len()..matrix.devices() {
            let of = |wanted: &dyn Fn(PathClass) -> bool| -> BTreeSet<u32> {
                (0..numa.len())
                    .filter(|other| matrix.class(nic, *other).is_some_and(wanted))
                    .filter_map(|other| numa[other])
                    .collect()
            };
            if numa[nic].is_some() {
                continue;
            }
            let (near, far) = (of(&|class| class <= PathClass::Node), of(&|class| class == PathClass::Sys));
            if let (Some(node), 1) = (near.first(), near.len())
                && !far.contains(node)
            {
                numa[nic] = Some(*node);
                found = true;
            }
        }
        if !found {
            return numa;
        }
    }
}

/// The NUMA nodes that GPUs name, with their CPUs if all rows agree and no other NUMA node claims
/// them.
fn numa_nodes(matrix: &Matrix) -> Vec<NumaNode> {
    let mut lists: BTreeMap<u32, BTreeSet<Option<&CpuList>>> = BTreeMap::new();
    for gpu in &matrix.gpus {
        if let Some(node) = gpu.numa.as_ref().and_then(CpuList::first) {
            lists.entry(node).or_default().insert(gpu.cpus.as_ref());
        }
    }
    let agreed =
        |lists: &BTreeSet<Option<&CpuList>>| lists.first().filter(|_| lists.len() == 1).and_then(|list| list.cloned());
    let cpus: BTreeMap<u32, Option<CpuList>> = lists.iter().map(|(node, lists)| (*node, agreed(lists))).collect();
    let shared = |node: u32, list: &CpuList| {
        cpus.iter().any(|(other, cpus)| {
            *other != node && cpus.as_ref().is_some_and(|cpus| !cpus.intersection(list).is_empty())
        })
    };
    let own =
        |node: u32, list: &Option<CpuList>| list.as_ref().filter(|list| !shared(node, list)).map(CpuList::to_string);
    cpus.iter().map(|(node, list)| NumaNode { id: *node, cpus: own(*node, list), ..NumaNode::default() }).collect()
}

/// The spelling to use for the model, and the model's data if it agrees with the matrix.
fn known_model(matrix: &Matrix, name: &str, notes: &mut Notes) -> (String, Option<GpuModel>) {
    let Some(model) = gpu_model::find(name) else {
        notes.model = Some(format!("GPU model {name} is unknown, and so is the speed of its NVLinks"));
        return (name.to_owned(), None);
    };
    let most = pairs(matrix.gpus.len()).filter_map(|(a, b)| matrix.nvlinks(a, b)).max().unwrap_or_default();
    let spelled = if name.eq_ignore_ascii_case(model.name) { model.name.to_owned() } else { name.to_owned() };
    if most > model.links {
        let has = model.links;
        notes.model = Some(format!("the matrix has NV{most} and {spelled} has {has} NVLinks: speed left unknown"));
        return (spelled, None);
    }
    (spelled, Some(model))
}

/// Every pair of the first `count` devices, lower index first.
fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
}

fn links(
    matrix: &Matrix,
    gpus: &[Gpu],
    model: Option<GpuModel>,
    class: impl Fn(usize, usize) -> PathClass,
) -> Vec<Link> {
    let total = |gpu: usize| (0..gpus.len()).filter_map(|other| matrix.nvlinks(gpu, other)).sum::<u32>();
    // Direct links to all peers cannot exceed the GPU's link count.
    let most = model.map_or(MAX_LINKS, |model| model.links);
    let link = |(a, b): (usize, usize)| {
        let count = matrix.nvlinks(a, b);
        let stated = matrix.class(a, b);
        let via = |_| if total(a).max(total(b)) > most { LinkVia::Switch } else { LinkVia::Direct };
        Link {
            a: gpus[a].uuid.clone(),
            b: gpus[b].uuid.clone(),
            kind: if count.is_some() { LinkKind::NVLink } else { LinkKind::PCIe },
            count,
            via: count.map(via),
            megabytes_per_second: count.zip(model).map(|(count, model)| u64::from(count) * model.megabytes_per_link),
            path_class: stated.map(|stated| {
                let numa_unknown = gpus[a].numa_node.is_none() || gpus[b].numa_node.is_none();
                // Paths without NUMA nodes cannot express NODE; that does not contradict the
                // matrix.
                reported(if stated == PathClass::Node && numa_unknown { stated } else { stated.max(class(a, b)) })
            }),
        }
    };
    pairs(gpus.len()).map(link).collect()
}

fn reported(class: PathClass) -> Reported {
    match class {
        PathClass::Same | PathClass::Pix => Reported::PIX,
        PathClass::Pxb => Reported::PXB,
        PathClass::Phb => Reported::PHB,
        PathClass::Node => Reported::NODE,
        PathClass::Sys => Reported::SYS,
    }
}

/// Records every pair that the result represents differently from the matrix.
fn note_discrepancies(
    matrix: &Matrix,
    numa: &[Option<u32>],
    class: impl Fn(usize, usize) -> PathClass,
    notes: &mut Notes,
) {
    for (a, b) in pairs(matrix.devices()) {
        let Some(stated) = matrix.class(a, b) else { continue };
        let shown = class(a, b);
        let (label_a, label_b) = (matrix.label(a), matrix.label(b));
        let both_gpus = b < matrix.gpus.len();
        let discrepancy = if shown < stated {
            Discrepancy::Nearer
        } else if shown > stated && stated <= PathClass::Phb {
            Discrepancy::NotATree
        } else if shown > stated && numa[a].is_some() && numa[b].is_some() {
            Discrepancy::OtherNuma
        } else if shown > stated && !both_gpus {
            Discrepancy::NumaUnknown
        } else {
            continue;
        };
        let mut text = format!("{label_a}-{label_b}");
        if discrepancy == Discrepancy::NotATree {
            text = format!("{text} {} as {}", stated.word(), shown.word());
            if let Some((witness, to_a, to_b)) = witness(matrix, a, b) {
                let (to_a, to_b) = (to_a.word(), to_b.word());
                text = format!("{text}, since {witness} is {to_a} to {label_a} and {to_b} to {label_b}");
            }
        }
        notes.pair(discrepancy, if both_gpus { Facts::Links } else { Facts::NICs }, text);
    }
}

/// Finds a device that proves that two others are farther apart than the matrix says, with its path
/// classes to both.
fn witness(matrix: &Matrix, a: usize, b: usize) -> Option<(String, PathClass, PathClass)> {
    let stated = matrix.class(a, b)?;
    (0..matrix.devices()).filter(|c| *c != a && *c != b).find_map(|c| {
        let (to_a, to_b) = (matrix.class(c, a)?, matrix.class(c, b)?);
        // In a tree the two larger of three distances are equal.
        (to_a != to_b && to_a.max(to_b) > stated).then(|| (matrix.label(c), to_a, to_b))
    })
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
