//! Reads how the ranks of a node reach others from the head of its log: the first lines of NCCL, or
//! the events of our own engine.
//!
//! NCCL prints them only with `NCCL_DEBUG=INFO`. Their forms, by release: the network as `Using
//! network IB` (2.6 and newer; since 2.25 also `Assigned NET plugin IB to comm`), links as `Channel
//! 00/0 : 3[3] -> 8[0] [send] via NET/IB/0/GDRDMA`, `… via P2P/IPC`, `… via SHM/…` (before 2.11
//! `via direct shared memory`), between nodes of one NVLink domain `via P2P/MNNVL` (since 2.21). A
//! libfabric network plugin adds its provider: `NET/OFI Selected Provider is efa`.

use std::collections::BTreeMap;
use switchyard_worker_contract::event::{Event, Link, Measured};

/// Maximum length of a quoted line, in characters.
const QUOTED: usize = 120;

/// What the log of one node shows so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogObservation {
    /// Networks that NCCL says it uses.
    pub networks: Vec<String>,
    /// Paths between ranks, each with the line of the first rank that named it.
    pub channels: BTreeMap<Channel, String>,
    /// libfabric providers.
    pub providers: Vec<String>,
    /// Measurements by our own ranks.
    pub measured: Option<Measured>,
    /// Whether the log is complete.
    pub is_complete: bool,
}

/// How data gets from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// NVLink between nodes.
    Domain,
    /// GPU to GPU.
    Peer,
    HostMemory,
    /// A network. `direct` means from and to GPU memory; NCCL also logs it for receiving ends.
    Network {
        /// NCCL's name for it, such as `IB`, `Socket` or `AWS Libfabric`.
        name: String,
        /// Whether GPUDirect RDMA is used.
        direct: bool,
    },
}

impl LogObservation {
    /// Parses the head of a log. `processes` is the number of ranks on the node.
    pub fn of(log: &str, processes: u32) -> LogObservation {
        let mut seen = LogObservation::default();
        let (mut ready, mut finished) = (0, false);
        for line in log.lines() {
            if line.starts_with('{') {
                match serde_json::from_str(line) {
                    Ok(Event::Ready(event)) => {
                        ready += 1;
                        event.links.iter().for_each(|link| seen.link(event.rank, link));
                    }
                    // Printed before the ranks are ready.
                    Ok(Event::Measured(measured)) => seen.measured = Some(measured),
                    _ => {}
                }
            } else if let Some((_, line)) = line.split_once("NCCL INFO ") {
                seen.nccl(line.trim_end());
                finished |= line.contains("Init COMPLETE") || line.contains("Connected all ");
            }
        }
        seen.is_complete = ready >= processes.max(1) || (finished && !seen.networks.is_empty());
        seen
    }

    /// Whether there is nothing to compare.
    pub fn is_silent(&self) -> bool {
        self.networks.is_empty() && self.channels.is_empty()
    }

    fn link(&mut self, rank: u32, link: &Link) {
        let (channel, words) = match link {
            Link::SharedMemory { ranks } => {
                (Channel::HostMemory, format!("rank {rank} shares memory with rank {ranks}"))
            }
            Link::Tcp { rank: to, local, remote, interface } => {
                let by = interface.as_ref().map_or(String::new(), |name| format!(" by {name}"));
                let channel = Channel::Network { name: SOCKET.into(), direct: false };
                (channel, format!("rank {rank} to rank {to}: TCP{by} from {local} to {remote}"))
            }
        };
        self.channels.entry(channel).or_insert(words);
    }

    fn nccl(&mut self, line: &str) {
        let network = line.strip_prefix("Using network ");
        let assigned = || line.strip_prefix("Assigned NET plugin ")?.strip_suffix(" to comm");
        if let Some(name) = network.or_else(assigned) {
            note(&mut self.networks, name);
        } else if let Some(channel) = channel(line) {
            self.channels.entry(channel).or_insert_with(|| line.chars().take(QUOTED).collect());
        } else if let Some(provider) = provider(line) {
            note(&mut self.providers, provider);
        }
    }
}

/// NCCL's name for TCP.
pub(super) const SOCKET: &str = "Socket";

fn note(list: &mut Vec<String>, name: &str) {
    let name = name.trim();
    if !name.is_empty() && !list.iter().any(|known| known == name) {
        list.push(name.to_string());
    }
}

/// Parses the path in a line about a channel: `Channel 00/0 : 3[3] -> 8[0] [send] via
/// NET/IB/0/GDRDMA`; before 2.5 `Ring 00 : 3 -> 8 [send] via …`.
fn channel(line: &str) -> Option<Channel> {
    if !line.starts_with("Channel ") && !line.starts_with("Ring ") {
        return None;
    }
    let (ends, via) = line.split_once(" via ")?;
    ends.contains(" -> ").then_some(())?;
    let mut parts = via.split('/');
    Some(match (parts.next()?.trim(), parts.next()) {
        ("P2P", Some("MNNVL")) => Channel::Domain,
        ("P2P", _) => Channel::Peer,
        ("SHM", _) | ("direct shared memory", _) => Channel::HostMemory,
        ("NET", Some(name)) => Channel::Network { name: name.to_string(), direct: parts.any(|part| part == "GDRDMA") },
        _ => return None,
    })
}

/// Parses `NET/OFI Selected Provider is efa (found 4 nics)`; newer releases write `provider` and
/// append `, fabric is …`.
fn provider(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("NET/OFI Selected ")?;
    let rest = rest.strip_prefix("Provider is ").or_else(|| rest.strip_prefix("provider is "))?;
    rest.split([' ', ',']).next()
}
