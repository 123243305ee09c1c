//! A place for the whole gang: the nodes, the GPUs on them, the order of ranks, and why there; or why there is none.

use super::levels::Levels;
use super::machine::{Machine, NamedGpu};
use super::refusal::{self, NoPlace};
use super::sites::{Excluded, Need, Sites};
use super::view::NodeView;
use crate::job::{ValidJob, gpus};
use crate::objects::Defaults;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use switchyard_core::model::NodeOrd;
use switchyard_core::placement::gpus::ring::bits;
use switchyard_core::placement::gpus::{Group, Level, MOST_GPUS, MinLink, Placement, Pod, Request, UNLIMITED};
use switchyard_core::rates::gigabytes;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{self as api, DeviceAllocation, Limit, PlacedNode, PlacementStatus, TopologyMode, TrainJob};
use switchyard_worker_contract::CpuList;

/// Excluded nodes that are named in a reason.
const NAMED: usize = 3;

/// A job that wants a place, and where it may find one.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The job. `status.deviceAllocation` says how its pods get their GPUs, `status.placement` where they were before.
    pub job: &'a TrainJob,
    /// What it asks for.
    pub valid: &'a ValidJob,
    /// Settings of the operator.
    pub defaults: &'a Defaults,
    /// All nodes by name.
    pub nodes: &'a BTreeMap<String, NodeView>,
    /// Levels of domains that the operator knows.
    pub levels: &'a Levels,
    /// When it is asked: reports that nobody renews grow old.
    pub now: Timestamp,
}

/// A place for every pod of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// For the status of the job.
    pub status: PlacementStatus,
    /// Nodes that are left out, with the reason.
    pub excluded: Vec<(String, Excluded)>,
}

/// Chooses the nodes and the GPUs.
///
/// # Errors
/// Why there is no place, and the smallest changes with which there is one.
pub fn place(question: &Question<'_>) -> Result<Placed, NoPlace> {
    let Question { job, valid, nodes, levels, now, .. } = *question;
    let policy = &job.spec.topology_policy;
    let asked = valid.pod.gpus;
    let count = valid.request.nodes;
    let is_ignored = policy.mode == TopologyMode::Ignored;
    let allocation = job.status.as_ref().and_then(|status| status.device_allocation);
    let need = Need {
        spec: &valid.pod.spec,
        amounts: valid.pod.requests(job.status.as_ref()).without(GPU_RESOURCE),
        gpus: asked,
        allocation: allocation.filter(|_| asked > 0),
        now,
        reported_only: policy.mode == TopologyMode::Required && policy.node_topology.min_link != api::MinLink::System,
    };
    if asked as usize > MOST_GPUS {
        return Err(NoPlace::impossible(format!(
            "{GPU_RESOURCE}: got {asked} for each node; expected at most {MOST_GPUS}"
        )));
    }
    let open_policy = api::TopologyPolicy::default();
    let none = Levels::none();
    let (tree, policy) = if is_ignored { (&none, &open_policy) } else { (levels, policy) };
    let mut sites = Sites::of(nodes, tree, policy, &need);
    let mut request = Request {
        groups: vec![Group { pods: count, gpus: asked as u8 }],
        min_link: min_link(policy.node_topology.min_link),
        within: sites.tree.within,
        slices: None,
    };
    let (placement, note) = solve(question, &mut sites, &need, &mut request)?;
    // Of nodes that nobody describes no bandwidth is told.
    let is_known = sites.nodes.iter().any(|node| node.described().is_some());
    let best = if is_known { sites.empty().bandwidth(&request).unwrap_or(0) } else { 0 };
    let best = best.max(placement.bandwidth);
    let status = Told { question, sites: &sites, placement: &placement, best }.status(&need, note);
    let excluded = sites.nodes.iter().zip(&sites.excluded);
    let excluded = excluded.filter_map(|(node, why)| Some((node.facts.name.clone(), why.clone()?))).collect();
    Ok(Placed { status, excluded })
}

/// Finds the place, and says what was given up for it. Answers with the request as it was served.
fn solve(
    question: &Question<'_>,
    sites: &mut Sites<'_>,
    need: &Need<'_>,
    request: &mut Request,
) -> Result<(Placement, Option<String>), NoPlace> {
    let policy = &question.job.spec.topology_policy;
    let before = earlier(question.job, sites);
    if need.gpus == 0 && sites.open().any(|node| sites.nodes[node].gpus() > 0) {
        // Nodes with GPUs are for those that need them, as long as there are others.
        if let Ok(placement) = sites.without_gpus().repair(request, &before) {
            return Ok((placement, None));
        }
    }
    let mut fleet = sites.fleet();
    let refused = match fleet.repair(request, &before) {
        Ok(placement) => return Ok((placement, None)),
        Err(refused) => refused,
    };
    let loose = Request { min_link: MinLink::System, ..request.clone() };
    if policy.mode == TopologyMode::Preferred
        && request.min_link != MinLink::System
        && let Ok(placement) = fleet.repair(&loose, &before)
    {
        *request = loose;
        let (link, count) = (policy.node_topology.min_link, question.valid.request.nodes);
        return Ok((placement, Some(format!("minLink {link:?} is given up: no {count} nodes have it free"))));
    }
    Err(refusal::explain(question, sites, &mut fleet, need, request, &refused))
}

