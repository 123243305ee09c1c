//! Predicts what NCCL will do between the ranks of a gang, from reports alone: the path between any
//! two GPUs, the NIC of each, with or without GPUDirect RDMA, and the rates.
//!
//! Paths, rates and the NIC selection are NCCL's own ([`switchyard_topology::nccl`],
//! [`switchyard_core::rates`]). Rates are one-way, in MB/s; unknown rates are absent. Not covered:
//! users' `NCCL_*` variables, and the switches between nodes beyond the share of a level.

mod text;

use std::collections::BTreeSet;
use switchyard_core::devices::Devices;
use switchyard_core::placement::gpus::Level;
use switchyard_crds::gpu_topology::{DmaBuf, Facts, GPUTopologyStatus, ModuleState, SourceState};
use switchyard_topology::nccl::{self, NcclPath, NcclPaths};
use switchyard_topology::report::{self, ReportError};

pub use text::lines;

/// A node of a gang. Ranks count over all members, in order.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    pub node: &'a str,
    /// Report of its agent.
    pub status: &'a GPUTopologyStatus,
    /// GPUs in rank order, by position in the report.
    pub gpus: &'a [usize],
}

/// Why no forecast is possible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForecastError {
    /// The report contradicts itself.
    #[error("GPUTopology {node}: {source}")]
    Report { node: String, source: ReportError },
    /// A GPU that is missing from the report, or assigned to two ranks.
    #[error("node {node}: got GPU {gpu}: expected each of {count} GPUs at most once")]
    Gpu {
        node: String,
        /// Requested position.
        gpu: usize,
        /// Number of GPUs in the report.
        count: usize,
    },
}

/// Forecast for a gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forecast {
    /// Nodes in rank order. Equal nodes are one entry.
    pub nodes: Vec<NodeForecast>,
    /// Forecast for the gang as a whole.
    pub summary: Summary,
}

/// Nodes with equal predictions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeForecast {
    pub names: Vec<String>,
    pub first_ranks: Vec<u32>,
    pub paths: NodePaths,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePaths {
    /// How each rank leaves the node.
    pub exits: Vec<Exit>,
    /// Paths between any two of its ranks, row-major.
    pub pairs: Vec<Pair>,
    /// Interface for TCP if no NIC supports RDMA: that of the default route.
    pub interface: Option<String>,
    /// Total rate of all its ranks to other nodes; `None` without a NIC.
    pub outward: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    pub path: NcclPath,
    /// How NCCL moves the data.
    pub transport: IntraNode,
    /// Rate, if known.
    pub rate: Option<u32>,
}

/// Transport between two ranks of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum IntraNode {
    /// GPU to GPU over NVLink.
    NvLink,
    /// GPU to GPU over NVLink-C2C.
    C2c,
    /// GPU to GPU over PCIe.
    Pcie,
    /// Through host memory (NCCL's SHM).
    Host,
}

/// How a rank leaves its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// NVML index of its GPU.
    pub gpu: u32,
    /// NICs that NCCL assigns to it, first channel first. Empty if no NIC is known.
    pub nics: Vec<String>,
    /// Path to the first NIC; `None` without a NIC.
    pub path: Option<NcclPath>,
    /// Local rank of the GPU that relays (PXN).
    pub relay: Option<usize>,
    /// Whether the NIC accesses GPU memory directly.
    pub direct: Direct,
    /// Rate of the rank by itself; ranks with the same NIC share its rate. `None` without a NIC.
    pub rate: Option<u32>,
}

/// Whether a NIC accesses the memory of a GPU directly (GPUDirect RDMA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direct {
    Yes,
    /// Unknown whether the required modules are loaded.
    Unknown,
    /// Neither nvidia-peermem nor DMA-BUF is available.
    NoModule,
    /// The path is longer than NCCL allows.
    TooFar,
    /// Unknown whether the NIC supports RDMA.
    RdmaUnknown,
    /// The NIC does not support RDMA, or there is none.
    NoRdma,
}

