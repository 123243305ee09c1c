//! What NCCL will do between the ranks of a gang: the path between any two GPUs, the NIC of each, with or without GPUDirect RDMA, and the rates.
//! From reports alone, before anything runs.
//!
//! Paths and rates are NCCL's own ([`switchyard_topology::nccl`], [`switchyard_core::rates`]), and so is the rule for the NIC of a GPU. Rates are
//! megabytes (10^6) per second, one direction; unknown is absent. Not covered: `NCCL_*` variables of users, and the switches between nodes beyond
//! the share of a level.

mod text;

use std::collections::BTreeSet;
use switchyard_core::devices::Devices;
use switchyard_core::placement::gpus::Level;
use switchyard_crds::gpu_topology::{DmaBuf, Facts, GPUTopologyStatus, ModuleState, SourceState};
use switchyard_topology::nccl::{self, NcclPath, Ways};
use switchyard_topology::report::{self, ReportError};

pub use text::lines;

/// A node of a gang. Ranks are counted over all members, in their order.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    pub node: &'a str,
    /// The report of its agent.
    pub status: &'a GPUTopologyStatus,
    /// GPUs in the order of the ranks, by their position in the report.
    pub gpus: &'a [usize],
}

/// Why there is no forecast.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForecastError {
    /// A report that contradicts itself.
    #[error("GPUTopology {node}: {source}")]
    Report {
        node: String,
        /// What is wrong.
        source: ReportError,
    },
    /// A GPU that the report does not have, or has for two ranks.
    #[error("node {node}: got GPU {gpu}: expected each of {count} GPUs at most once")]
    Gpu {
        node: String,
        /// Position that was asked for.
        gpu: usize,
        /// GPUs of the report.
        count: usize,
    },
}

/// The forecast of a gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forecast {
    /// Nodes in the order of their ranks; equal ones are one entry.
    pub nodes: Vec<NodeForecast>,
    /// The gang as a whole.
    pub summary: Summary,
}

/// Nodes with equal predictions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeForecast {
    /// Their names.
    pub names: Vec<String>,
    pub first_ranks: Vec<u32>,
    /// The prediction.
    pub ways: NodeWays,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeWays {
    /// How each rank leaves the node.
    pub exits: Vec<Exit>,
    /// Between any two of its ranks: row by row.
    pub pairs: Vec<Pair>,
    /// Interface of TCP, if no NIC can do RDMA: that of the default route.
    pub interface: Option<String>,
    /// What all its ranks together send to other nodes. Absent without a NIC.
    pub outward: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    pub path: NcclPath,
    /// How data goes.
    pub transport: Within,
    /// What it carries.
    pub rate: Option<u32>,
}

/// How data goes between two ranks of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Within {
    /// From GPU to GPU over NVLink.
    NvLink,
    /// From GPU to GPU over NVLink-C2C.
    C2c,
    /// From GPU to GPU over PCIe.
    Pcie,
    /// Through the memory of the host (NCCL's SHM).
    Host,
}

/// How a rank leaves its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// NVML's number of its GPU.
    pub gpu: u32,
    /// NICs that NCCL gives it, the one of the first channel first. None: no NIC is known.
    pub nics: Vec<String>,
    /// The path to the first of them. Absent without a NIC.
    pub path: Option<NcclPath>,
    /// Local rank of the GPU that relays (PXN).
    pub relay: Option<usize>,
    /// Whether the NIC reaches the GPU's memory itself.
    pub direct: Direct,
    /// What the rank sends by itself; ranks that share a NIC share its rate. Absent without a NIC.
    pub rate: Option<u32>,
}

/// Whether a NIC reaches the memory of a GPU itself (GPUDirect RDMA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direct {
    /// It does.
    Yes,
    /// The modules for it are not known.
    Unknown,
    /// Neither nvidia-peermem nor DMA-BUF.
    NoModule,
    /// The path is longer than NCCL allows.
    TooFar,
    /// Unknown whether the NIC can do RDMA.
    RdmaUnknown,
    /// The NIC cannot do RDMA, or there is none.
    NoRdma,
}

/// A gang as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// How data goes inside nodes, best first; empty where no node has two ranks.
    pub within: Vec<Within>,
    /// How data goes between nodes; `None` for one node.
    pub between: Option<Between>,
    /// The slowest path of a rank.
    pub slowest: Option<Slowest>,
    /// What every node sends to others at least, after the share of the level; `None` for one node, or where a node's is not known.
    pub outward: Option<u32>,
}

/// How data goes between nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Between {
    /// NVLink, as the nodes are in one domain of it.
    NvLink,
    Rdma {
        /// What holds for every rank; the worst if ranks differ.
        direct: Direct,
        /// The best of any rank.
        best: Direct,
        /// NICs in use on the node that has the fewest.
        nics: usize,
    },
    /// RDMA or TCP: unknown.
    Unknown,
    Tcp {
        /// Its interface, where it has one name on all nodes and that is known.
        interface: Option<String>,
    },
}

/// A path of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slowest {
    pub rank: u32,
    /// Where to.
    pub to: Target,
    pub path: NcclPath,
    /// What it carries.
    pub rate: u32,
}

