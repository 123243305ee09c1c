//! Compares the forecast with what the ranks report after they start. Pure: prediction and
//! observation in, verdict out.

use super::observed::{Channel, LogObservation, SOCKET};
use switchyard_core::units::plural;
use switchyard_crds::{FabricObservation, GpuDirect, ObservedVerdict, Transport};

/// Maximum number of nodes named in a message. The rest are counted.
const MAX_NAMED: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prediction {
    /// Transport between the nodes, or between the ranks of a single node.
    pub transport: Transport,
    /// Whether NICs access the memory of all GPUs directly.
    pub gpu_direct: Option<GpuDirect>,
    /// Whether data leaves a node.
    pub several_nodes: bool,
    /// Whether the job uses our own engine, which reports without any variable set.
    pub is_own: bool,
    /// Whether ranks of one node share memory. Only for our own engine.
    pub shares_memory: bool,
}

/// The report of one node compared with its prediction.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NodeFinding {
    verdict: ObservedVerdict,
    transport: Option<Transport>,
    /// The relevant log line.
    words: String,
}

/// Compares the nodes of a gang; `nodes` is in rank order, with names. `None` means wait: some
/// nodes have not reported, and the others match the forecast. A single node with an inferior
/// transport is enough for a verdict.
pub fn compare(predicted: Prediction, nodes: &[(&str, Option<&LogObservation>)]) -> Option<FabricObservation> {
    let found: Vec<(&str, NodeFinding)> =
        nodes.iter().filter_map(|(name, seen)| Some((*name, compare_node(predicted, (*seen)?)?))).collect();
    let verdict = |(_, finding): &(&str, NodeFinding)| finding.verdict;
    let is_worst = found.iter().any(|found| verdict(found) == ObservedVerdict::OtherTransport);
    let is_all = nodes.iter().all(|(_, seen)| seen.is_some_and(|seen| seen.is_complete));
    if !is_all && !is_worst {
        return None;
    }
    // While some nodes are silent, the others decide for the gang only if they differ from the
    // forecast.
    let worst = [ObservedVerdict::OtherTransport, ObservedVerdict::Slower, ObservedVerdict::Unknown];
    let worst = worst.into_iter().find(|worst| found.iter().any(|found| verdict(found) == *worst));
    let worst = worst.unwrap_or(ObservedVerdict::AsForecast);
    let of: Vec<&(&str, NodeFinding)> = found.iter().filter(|found| verdict(found) == worst).collect();
    let (_, first) = of.first()?;
    let names: Vec<&str> = of.iter().take(MAX_NAMED).map(|(name, _)| *name).collect();
    let more = if of.len() > MAX_NAMED { format!(" and {} more", of.len() - MAX_NAMED) } else { String::new() };
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

/// `None` if it is too early: NCCL names its network before it knows whether it needs one.
fn compare_node(predicted: Prediction, seen: &LogObservation) -> Option<NodeFinding> {
    if seen.channels.is_empty() && !seen.is_complete {
        return None;
    }
    if seen.is_silent() {
        return Some(NodeFinding {
            verdict: ObservedVerdict::Unknown,
            transport: None,
            words: advice_for_silent_log(predicted),
        });
    }
    if predicted.shares_memory && !seen.channels.contains_key(&Channel::HostMemory) {
        let words = seen.channels.values().next().cloned().unwrap_or_default();
        let words = format!("ranks of one node share no memory; {words}");
        return Some(NodeFinding { verdict: ObservedVerdict::OtherTransport, transport: Some(Transport::TCP), words });
    }
    Some(if predicted.several_nodes {
        judge_between_nodes(predicted, seen)
    } else {
        judge_within_node(predicted, seen)
    })
}

/// Explains why nothing is known, and what would help.
fn advice_for_silent_log(predicted: Prediction) -> String {
    match predicted.is_own {
        true => "the log has no word of the ranks about their links: the worker is older than this controller".into(),
        false => "the log has no line of NCCL about its network, so this cannot be judged; NCCL says it with NCCL_DEBUG=INFO and \
                  NCCL_DEBUG_SUBSYS=INIT,NET,P2P,SHM in trainer.env, and NCCL_DEBUG_FILE not set"
            .into(),
    }
}

/// Transport between nodes: from the channels that ranks report, otherwise from the network that
/// NCCL chose.
fn judge_between_nodes(predicted: Prediction, seen: &LogObservation) -> NodeFinding {
    let find = |is: &dyn Fn(&Channel) -> bool| {
        seen.channels.iter().find(|(channel, _)| is(channel)).map(|(_, words)| words.clone())
    };
    let by_socket = find(&is_socket);
    let by_network = find(&|channel| matches!(channel, Channel::Network { .. }));
    let by_domain = find(&|channel| *channel == Channel::Domain);
    // With NVLink between nodes, NCCL also names a network that it does not use.
    let (transport, words) = match (by_domain, by_socket, by_network) {
        (Some(words), None, None) => (Transport::NVLink, words),
        (_, Some(words), _) => (Transport::TCP, words),
        (_, None, Some(words)) => (network_transport(seen).unwrap_or(Transport::RDMA), words),
        // Pods of our engine that share one machine after all.
        (None, None, None) if predicted.is_own => {
            (Transport::SharedMemory, find(&|channel| *channel == Channel::HostMemory).unwrap_or_default())
        }
        (None, None, None) => match (predicted.transport, network_transport(seen)) {
            (Transport::NVLink, _) | (_, None) => {
                let words = "no channel between nodes is in the beginning of the log: NCCL_DEBUG_SUBSYS has to have NET and P2P";
                return NodeFinding { verdict: ObservedVerdict::Unknown, transport: None, words: words.into() };
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
    let staged = find(&|channel| matches!(channel, Channel::Network { direct: false, .. }));
    match staged.filter(|_| verdict == ObservedVerdict::AsForecast && predicted.gpu_direct == Some(GpuDirect::Yes)) {
        Some(words) => {
            let words = format!("{words}: not from the memory of the GPU (no GDRDMA)");
            NodeFinding { verdict: ObservedVerdict::Slower, transport: Some(transport), words }
        }
        None => NodeFinding { verdict, transport: Some(transport), words },
    }
}

fn is_socket(channel: &Channel) -> bool {
    matches!(channel, Channel::Network { name, .. } if name == SOCKET)
}

/// Transport of NCCL's network. A libfabric plugin can itself use TCP, and logs its provider.
fn network_transport<'a>(seen: &'a LogObservation) -> Option<Transport> {
    let tcp_provider = |name: &String| ["tcp", "sockets"].iter().any(|tcp| name.starts_with(tcp));
    let by_socket = seen.networks.iter().any(|name| name == SOCKET) || seen.channels.keys().any(is_socket);
    if by_socket || seen.providers.iter().any(tcp_provider) {
        return Some(Transport::TCP);
    }
    let network_name = |channel: &'a Channel| match channel {
        Channel::Network { name, .. } => Some(name),
        _ => None,
    };
    let first = seen.networks.first().or_else(|| seen.channels.keys().find_map(network_name))?;
    // `IBext_v8` and similar names are NVIDIA's own plugin for InfiniBand and RoCE.
    Some(if first.starts_with("IB") { Transport::RDMA } else { Transport::Plugin })
}

/// Transport inside the single node.
fn judge_within_node(predicted: Prediction, seen: &LogObservation) -> NodeFinding {
    let channels = || seen.channels.iter();
    let network = channels().find(|(channel, _)| matches!(channel, Channel::Network { .. }));
    let host = channels().find(|(channel, _)| **channel == Channel::HostMemory);
    let peer = channels().find(|(channel, _)| matches!(channel, Channel::Peer | Channel::Domain));
    let by_gpus = matches!(predicted.transport, Transport::NVLink | Transport::PCIe);
    let (verdict, transport, words) = match (network, host, peer) {
        (Some((_, words)), _, _) => (ObservedVerdict::OtherTransport, network_transport(seen), words.clone()),
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
    NodeFinding { verdict, transport, words }
}

#[cfg(test)]
mod tests;