/// The slowest link that a ring may contain, in the words of placement.
fn min_link(link: api::MinLink) -> MinLink {
    match link {
        api::MinLink::NVLink => MinLink::NVLink,
        api::MinLink::PCIeSwitch => MinLink::PCIeSwitch,
        api::MinLink::PCIeHost => MinLink::PCIeHost,
        api::MinLink::NUMA => MinLink::Numa,
        api::MinLink::System => MinLink::System,
    }
}

/// Where the pods were before, in the order of ranks.
fn earlier(job: &TrainJob, sites: &Sites<'_>) -> Vec<(Option<NodeOrd>, u32)> {
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let of_node = |placed: &PlacedNode| {
        // Nodes are in the order of their names.
        let position = sites.nodes.binary_search_by(|node| node.facts.name.cmp(&placed.node_name)).ok();
        let machine = position.and_then(|position| sites.nodes[position].described());
        let set = machine.map_or(0, |machine| machine.mask(placed.gpus.iter().map(String::as_str)));
        (position.map(|position| NodeOrd(position as u32)), set)
    };
    placement.iter().flat_map(|placement| placement.nodes.iter().map(of_node)).collect()
}

/// A placement in the words of the API.
struct Told<'a> {
    question: &'a Question<'a>,
    sites: &'a Sites<'a>,
    placement: &'a Placement,
    best: u32,
}