/// The other end of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A rank of the same node.
    Rank(u32),
    Nic(String),
}

/// Predicts what NCCL does in a gang. `level`: the domain that the nodes are in; `None`: no level slows them down.
///
/// # Errors
/// A report that contradicts itself, or a GPU that it does not have.
pub fn forecast(members: &[Member<'_>], level: Option<Level>) -> Result<Forecast, ForecastError> {
    let mut nodes: Vec<NodeForecast> = Vec::new();
    let mut next = 0;
    for member in members {
        let (first, ways) = (next, node(member)?);
        next += u32::try_from(member.gpus.len()).unwrap_or(u32::MAX);
        match nodes.iter_mut().find(|known| known.ways == ways) {
            Some(known) => {
                known.names.push(member.node.to_string());
                known.first_ranks.push(first);
            }
            None => nodes.push(NodeForecast { names: vec![member.node.to_string()], first_ranks: vec![first], ways }),
        }
    }
    let summary = summary(&nodes, members.len(), level);
    Ok(Forecast { nodes, summary })
}

fn node(member: &Member<'_>) -> Result<NodeWays, ForecastError> {
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
    // NCCL numbers GPUs in the order of the machine, whatever the order of the ranks is.
    let devices = named.devices.only(&sorted);
    let coherent = sorted.iter().enumerate().filter(|(_, gpu)| nccl::is_coherent(&status.gpus[**gpu]));
    let ways = Ways::new(&devices, coherent.fold(0, |mask, (place, _)| mask | 1 << place));
    let places = member.gpus.iter().map(|gpu| sorted.partition_point(|other| other < gpu)).collect();
    Ok(Node { status, nics: &named.nics, gpus: &sorted, devices: &devices, ways, places }.ways())
}

/// A node as NCCL sees it. GPUs are counted in the order of the machine, those without a rank left out.
struct Node<'a> {
    status: &'a GPUTopologyStatus,
    /// For each NIC its position in the report.
    nics: &'a [usize],
    /// For each GPU its position in the report.
    gpus: &'a [usize],
    devices: &'a Devices,
    ways: Ways<'a>,
    /// The GPU of each rank.
    places: Vec<usize>,
}

impl Node<'_> {
    fn ways(&self) -> NodeWays {
        let vendor = self.status.cpus.as_ref().and_then(|cpus| cpus.vendor.as_deref());
        let is_amd_pair = self.gpus.len() <= 2 && vendor == Some("AuthenticAMD");
        let pair = |a: usize, b: usize| {
            let path = self.ways.gpus(a, b);
            Pair { path, transport: Within::of(path, is_amd_pair), rate: self.ways.gpu_rate(a, b) }
        };
        let exits: Vec<Exit> = self.places.iter().map(|place| self.exit(*place)).collect();
        let is_rdma = self.nics.iter().any(|nic| self.status.nics[*nic].rdma_device.is_some());
        let route = self.status.host.as_ref().and_then(|host| host.default_route.clone());
        let used: BTreeSet<usize> = self.places.iter().flat_map(|place| self.ways.nics(*place)).collect();
        let of_nics = used.iter().map(|nic| self.devices.nics[*nic].rate).fold(0, u32::saturating_add);
        let of_ranks = exits.iter().filter_map(|exit| exit.rate).fold(0, u32::saturating_add);
        NodeWays {
            pairs: self.places.iter().flat_map(|a| self.places.iter().map(|b| pair(*a, *b))).collect(),
            exits,
            interface: route.filter(|_| !is_rdma),
            outward: (!used.is_empty()).then(|| of_nics.min(of_ranks)),
        }
    }

    fn exit(&self, place: usize) -> Exit {
        let gpu = self.status.gpus[self.gpus[place]].index;
        let nics = self.ways.nics(place);
        let Some(first) = nics.first().copied() else {
            return Exit { gpu, nics: vec![], path: None, relay: None, direct: Direct::NoRdma, rate: None };
        };
        let relay = self.ways.relay(place, first);
        let near = relay.unwrap_or(place);
        let to_relay = relay.map_or(u32::MAX, |relay| self.devices.nvlink_rate(place, relay));
        let of_nics = nics.iter().map(|nic| self.devices.nic_rate(near, *nic)).fold(0, u32::saturating_add);
        // Several NICs beyond the socket share the path to it.
        let is_across = self.ways.nic(near, first) == NcclPath::Sys;
        let across = if is_across { self.devices.socket_rate } else { u32::MAX };
        let nic = |nic: &usize| &self.status.nics[self.nics[*nic]];
        let direct = match self.ways.nic(near, first).has_direct_rdma() {
            _ if nic(&first).rdma_device.is_none() => without_rdma_device(self.status),
            false => Direct::TooFar,
            true => modules(self.status),
        };
        Exit {
            gpu,
            path: Some(if relay.is_some() { NcclPath::Pxn } else { self.ways.nic(place, first) }),
            relay: relay.and_then(|relay| self.places.iter().position(|place| *place == relay)),
            direct,
            rate: Some(of_nics.min(self.devices.gpus[near].pcie_rate).min(to_relay).min(across)),
            nics: nics.iter().map(nic).map(|nic| nic.rdma_device.as_ref().unwrap_or(&nic.name).clone()).collect(),
        }
    }
}

