//! The forecast compared with what the ranks report after their start. Pure: prediction and observation in, a verdict out.

use super::seen::{SOCKET, Seen, Way};
use switchyard_core::units::plural;
use switchyard_crds::{FabricObservation, GpuDirect, ObservedVerdict, Transport};

/// Most nodes that are named; the rest is counted.
const NAMED: usize = 4;

/// What was predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prediction {
    /// What carries data between the nodes, or between the ranks of a single node.
    pub transport: Transport,
    /// Whether NICs reach the memory of all GPUs.
    pub gpu_direct: Option<GpuDirect>,
    /// Data leaves a node.
    pub several_nodes: bool,
    /// It is our own engine, which reports without any variable.
    pub is_own: bool,
    /// Ranks of one node share memory; only for our own engine.
    pub shares_memory: bool,
}

/// The report of one node compared with its prediction.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    verdict: ObservedVerdict,
    transport: Option<Transport>,
    /// The words of the log.
    words: String,
}

/// Compares the nodes of a gang, by rank with their names. `None`: wait, since nodes are missing and those that reported agree with the forecast.
/// One node with a lesser transport is enough for a verdict.
pub fn compare(predicted: Prediction, nodes: &[(&str, Option<&Seen>)]) -> Option<FabricObservation> {
    let found: Vec<(&str, Finding)> =
        nodes.iter().filter_map(|(name, seen)| Some((*name, of_node(predicted, (*seen)?)?))).collect();
    let verdict = |(_, finding): &(&str, Finding)| finding.verdict;
    let is_worst = found.iter().any(|found| verdict(found) == ObservedVerdict::OtherTransport);
    let is_all = nodes.iter().all(|(_, seen)| seen.is_some_and(|seen| seen.is_complete));
    if !is_all && !is_worst {
        return None;
    }
    // If some nodes are silent, the others decide for the gang only if they differ from the forecast.
    let worst = [ObservedVerdict::OtherTransport, ObservedVerdict::Slower, ObservedVerdict::Unknown];
    let worst = worst.into_iter().find(|worst| found.iter().any(|found| verdict(found) == *worst));
    let worst = worst.unwrap_or(ObservedVerdict::AsForecast);
    let of: Vec<&(&str, Finding)> = found.iter().filter(|found| verdict(found) == worst).collect();
    let (_, first) = of.first()?;
    let names: Vec<&str> = of.iter().take(NAMED).map(|(name, _)| *name).collect();
    let more = if of.len() > NAMED { format!(" and {} more", of.len() - NAMED) } else { String::new() };
    let who =
        format!("{} of {} node{} ({}{more})", of.len(), nodes.len(), plural(nodes.len() as u64), names.join(", "));
    let message = format!("forecast {}; {who}: {}", predicted.words(), first.words);
    Some(FabricObservation { verdict: worst, transport: first.transport, message })
}

impl Prediction {
    fn words(&self) -> String {
        let direct = match self.gpu_direct {
            Some(GpuDirect::Yes) => " with GPUDirect",
            Some(GpuDirect::No) => " through host memory",
            Some(GpuDirect::Unknown) | None => "",
        };
        let place = if self.several_nodes { "between nodes" } else { "inside the node" };
        format!("{:?}{direct} {place}", self.transport)
    }
}

/// `None`: too early. NCCL names its network before it knows whether it needs one.
fn of_node(predicted: Prediction, seen: &Seen) -> Option<Finding> {
    if seen.ways.is_empty() && !seen.is_complete {
        return None;
    }
    if seen.is_silent() {
        return Some(Finding { verdict: ObservedVerdict::Unknown, transport: None, words: silence(predicted) });
    }
    if predicted.shares_memory && !seen.ways.contains_key(&Way::HostMemory) {
        let words = seen.ways.values().next().cloned().unwrap_or_default();
        let words = format!("ranks of one node share no memory; {words}");
        return Some(Finding { verdict: ObservedVerdict::OtherTransport, transport: Some(Transport::TCP), words });
    }
    Some(if predicted.several_nodes { between(predicted, seen) } else { within(predicted, seen) })
}

/// Why nothing is known, and what would help.
fn silence(predicted: Prediction) -> String {
    match predicted.is_own {
        true => "the log has no word of the ranks about their links: the worker is older than this controller".into(),
        false => "the log has no line of NCCL about its network, so this cannot be judged; NCCL says it with NCCL_DEBUG=INFO and \
                  NCCL_DEBUG_SUBSYS=INIT,NET,P2P,SHM in trainer.env, and NCCL_DEBUG_FILE not set"
            .into(),
    }
}

