//! Converts a placement to API types: nodes, figures, and the reason for the choice.

use crate::cluster::candidates::Candidates;
use crate::cluster::demand::GangDemand;
use crate::cluster::excluded::Excluded;
use crate::cluster::machine::NamedGpu;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use switchyard_core::placement::gpus::{Level, MinLink, Placement, Pod, UNLIMITED};
use switchyard_core::rates::gigabytes;
use switchyard_core::units::plural;
use switchyard_crds::{Limit, NodeShape, PlacedNode, PlacementStatus};
use switchyard_worker_contract::CpuList;

/// Maximum number of excluded nodes that a reason names.
const NAMED_NODES: usize = 3;

/// A placement to be converted to API types.
pub(super) struct PlacementStatusBuilder<'a> {
    pub demand: &'a GangDemand<'a>,
    pub candidates: &'a Candidates<'a>,
    pub placement: &'a Placement,
    /// Bandwidth of the best placement in the empty cluster, in MB/s.
    pub best: u32,
}

impl PlacementStatusBuilder<'_> {
    /// `notes` follow the reason.
    pub fn status(&self, notes: impl IntoIterator<Item = String>) -> PlacementStatus {
        let per_node = self.demand.request.valid.request.processes_per_node;
        let nodes = (0..).zip(&self.placement.pods).map(|(rank, pod)| self.node(rank * per_node, pod));
        let nodes: Vec<PlacedNode> = nodes.collect();
        let is_known = self.is_known();
        let quantity = |megabytes: u32| {
            let (amount, unit) =
                if megabytes.is_multiple_of(1000) { (megabytes / 1000, "G") } else { (megabytes, "M") };
            (is_known && megabytes != UNLIMITED).then(|| Quantity(format!("{amount}{unit}")))
        };
        let mut reason = self.reason(is_known);
        for note in notes.into_iter().chain(self.unused_links()).chain(self.better()).chain(self.avoided()) {
            reason.push_str("; ");
            reason.push_str(&note);
        }
        PlacementStatus {
            reason: reason.chars().take(1024).collect(),
            nodes,
            slices: None,
            predicted_bus_bandwidth: quantity(self.placement.bandwidth),
            best_possible: quantity(self.best),
            limited_by: quantity(self.placement.bandwidth).map(|_| self.limit()),
        }
    }

    fn node(&self, first_rank: u32, pod: &Pod) -> PlacedNode {
        let node = self.candidates.nodes[pod.node.0 as usize];
        let machine = node.described().filter(|_| pod.set != 0);
        let gpus = pod.gpus.iter().filter_map(|gpu| machine?.gpus.get(usize::from(*gpu)));
        let mut numa_nodes: Vec<i32> = gpus.clone().filter_map(|gpu| Some(gpu.numa_node? as i32)).collect();
        numa_nodes.sort_unstable();
        numa_nodes.dedup();
        let cpus = self.cpus(gpus.clone());
        PlacedNode {
            first_rank: first_rank as i32,
            node_name: node.facts.name.clone(),
            gpus: gpus.map(|gpu| gpu.uuid.clone()).collect(),
            shape: NodeShape { cpus, nics: self.nics(pod).map(str::to_string).collect(), numa_nodes },
        }
    }

    /// CPUs of each process: the cores assigned to its GPUs. Empty if processes share a GPU, or if
    /// the cores of a GPU are unknown.
    fn cpus<'a>(&self, gpus: impl Iterator<Item = &'a NamedGpu>) -> Vec<String> {
        let gpus: Vec<&NamedGpu> = gpus.collect();
        let processes = self.demand.request.valid.request.processes_per_node as usize;
        if gpus.is_empty() || !gpus.len().is_multiple_of(processes) {
            return Vec::new();
        }
        let process_cpus = |own: &[&NamedGpu]| {
            let lists: Option<Vec<&CpuList>> = own.iter().map(|gpu| gpu.cpus.as_ref()).collect();
            Some(CpuList::new(lists?.into_iter().flat_map(|list| list.iter())).to_string())
        };
        gpus.chunks(gpus.len() / processes).map(process_cpus).collect::<Option<_>>().unwrap_or_default()
    }

    /// Names of the NICs that a pod with GPUs uses.
    fn nics(&self, pod: &Pod) -> impl Iterator<Item = &str> {
        let machine = self.candidates.nodes[pod.node.0 as usize].described().filter(|_| pod.set != 0);
        let rails = self.candidates.shape(pod.node.0 as usize).rails[pod.set as usize];
        let names = machine.map(|machine| machine.nics.as_slice()).unwrap_or_default().iter().enumerate();
        names.filter(move |(nic, _)| *nic < 64 && rails >> nic & 1 == 1).map(|(_, name)| name.as_str())
    }

    /// Whether the figures are meaningful: at least one node of the job has a report.
    fn is_known(&self) -> bool {
        self.placement.pods.iter().any(|pod| self.candidates.nodes[pod.node.0 as usize].described().is_some())
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
        let level = self.placement.level.map(|level| self.candidates.tree.levels[level]);
        let injection = self.candidates.shape(pod.node.0 as usize).injection[pod.set as usize];
        match level {
            Some(level) if level.nvlink && pod.outward > injection => Limit::NVLinkDomain,
            Some(level) if level.share < 1000 => Limit::Domain,
            _ => Limit::NICs,
        }
    }

    fn reason(&self, is_known: bool) -> String {
        let Placement { pods, bandwidth, .. } = self.placement;
        let first = self.candidates.nodes[pods[0].node.0 as usize];
        let count = pods.len();
        if self.demand.gpus() == 0 {
            let all = self.candidates.open().count();
            let mut text =
                format!("{count} of {all} node{} with room for {}", plural(all as u64), self.demand.pod.amounts);
            text.push_str(&self.domains().unwrap_or_else(|| ", ordered by name".into()));
            if is_known && *bandwidth != UNLIMITED {
                text.push_str(&format!("; {} GB/s between them", gigabytes(*bandwidth)));
            }
            return text;
        }
        let ranks = self.demand.request.valid.request.processes_per_node as usize * count;
        let mut text = format!("{ranks} rank{} on ", plural(ranks as u64));
        if count == 1 {
            text.push_str(&first.facts.name);
        } else {
            text.push_str(&format!("{count} nodes x {} GPU{}", self.demand.gpus(), plural(self.demand.gpus().into())));
        }
        text.push_str(&self.domains().unwrap_or_default());
        if let Some(machine) = first.described().filter(|_| count == 1) {
            let indices = pods[0].gpus.iter().filter_map(|gpu| machine.gpus.get(usize::from(*gpu)));
            let indices: Vec<u32> = indices.map(|gpu| gpu.index).collect();
            text.push_str(&format!(", GPU{} {}", plural(indices.len() as u64), ranges(indices)));
        }
        if !is_known {
            text.push_str("; no GPUTopology describes them, so the bandwidth is unknown");
            return text;
        }
        let weakest = self.weakest();
        if weakest.ring != UNLIMITED {
            let machine = self.candidates.shape(weakest.node.0 as usize);
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
                Limit::Domain => "the domain boundary",
                Limit::NVLinkDomain => "the NVLink domain",
                Limit::Unknown => "a limit that this version does not know",
            };
            text.push_str(&format!(
                "; bound by {by} at {} GB/s, best possible {}",
                gigabytes(*bandwidth),
                gigabytes(self.best)
            ));
        }
        text
    }

    /// Domains that contain the gang, `None` if no node has a domain label.
    fn domains(&self) -> Option<String> {
        let tree = &self.candidates.tree;
        let level = self.placement.level.unwrap_or_default();
        let node = self.placement.pods[0].node.0 as usize;
        if let Some(name) = tree.domain(node, level) {
            return Some(format!(" in {} {name}", tree.keys[level]));
        }
        let parts = (0..tree.keys.len() - 1).rev().find(|level| tree.domain(node, *level).is_some())?;
        let used = self.placement.domains[parts];
        (used > 1).then(|| format!(" in {used} domains of {}", tree.keys[parts]))
    }

    /// Says that NVLink joins the nodes and would carry more than their NICs, but these pods cannot
    /// use it.
    fn unused_links(&self) -> Option<String> {
        let level = self.placement.level.filter(|level| self.candidates.tree.unused.contains(level))?;
        let (pod, level) = (self.weakest(), self.candidates.tree.levels[level]);
        let with = self.candidates.shape(pod.node.0 as usize).outward(pod.set, Some(Level { nvlink: true, ..level }));
        (pod.set != 0 && with > pod.outward).then(|| {
            format!(
                "NVLink between them ({} GB/s) does not count: the pods claim no channel of a ComputeDomain \
                 (spec.template.spec.resourceClaims)",
                gigabytes(with)
            )
        })
    }

    /// Excluded nodes that could provide more bandwidth.
    fn better(&self) -> Option<String> {
        let level = self.placement.level.map(|level| self.candidates.tree.levels[level]);
        let gpus = self.weakest().set.count_ones() as u8;
        if gpus == 0 || self.best <= self.placement.bandwidth {
            return None;
        }
        let is_better = |node: usize| {
            let machine = self.candidates.nodes[node].described();
            let shape = self.candidates.shape(node);
            let set = machine.and_then(|machine| shape.best_set(machine.usable, gpus, level));
            set.is_some_and(|set| shape.value(set, level, MinLink::System) > self.placement.bandwidth)
        };
        let better = self.excluded_where(|node, why| !matches!(why, Excluded::Avoided(_)) && is_better(node));
        (!better.is_empty()).then(|| {
            let are = if better.len() == 1 { " is" } else { "s are" };
            format!("{} better node{are} left out: {}", better.len(), self.names(&better))
        })
    }

    /// Nodes that are avoided because of earlier failures of this job or other jobs, whether they
    /// are better or not.
    fn avoided(&self) -> Option<String> {
        let nodes = self.excluded_where(|_, why| matches!(why, Excluded::Avoided(_)));
        (!nodes.is_empty()).then(|| {
            let are = if nodes.len() == 1 { " is" } else { "s are" };
            format!("{} node{are} avoided: {}", nodes.len(), self.names(&nodes))
        })
    }

    /// Excluded nodes whose reason matches.
    fn excluded_where(&self, matches: impl Fn(usize, &Excluded) -> bool) -> Vec<(usize, &Excluded)> {
        let nodes = self.candidates.excluded.iter().enumerate().filter_map(|(node, why)| Some((node, why.as_ref()?)));
        nodes.filter(|(node, why)| matches(*node, why)).collect()
    }

    fn names(&self, nodes: &[(usize, &Excluded)]) -> String {
        let name = |(node, why): &(usize, &Excluded)| format!("{} ({why})", self.candidates.nodes[*node].facts.name);
        let names: Vec<String> = nodes.iter().take(NAMED_NODES).map(name).collect();
        names.join(", ") + if nodes.len() > NAMED_NODES { ", …" } else { "" }
    }
}

/// `0-3,6`.
pub(super) fn ranges(mut numbers: Vec<u32>) -> String {
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