/// Summary of a gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Transports inside nodes, best first; empty if no node has two ranks.
    pub within: Vec<IntraNode>,
    /// Transport between nodes; `None` for a single node.
    pub between: Option<InterNode>,
    /// Slowest path of any rank.
    pub slowest: Option<Slowest>,
    /// Lowest rate of any node to the others, scaled by the level's share; `None` for a single
    /// node, or if a node's rate is unknown.
    pub outward: Option<u32>,
}

/// Transport between nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterNode {
    /// NVLink, because the nodes are in one NVLink domain.
    NvLink,
    Rdma {
        /// What holds for every rank: the worst of all ranks.
        direct: Direct,
        /// The best of any rank.
        best: Direct,
        /// Number of NICs in use on the node with the fewest.
        nics: usize,
    },
    /// RDMA or TCP: unknown.
    Unknown,
    Tcp {
        /// Interface, if it is known and the same on all nodes.
        interface: Option<String>,
    },
}

/// A path of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slowest {
    pub rank: u32,
    pub to: Target,
    pub path: NcclPath,
    pub rate: u32,
}

/// The other end of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A rank on the same node.
    Rank(u32),
    Nic(String),
}

/// Predicts what NCCL does in a gang. `level` is the smallest domain that contains the nodes;
/// `None` if no level slows them down.
///
/// # Errors
/// A report contradicts itself, or lacks a GPU.
pub fn forecast(members: &[Member<'_>], level: Option<Level>) -> Result<Forecast, ForecastError> {
    let mut nodes: Vec<NodeForecast> = Vec::new();
    let mut next = 0;
    for member in members {
        let (first, paths) = (next, node(member)?);
        next += u32::try_from(member.gpus.len()).unwrap_or(u32::MAX);
        match nodes.iter_mut().find(|known| known.paths == paths) {
            Some(known) => {
                known.names.push(member.node.to_string());
                known.first_ranks.push(first);
            }
            None => nodes.push(NodeForecast { names: vec![member.node.to_string()], first_ranks: vec![first], paths }),
        }
    }
    let summary = summary(&nodes, members.len(), level);
    Ok(Forecast { nodes, summary })
}

fn node(member: &Member<'_>) -> Result<NodePaths, ForecastError> {
    let status = member.status;
    let name = || member.node.to_string();
    let named = report::devices(status).map_err(|source| ForecastError::Report { node: name(), source })?;
    let count = named.devices.gpus.len();
    let mut sorted = member.gpus.to_vec();
    sorted.sort_unstable();
    let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    if let Some(gpu) = twice.or(sorted.last().copied().filter(|last| *last >= count)) {
        return Err(ForecastError::Gpu { node: name(), gpu, count });
    }
    // NCCL numbers GPUs in machine order, independently of the rank order.
    let devices = named.devices.only(&sorted);
    let coherent = sorted.iter().enumerate().filter(|(_, gpu)| nccl::is_coherent(&status.gpus[**gpu]));
    let paths = NcclPaths::new(&devices, coherent.fold(0, |mask, (place, _)| mask | 1 << place));
    let rank_gpus = member.gpus.iter().map(|gpu| sorted.partition_point(|other| other < gpu)).collect();
    Ok(Node { status, nics: &named.nics, gpus: &sorted, devices: &devices, paths, rank_gpus }.paths())
}

/// A node as NCCL sees it. GPUs are counted in machine order, without those that have no rank.
struct Node<'a> {
    status: &'a GPUTopologyStatus,
    /// For each NIC, its position in the report.
    nics: &'a [usize],
    /// For each GPU, its position in the report.
    gpus: &'a [usize],
    devices: &'a Devices,
    paths: NcclPaths<'a>,
    /// The GPU of each rank.
    rank_gpus: Vec<usize>,
}