/// How data leaves the node: by what its ranks report about their channels, else by the network that NCCL chose.
fn between(predicted: Prediction, seen: &Seen) -> Finding {
    let find = |is: &dyn Fn(&Way) -> bool| seen.ways.iter().find(|(way, _)| is(way)).map(|(_, words)| words.clone());
    let by_socket = find(&is_socket);
    let by_network = find(&|way| matches!(way, Way::Network { .. }));
    let by_domain = find(&|way| *way == Way::Domain);
    // With NVLink between nodes, NCCL also names a network that it does not use.
    let (transport, words) = match (by_domain, by_socket, by_network) {
        (Some(words), None, None) => (Transport::NVLink, words),
        (_, Some(words), _) => (Transport::TCP, words),
        (_, None, Some(words)) => (of_networks(seen).unwrap_or(Transport::RDMA), words),
        // Pods of our engine that share one machine after all.
        (None, None, None) if predicted.is_own => {
            (Transport::SharedMemory, find(&|way| *way == Way::HostMemory).unwrap_or_default())
        }
        (None, None, None) => match (predicted.transport, of_networks(seen)) {
            (Transport::NVLink, _) | (_, None) => {
                let words = "no channel between nodes is in the beginning of the log: NCCL_DEBUG_SUBSYS has to have NET and P2P";
                return Finding { verdict: ObservedVerdict::Unknown, transport: None, words: words.into() };
            }
            (_, Some(transport)) => (transport, format!("Using network {}", seen.networks.join(", "))),
        },
    };
    let verdict = match (predicted.transport, transport) {
        (Transport::RDMA | Transport::Plugin | Transport::NVLink, Transport::TCP) => ObservedVerdict::OtherTransport,
        (Transport::NVLink | Transport::Plugin, Transport::RDMA) | (Transport::NVLink, Transport::Plugin) => {
            ObservedVerdict::Slower
        }
        _ => ObservedVerdict::AsForecast,
    };
    let staged = find(&|way| matches!(way, Way::Network { direct: false, .. }));
    match staged.filter(|_| verdict == ObservedVerdict::AsForecast && predicted.gpu_direct == Some(GpuDirect::Yes)) {
        Some(words) => {
            let words = format!("{words}: not from the memory of the GPU (no GDRDMA)");
            Finding { verdict: ObservedVerdict::Slower, transport: Some(transport), words }
        }
        None => Finding { verdict, transport: Some(transport), words },
    }
}

fn is_socket(way: &Way) -> bool {
    matches!(way, Way::Network { name, .. } if name == SOCKET)
}

/// The transport of NCCL's network. A plugin for libfabric may go over TCP itself, and says so.
fn of_networks<'a>(seen: &'a Seen) -> Option<Transport> {
    let tcp_provider = |name: &String| ["tcp", "sockets"].iter().any(|tcp| name.starts_with(tcp));
    let by_socket = seen.networks.iter().any(|name| name == SOCKET) || seen.ways.keys().any(is_socket);
    if by_socket || seen.providers.iter().any(tcp_provider) {
        return Some(Transport::TCP);
    }
    let of_way = |way: &'a Way| match way {
        Way::Network { name, .. } => Some(name),
        _ => None,
    };
    let first = seen.networks.first().or_else(|| seen.ways.keys().find_map(of_way))?;
    // `IBext_v8` and the like are NVIDIA's own plugin for InfiniBand and RoCE.
    Some(if first.starts_with("IB") { Transport::RDMA } else { Transport::Plugin })
}

/// How data goes inside the one node.
fn within(predicted: Prediction, seen: &Seen) -> Finding {
    let ways = || seen.ways.iter();
    let network = ways().find(|(way, _)| matches!(way, Way::Network { .. }));
    let host = ways().find(|(way, _)| **way == Way::HostMemory);
    let peer = ways().find(|(way, _)| matches!(way, Way::Peer | Way::Domain));
    let by_gpus = matches!(predicted.transport, Transport::NVLink | Transport::PCIe);
    let (verdict, transport, words) = match (network, host, peer) {
        (Some((_, words)), _, _) => (ObservedVerdict::OtherTransport, of_networks(seen), words.clone()),
        (None, Some((_, words)), _) if by_gpus => {
            (ObservedVerdict::Slower, Some(Transport::SharedMemory), words.clone())
        }
        (None, Some((_, words)), _) => (ObservedVerdict::AsForecast, Some(Transport::SharedMemory), words.clone()),
        // NCCL does not log how GPUs reach each other.
        (None, None, Some((_, words))) => (ObservedVerdict::AsForecast, Some(predicted.transport), words.clone()),
        (None, None, None) => {
            let words = "no channel is in the beginning of the log: NCCL_DEBUG_SUBSYS has to have P2P and SHM";
            (ObservedVerdict::Unknown, None, words.to_string())
        }
    };
    Finding { verdict, transport, words }
}

#[cfg(test)]
mod tests;