impl Told<'_> {
    fn status(&self, need: &Need<'_>, note: Option<String>) -> PlacementStatus {
        let per_node = self.question.valid.request.processes_per_node;
        let nodes = (0..).zip(&self.placement.pods).map(|(rank, pod)| self.node(rank * per_node, pod));
        let nodes: Vec<PlacedNode> = nodes.collect();
        let is_known = self.is_known();
        let quantity = |megabytes: u32| {
            let (amount, unit) =
                if megabytes.is_multiple_of(1000) { (megabytes / 1000, "G") } else { (megabytes, "M") };
            (is_known && megabytes != UNLIMITED).then(|| Quantity(format!("{amount}{unit}")))
        };
        let mut reason = self.reason(need, is_known);
        for note in note.into_iter().chain(self.better()) {
            reason.push_str("; ");
            reason.push_str(&note);
        }
        PlacementStatus {
            reason: reason.chars().take(1024).collect(),
            nodes,
            predicted_bus_bandwidth: quantity(self.placement.bandwidth),
            best_possible: quantity(self.best),
            limited_by: quantity(self.placement.bandwidth).map(|_| self.limit()),
        }
    }

    fn node(&self, first_rank: u32, pod: &Pod) -> PlacedNode {
        let node = self.sites.nodes[pod.node.0 as usize];
        let machine = node.described().filter(|_| pod.set != 0);
        let gpus = pod.gpus.iter().filter_map(|gpu| machine?.gpus.get(usize::from(*gpu)));
        let mut numa_nodes: Vec<i32> = gpus.clone().filter_map(|gpu| Some(gpu.numa_node? as i32)).collect();
        numa_nodes.sort_unstable();
        numa_nodes.dedup();
        let cpus = self.cpus(gpus.clone());
        PlacedNode {
            first_rank: first_rank as i32,
            node_name: node.facts.name.clone(),
            cpus,
            gpus: gpus.map(|gpu| gpu.uuid.clone()).collect(),
            nics: self.nics(pod).map(str::to_string).collect(),
            numa_nodes,
        }
    }

    /// CPUs of each process: those of its GPUs. Empty where a process shares a GPU, or the cores of one are not known.
    fn cpus<'a>(&self, gpus: impl Iterator<Item = &'a NamedGpu>) -> Vec<String> {
        let gpus: Vec<&NamedGpu> = gpus.collect();
        let processes = self.question.valid.request.processes_per_node as usize;
        if gpus.is_empty() || !gpus.len().is_multiple_of(processes) {
            return Vec::new();
        }
        let of_process = |own: &[&NamedGpu]| {
            let lists: Option<Vec<&CpuList>> = own.iter().map(|gpu| gpu.cpus.as_ref()).collect();
            Some(CpuList::new(lists?.into_iter().flat_map(|list| list.iter())).to_string())
        };
        gpus.chunks(gpus.len() / processes).map(of_process).collect::<Option<_>>().unwrap_or_default()
    }

    /// Names of the NICs that a pod with GPUs uses.
    fn nics(&self, pod: &Pod) -> impl Iterator<Item = &str> {
        let machine = self.sites.nodes[pod.node.0 as usize].described().filter(|_| pod.set != 0);
        let rails = self.sites.shape(pod.node.0 as usize).rails[pod.set as usize];
        let names = machine.map(|machine| machine.nics.as_slice()).unwrap_or_default().iter().enumerate();
        names.filter(move |(nic, _)| *nic < 64 && rails >> nic & 1 == 1).map(|(_, name)| name.as_str())
    }

    /// Whether the figures say anything: some node of the job is described.
    fn is_known(&self) -> bool {
        self.placement.pods.iter().any(|pod| self.sites.nodes[pod.node.0 as usize].described().is_some())
    }

    fn weakest(&self) -> &Pod {
        let weakest = self.placement.pods.iter().min_by_key(|pod| pod.ring.min(pod.outward));
        weakest.expect("invariant: a gang has pods")
    }

    fn limit(&self) -> Limit {
        let pod = self.weakest();
        if pod.ring <= pod.outward {
            return Limit::Ring;
        }
        let level = self.placement.level.map(|level| self.sites.tree.levels[level]);
        let injection = self.sites.shape(pod.node.0 as usize).injection[pod.set as usize];
        match level {
            Some(level) if level.nvlink && pod.outward > injection => Limit::NVLinkDomain,
            Some(level) if level.share < 1000 => Limit::Domain,
            _ => Limit::NICs,
        }
    }

    fn reason(&self, need: &Need<'_>, is_known: bool) -> String {
        let Placement { pods, bandwidth, .. } = self.placement;
        let first = self.sites.nodes[pods[0].node.0 as usize];
        let count = pods.len();
        if need.gpus == 0 {
            let all = self.sites.open().count();
            let mut text = format!("{count} of {all} node{} with room for {}", plural(all), need.amounts);
            text.push_str(&self.domains().unwrap_or_else(|| ", in the order of their names".into()));
            if is_known && *bandwidth != UNLIMITED {
                text.push_str(&format!("; {} GB/s between them", gigabytes(*bandwidth)));
            }
            return text;
        }
        let ranks = self.question.valid.request.processes_per_node as usize * count;
        let mut text = format!("{ranks} rank{} on ", plural(ranks));
        if count == 1 {
            text.push_str(&first.facts.name);
        } else {
            text.push_str(&format!("{count} nodes x {} GPU{}", need.gpus, plural(need.gpus as usize)));
        }
        text.push_str(&self.domains().unwrap_or_default());
        if let Some(machine) = first.described().filter(|_| count == 1) {
            let indices = pods[0].gpus.iter().filter_map(|gpu| machine.gpus.get(usize::from(*gpu)));
            let indices: Vec<u32> = indices.map(|gpu| gpu.index).collect();
            text.push_str(&format!(", GPU{} {}", plural(indices.len()), ranges(indices)));
        }
        if !is_known {
            text.push_str("; no GPUTopology describes them, so the bandwidth is not known");
            return text;
        }
        let weakest = self.weakest();
        if weakest.ring != UNLIMITED {
            let machine = self.sites.shape(weakest.node.0 as usize);
            let word = if machine.link(weakest.set) == MinLink::NVLink { "NVLink" } else { "PCIe" };
            text.push_str(&format!("; {word} ring {} GB/s", gigabytes(weakest.ring)));
        }
        if weakest.outward != UNLIMITED {
            let names: Vec<&str> = self.nics(weakest).collect();
            let over = if names.is_empty() { String::new() } else { format!(" over {}", names.join(",")) };
            text.push_str(&format!("; out of each node {} GB/s{over}", gigabytes(weakest.outward)));
        }
        if *bandwidth != UNLIMITED {
            let by = match self.limit() {
                Limit::Ring => "the ring inside a node",
                Limit::NICs => "the NICs",
                Limit::Domain => "what the domain lets through",
                Limit::NVLinkDomain => "the NVLink domain",
            };
            text.push_str(&format!(
                "; bound by {by} at {} GB/s, best possible {}",
                gigabytes(*bandwidth),
                gigabytes(self.best)
            ));
        }
        text
    }

    /// In which domains the gang is; `None`: no node has a label of a domain.
    fn domains(&self) -> Option<String> {
        let tree = &self.sites.tree;
        let level = self.placement.level.unwrap_or_default();
        let node = self.placement.pods[0].node.0 as usize;
        if let Some(name) = tree.domain(node, level) {
            return Some(format!(" in {} {name}", tree.keys[level]));
        }
        let parts = (0..tree.keys.len() - 1).rev().find(|level| tree.domain(node, *level).is_some())?;
        let used = self.placement.domains[parts];
        (used > 1).then(|| format!(" in {used} domains of {}", tree.keys[parts]))
    }

    /// Nodes that are left out and could give more.
    fn better(&self) -> Option<String> {
        let level = self.placement.level.map(|level| self.sites.tree.levels[level]);
        let gpus = self.weakest().set.count_ones() as u8;
        if gpus == 0 || self.best <= self.placement.bandwidth {
            return None;
        }
        let is_better = |node: &usize| {
            let machine = self.sites.nodes[*node].described();
            let shape = self.sites.shape(*node);
            let set = machine.and_then(|machine| shape.best_set(machine.usable, gpus, level));
            set.is_some_and(|set| shape.value(set, level, MinLink::System) > self.placement.bandwidth)
        };
        let left_out = (0..self.sites.nodes.len()).filter(|node| self.sites.excluded[*node].is_some());
        let better: Vec<usize> = left_out.filter(is_better).collect();
        if better.is_empty() {
            return None;
        }
        let name = |node: &usize| {
            let why = self.sites.excluded[*node].as_ref().map(ToString::to_string).unwrap_or_default();
            format!("{} ({why})", self.sites.nodes[*node].facts.name)
        };
        let names: Vec<String> = better.iter().take(NAMED).map(name).collect();
        let dots = if better.len() > NAMED { ", …" } else { "" };
        Some(format!("{} better node{} left out: {}{dots}", better.len(), plural_are(better.len()), names.join(", ")))
    }
}