impl Node<'_> {
    fn paths(&self) -> NodePaths {
        let vendor = self.status.cpus.as_ref().and_then(|cpus| cpus.vendor.as_deref());
        let is_amd_pair = self.gpus.len() <= 2 && vendor == Some("AuthenticAMD");
        let pair = |a: usize, b: usize| {
            let path = self.paths.gpus(a, b);
            Pair { path, transport: IntraNode::of(path, is_amd_pair), rate: self.paths.gpu_rate(a, b) }
        };
        let exits: Vec<Exit> = self.rank_gpus.iter().map(|place| self.exit(*place)).collect();
        let is_rdma = self.nics.iter().any(|nic| self.status.nics[*nic].rdma_device.is_some());
        let route = self.status.host.as_ref().and_then(|host| host.default_route.clone());
        let used: BTreeSet<usize> = self.rank_gpus.iter().flat_map(|place| self.paths.nics(*place)).collect();
        let of_nics = used.iter().map(|nic| self.devices.nics[*nic].rate).fold(0, u32::saturating_add);
        let of_ranks = exits.iter().filter_map(|exit| exit.rate).fold(0, u32::saturating_add);
        NodePaths {
            pairs: self.rank_gpus.iter().flat_map(|a| self.rank_gpus.iter().map(|b| pair(*a, *b))).collect(),
            exits,
            interface: route.filter(|_| !is_rdma),
            outward: (!used.is_empty()).then(|| of_nics.min(of_ranks)),
        }
    }

    fn exit(&self, place: usize) -> Exit {
        let gpu = self.status.gpus[self.gpus[place]].index;
        let nics = self.paths.nics(place);
        let Some(first) = nics.first().copied() else {
            return Exit { gpu, nics: vec![], path: None, relay: None, direct: Direct::NoRdma, rate: None };
        };
        let relay = self.paths.relay(place, first);
        let near = relay.unwrap_or(place);
        let to_relay = relay.map_or(u32::MAX, |relay| self.devices.nvlink_rate(place, relay));
        let of_nics = nics.iter().map(|nic| self.devices.nic_rate(near, *nic)).fold(0, u32::saturating_add);
        // Several NICs beyond the socket share the path to it.
        let is_across = self.paths.nic(near, first) == NcclPath::Sys;
        let across = if is_across { self.devices.socket_rate } else { u32::MAX };
        let nic = |nic: &usize| &self.status.nics[self.nics[*nic]];
        let direct = match self.paths.nic(near, first).has_direct_rdma() {
            _ if nic(&first).rdma_device.is_none() => without_rdma_device(self.status),
            false => Direct::TooFar,
            true => modules(self.status),
        };
        Exit {
            gpu,
            path: Some(if relay.is_some() { NcclPath::Pxn } else { self.paths.nic(place, first) }),
            relay: relay.and_then(|relay| self.rank_gpus.iter().position(|place| *place == relay)),
            direct,
            rate: Some(of_nics.min(self.devices.gpus[near].pcie_rate).min(to_relay).min(across)),
            nics: nics.iter().map(nic).map(|nic| nic.rdma_device.as_ref().unwrap_or(&nic.name).clone()).collect(),
        }
    }
}

/// A missing RDMA device is conclusive only if the source of the facts would list it: NIC names in
/// a matrix need not be device names.
fn without_rdma_device(status: &GPUTopologyStatus) -> Direct {
    let is_partial = status.source(Facts::NICs).is_some_and(|source| source.state != SourceState::Complete);
    if is_partial { Direct::RdmaUnknown } else { Direct::NoRdma }
}

/// Whether a module for GPUDirect RDMA is loaded. Either of the two is enough.
fn modules(status: &GPUTopologyStatus) -> Direct {
    let host = status.host.as_ref();
    match (host.and_then(|host| host.peermem), host.and_then(|host| host.dma_buf)) {
        (Some(ModuleState::Loaded), _) | (_, Some(DmaBuf::Likely)) => Direct::Yes,
        (Some(ModuleState::NotLoaded), Some(DmaBuf::Unlikely)) => Direct::NoModule,
        _ => Direct::Unknown,
    }
}

