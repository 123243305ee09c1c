//! Reads how the ranks of a node reach others from the head of its log: the first lines of NCCL, or
//! the events of our own engine.

use std::collections::BTreeMap;
use switchyard_worker_contract::event::{Event, Link, Measured};
use switchyard_worker_contract::nccl::Line;

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
            } else if let Some(parsed) = Line::parse(line) {
                seen.nccl(line, parsed);
                finished |= parsed == Line::Connected;
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
            Link::Nccl { rank: to, path, channels, adapter } => {
                let Some(channel) = Channel::of_path(path) else { return };
                let by = adapter.as_ref().map_or(String::new(), |name| format!(" by {name}"));
                (channel, format!("rank {rank} to rank {to}: {channels} channels via {path}{by}"))
            }
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

    fn nccl(&mut self, text: &str, line: Line<'_>) {
        match line {
            Line::Network(name) => note(&mut self.networks, name),
            Line::Provider(name) => note(&mut self.providers, name),
            Line::Channel { path, .. } => {
                if let Some(channel) = Channel::of_path(path) {
                    let quote = text.split_once("NCCL INFO ").map_or(text, |(_, line)| line);
                    self.channels.entry(channel).or_insert_with(|| quote.trim_end().chars().take(QUOTED).collect());
                }
            }
            Line::Adapters { .. } | Line::Connected => {}
        }
    }
}

impl Channel {
    /// Classifies NCCL's path, such as `NET/IB/0/GDRDMA`.
    fn of_path(path: &str) -> Option<Channel> {
        let mut parts = path.split('/');
        Some(match (parts.next()?.trim(), parts.next()) {
            ("P2P", Some("MNNVL")) => Channel::Domain,
            ("P2P", _) => Channel::Peer,
            ("SHM", _) | ("direct shared memory", _) => Channel::HostMemory,
            ("NET", Some(name)) => {
                Channel::Network { name: name.to_string(), direct: parts.any(|part| part == "GDRDMA") }
            }
            _ => return None,
        })
    }
}

/// NCCL's name for TCP.
pub(super) const SOCKET: &str = "Socket";

fn note(list: &mut Vec<String>, name: &str) {
    if !list.iter().any(|known| known == name) {
        list.push(name.to_string());
    }
}
