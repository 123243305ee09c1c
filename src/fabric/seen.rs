//! The log of a node about how its ranks reach others: the first lines of NCCL, or the events of our own engine.
//!
//! NCCL prints them with `NCCL_DEBUG=INFO` only. Their forms, by release: the network as `Using network IB` (2.6 and newer; since 2.25 also
//! `Assigned NET plugin IB to comm`), links as `Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0/GDRDMA`, `… via P2P/IPC`, `… via SHM/…`
//! (before 2.11 `via direct shared memory`), between nodes of one NVLink domain `via P2P/MNNVL` (since 2.21). A network plugin for libfabric
//! adds its provider: `NET/OFI Selected Provider is efa`.

use std::collections::BTreeMap;
use switchyard_worker_contract::event::{Event, Link, Measured};

/// Characters of a quoted line.
const QUOTED: usize = 120;

/// The contents of the log of one node so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Seen {
    /// Networks that NCCL says it uses.
    pub networks: Vec<String>,
    /// Ways between ranks, each with the words of the first rank that named it.
    pub ways: BTreeMap<Way, String>,
    /// Providers of libfabric.
    pub providers: Vec<String>,
    /// Measurements of our own ranks.
    pub measured: Option<Measured>,
    /// Whether the log is complete.
    pub is_complete: bool,
}

/// How data goes from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// NVLink between nodes.
    Domain,
    /// From GPU to GPU.
    Peer,
    HostMemory,
    /// A network. `direct`: from and to the memory of GPUs; NCCL logs it for receiving ends as well.
    Network {
        /// NCCL's name of it, such as `IB`, `Socket` or `AWS Libfabric`.
        name: String,
        /// GPUDirect RDMA.
        direct: bool,
    },
}

impl Seen {
    /// Reads the beginning of a log. `processes`: ranks of the node.
    pub fn of(log: &str, processes: u32) -> Seen {
        let mut seen = Seen::default();
        let (mut ready, mut finished) = (0, false);
        for line in log.lines() {
            if line.starts_with('{') {
                match serde_json::from_str(line) {
                    Ok(Event::Ready(event)) => {
                        ready += 1;
                        event.links.iter().for_each(|link| seen.link(event.rank, link));
                    }
                    // Before the ranks are ready.
                    Ok(Event::Measured(measured)) => seen.measured = Some(measured),
                    _ => {}
                }
            } else if let Some((_, said)) = line.split_once("NCCL INFO ") {
                seen.nccl(said.trim_end());
                finished |= said.contains("Init COMPLETE") || said.contains("Connected all ");
            }
        }
        seen.is_complete = ready >= processes.max(1) || (finished && !seen.networks.is_empty());
        seen
    }

    /// Whether there is nothing to compare.
    pub fn is_silent(&self) -> bool {
        self.networks.is_empty() && self.ways.is_empty()
    }

    fn link(&mut self, rank: u32, link: &Link) {
        let (way, words) = match link {
            Link::SharedMemory { ranks } => (Way::HostMemory, format!("rank {rank} shares memory with rank {ranks}")),
            Link::Tcp { rank: to, local, remote, interface } => {
                let by = interface.as_ref().map_or(String::new(), |name| format!(" by {name}"));
                let way = Way::Network { name: SOCKET.into(), direct: false };
                (way, format!("rank {rank} to rank {to}: TCP{by} from {local} to {remote}"))
            }
        };
        self.ways.entry(way).or_insert(words);
    }

    fn nccl(&mut self, said: &str) {
        let network = said.strip_prefix("Using network ");
        let assigned = || said.strip_prefix("Assigned NET plugin ")?.strip_suffix(" to comm");
        if let Some(name) = network.or_else(assigned) {
            note(&mut self.networks, name);
        } else if let Some(way) = channel(said) {
            self.ways.entry(way).or_insert_with(|| said.chars().take(QUOTED).collect());
        } else if let Some(provider) = provider(said) {
            note(&mut self.providers, provider);
        }
    }
}

/// NCCL's name of TCP.
pub(super) const SOCKET: &str = "Socket";

fn note(list: &mut Vec<String>, name: &str) {
    let name = name.trim();
    if !name.is_empty() && !list.iter().any(|known| known == name) {
        list.push(name.to_string());
    }
}

/// The path in a line about a channel: `Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0/GDRDMA`; before 2.5 `Ring 00 : 3 -> 8 [send] via …`.
fn channel(said: &str) -> Option<Way> {
    if !said.starts_with("Channel ") && !said.starts_with("Ring ") {
        return None;
    }
    let (ends, via) = said.split_once(" via ")?;
    ends.contains(" -> ").then_some(())?;
    let mut parts = via.split('/');
    Some(match (parts.next()?.trim(), parts.next()) {
        ("P2P", Some("MNNVL")) => Way::Domain,
        ("P2P", _) => Way::Peer,
        ("SHM", _) | ("direct shared memory", _) => Way::HostMemory,
        ("NET", Some(name)) => Way::Network { name: name.to_string(), direct: parts.any(|part| part == "GDRDMA") },
        _ => return None,
    })
}

/// `NET/OFI Selected Provider is efa (found 4 nics)`, with a small letter and `, fabric is …` in newer releases.
fn provider(said: &str) -> Option<&str> {
    let rest = said.strip_prefix("NET/OFI Selected ")?;
    let rest = rest.strip_prefix("Provider is ").or_else(|| rest.strip_prefix("provider is "))?;
    rest.split([' ', ',']).next()
}