impl IntraNode {
    fn of(path: NcclPath, is_amd_pair: bool) -> IntraNode {
        match path {
            _ if !path.has_p2p(is_amd_pair) => IntraNode::Host,
            NcclPath::Loc | NcclPath::Nvl | NcclPath::Nvb => IntraNode::NvLink,
            NcclPath::C2c => IntraNode::C2c,
            _ => IntraNode::Pcie,
        }
    }
}

impl NodePaths {
    /// The path between two local ranks.
    pub fn pair(&self, a: usize, b: usize) -> Pair {
        self.pairs[a * self.exits.len() + b]
    }

    /// All pairs of different local ranks, lower rank first.
    fn each_pair(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.exits.len()).flat_map(|a| (a + 1..self.exits.len()).map(move |b| (a, b)))
    }

    /// Number of NICs that its ranks use.
    fn nics(&self) -> usize {
        self.exits.iter().flat_map(|exit| &exit.nics).collect::<BTreeSet<_>>().len()
    }
}

impl NodeForecast {
    /// Global rank on the first of these nodes.
    fn rank(&self, local: usize) -> u32 {
        self.first_ranks.first().copied().unwrap_or(0).saturating_add(u32::try_from(local).unwrap_or(u32::MAX))
    }
}

fn summary(nodes: &[NodeForecast], members: usize, level: Option<Level>) -> Summary {
    let within: BTreeSet<IntraNode> =
        nodes.iter().flat_map(|node| node.paths.each_pair().map(|(a, b)| node.paths.pair(a, b).transport)).collect();
    let is_joined = level.is_some_and(|level| level.nvlink);
    let between = (members > 1).then(|| if is_joined { InterNode::NvLink } else { between(nodes) });
    let share = u64::from(level.map_or(1000, |level| level.share));
    let outward = nodes.iter().map(|node| node.paths.outward).min().flatten().filter(|_| members > 1 && !is_joined);
    let outward = outward.map(|rate| u32::try_from(u64::from(rate) * share / 1000).unwrap_or(u32::MAX));
    let paths = nodes.iter().flat_map(|node| slow(node, members > 1 && !is_joined));
    Summary { within: within.into_iter().collect(), between, slowest: paths.min_by_key(|path| path.rate), outward }
}

fn between(nodes: &[NodeForecast]) -> InterNode {
    let exits = || nodes.iter().flat_map(|node| &node.paths.exits);
    let (best, worst) = (exits().map(|exit| exit.direct).min(), exits().map(|exit| exit.direct).max());
    match best.zip(worst) {
        Some((_, Direct::RdmaUnknown)) => InterNode::Unknown,
        // One rank without RDMA moves all to TCP, because NCCL uses a single network.
        Some((best, worst)) if worst != Direct::NoRdma => {
            InterNode::Rdma { direct: worst, best, nics: nodes.iter().map(|node| node.paths.nics()).min().unwrap_or(0) }
        }
        _ => {
            let mut interfaces: Vec<&Option<String>> = nodes.iter().map(|node| &node.paths.interface).collect();
            interfaces.dedup();
            InterNode::Tcp { interface: if let [one] = interfaces.as_slice() { (*one).clone() } else { None } }
        }
    }
}

/// The paths of a node's ranks whose rate is known.
fn slow(node: &NodeForecast, leaves: bool) -> impl Iterator<Item = Slowest> + '_ {
    let pairs = node.paths.each_pair().filter_map(|(a, b)| {
        let Pair { path, rate, .. } = node.paths.pair(a, b);
        Some(Slowest { rank: node.rank(a), to: Target::Rank(node.rank(b)), path, rate: rate? })
    });
    let exits = node.paths.exits.iter().enumerate().filter(move |_| leaves).filter_map(|(local, exit)| {
        let to = Target::Nic(exit.nics.first()?.clone());
        Some(Slowest { rank: node.rank(local), to, path: exit.path?, rate: exit.rate? })
    });
    pairs.chain(exits)
}

#[cfg(test)]
mod tests;