pub(super) fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn plural_are(count: usize) -> &'static str {
    if count == 1 { " is" } else { "s are" }
}

/// `0-3,6`.
fn ranges(mut numbers: Vec<u32>) -> String {
    numbers.sort_unstable();
    let mut text = String::new();
    for run in numbers.chunk_by(|a, b| a + 1 == *b) {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(&run[0].to_string());
        if run.len() > 1 {
            text.push_str(&format!("-{}", run[run.len() - 1]));
        }
    }
    text
}

/// Thousandths of the plan's value below which other GPUs are a loss worth telling.
const AS_GOOD: u64 = 950;

/// What a pod of a gang of `pods` has instead of the plan's GPUs, and what that costs; `None`: they are as good, or one of the two is not
/// known.
pub(super) fn compare(machine: &Machine, pods: usize, planned: &[String], actual: &[String]) -> Option<String> {
    let mask = |uuids: &[String]| machine.mask(uuids.iter().map(String::as_str));
    let (planned, actual) = (mask(planned), mask(actual));
    // A pod by itself sends nothing to others.
    let reach = (pods > 1).then_some(Level { share: 1000, nvlink: false });
    let value = |set: u32| machine.shape.value(set, reach, MinLink::System);
    let (wanted, got) = (value(planned), value(actual));
    let is_known = planned != 0 && actual != 0;
    if planned == actual || !is_known || u64::from(got) * 1000 >= u64::from(wanted) * AS_GOOD {
        return None;
    }
    let names = |set: u32| ranges(bits(set).filter_map(|gpu| Some(machine.gpus.get(gpu)?.index)).collect());
    Some(format!(
        "GPUs {} in place of {}: {} GB/s in place of {}",
        names(actual),
        names(planned),
        gigabytes(got),
        gigabytes(wanted)
    ))
}

/// How the pods of a new attempt get their GPUs: by claims where at least as many nodes offer them as have the extended resource.
pub fn allocation(job: &TrainJob, nodes: &BTreeMap<String, NodeView>) -> Option<DeviceAllocation> {
    if gpus(job) == 0 {
        return None;
    }
    let offering = nodes.values().filter(|node| node.offered.is_some()).count();
    let counting = nodes.values().filter(|node| node.allocatable.get(GPU_RESOURCE) > 0).count();
    let claims = offering > 0 && offering >= counting;
    Some(if claims { DeviceAllocation::Claims } else { DeviceAllocation::DevicePlugin })
}

/// The other way to GPUs, where no node gives any in the way of this attempt: its pods were made before there was a driver, or
/// while all drivers were away.
pub fn other_allocation(job: &TrainJob, nodes: &BTreeMap<String, NodeView>) -> Option<DeviceAllocation> {
    let chosen = job.status.as_ref()?.device_allocation?;
    let is_given = |way| {
        nodes.values().any(|node| match way {
            DeviceAllocation::Claims => node.offered.is_some(),
            DeviceAllocation::DevicePlugin => node.allocatable.get(GPU_RESOURCE) > 0,
        })
    };
    allocation(job, nodes).filter(|now| *now != chosen && is_given(*now) && !is_given(chosen))
}

#[cfg(test)]
mod tests;