/// A NIC is known to have no RDMA device only if the source of the facts would know one: names of NICs in a matrix need not be device names.
fn without_rdma_device(status: &GPUTopologyStatus) -> Direct {
    let is_partial = status.source(Facts::NICs).is_some_and(|source| source.state != SourceState::Complete);
    if is_partial { Direct::RdmaUnknown } else { Direct::NoRdma }
}

/// Whether a module for GPUDirect RDMA is loaded: one of the two is enough.
fn modules(status: &GPUTopologyStatus) -> Direct {
    let host = status.host.as_ref();
    match (host.and_then(|host| host.peermem), host.and_then(|host| host.dma_buf)) {
        (Some(ModuleState::Loaded), _) | (_, Some(DmaBuf::Likely)) => Direct::Yes,
        (Some(ModuleState::NotLoaded), Some(DmaBuf::Unlikely)) => Direct::NoModule,
        _ => Direct::Unknown,
    }
}

impl Within {
    fn of(path: NcclPath, is_amd_pair: bool) -> Within {
        match path {
            _ if !path.has_p2p(is_amd_pair) => Within::Host,
            NcclPath::Loc | NcclPath::Nvl | NcclPath::Nvb => Within::NvLink,
            NcclPath::C2c => Within::C2c,
            _ => Within::Pcie,
        }
    }
}

impl NodeWays {
    /// The path between two local ranks.
    pub fn pair(&self, a: usize, b: usize) -> Pair {
        self.pairs[a * self.exits.len() + b]
    }

    /// Every two different local ranks, the lower one first.
    fn each_pair(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.exits.len()).flat_map(|a| (a + 1..self.exits.len()).map(move |b| (a, b)))
    }

    /// NICs that its ranks use.
    fn nics(&self) -> usize {
        self.exits.iter().flat_map(|exit| &exit.nics).collect::<BTreeSet<_>>().len()
    }
}

impl NodeForecast {
    /// The rank on the first of these nodes.
    fn rank(&self, local: usize) -> u32 {
        self.first_ranks.first().copied().unwrap_or(0).saturating_add(u32::try_from(local).unwrap_or(u32::MAX))
    }
}

fn summary(nodes: &[NodeForecast], members: usize, level: Option<Level>) -> Summary {
    let within: BTreeSet<Within> =
        nodes.iter().flat_map(|node| node.ways.each_pair().map(|(a, b)| node.ways.pair(a, b).transport)).collect();
    let is_joined = level.is_some_and(|level| level.nvlink);
    let between = (members > 1).then(|| if is_joined { Between::NvLink } else { between(nodes) });
    let share = u64::from(level.map_or(1000, |level| level.share));
    let outward = nodes.iter().map(|node| node.ways.outward).min().flatten().filter(|_| members > 1 && !is_joined);
    let outward = outward.map(|rate| u32::try_from(u64::from(rate) * share / 1000).unwrap_or(u32::MAX));
    let ways = nodes.iter().flat_map(|node| slow(node, members > 1 && !is_joined));
    Summary { within: within.into_iter().collect(), between, slowest: ways.min_by_key(|way| way.rate), outward }
}

fn between(nodes: &[NodeForecast]) -> Between {
    let exits = || nodes.iter().flat_map(|node| &node.ways.exits);
    let (best, worst) = (exits().map(|exit| exit.direct).min(), exits().map(|exit| exit.direct).max());
    match best.zip(worst) {
        Some((_, Direct::RdmaUnknown)) => Between::Unknown,
        // One rank without RDMA moves all to TCP: NCCL uses one network.
        Some((best, worst)) if worst != Direct::NoRdma => {
            Between::Rdma { direct: worst, best, nics: nodes.iter().map(|node| node.ways.nics()).min().unwrap_or(0) }
        }
        _ => {
            let mut interfaces: Vec<&Option<String>> = nodes.iter().map(|node| &node.ways.interface).collect();
            interfaces.dedup();
            Between::Tcp { interface: if let [one] = interfaces.as_slice() { (*one).clone() } else { None } }
        }
    }
}

/// The paths of the ranks of a node that have a known rate.
fn slow(node: &NodeForecast, leaves: bool) -> impl Iterator<Item = Slowest> + '_ {
    let pairs = node.ways.each_pair().filter_map(|(a, b)| {
        let Pair { path, rate, .. } = node.ways.pair(a, b);
        Some(Slowest { rank: node.rank(a), to: Target::Rank(node.rank(b)), path, rate: rate? })
    });
    let exits = node.ways.exits.iter().enumerate().filter(move |_| leaves).filter_map(|(local, exit)| {
        let to = Target::Nic(exit.nics.first()?.clone());
        Some(Slowest { rank: node.rank(local), to, path: exit.path?, rate: exit.rate? })
    });
    pairs.chain(exits)
}

#[cfg(test)]
mod tests;
