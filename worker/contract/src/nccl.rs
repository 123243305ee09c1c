//! NCCL's log: the networks and channels that a communicator uses.
//!
//! NCCL prints them only with `NCCL_DEBUG=INFO`. Their forms, by release: the network as `Using
//! network IB` (2.6 and newer; since 2.25 also `Assigned NET plugin IB to comm`), links as `Channel
//! 00/0 : 3[3] -> 8[0] [send] via NET/IB/0/GDRDMA`, `… via P2P/IPC`, `… via SHM/…` (before 2.11
//! `via direct shared memory`; before 2.5 `Ring 00 : 3 -> 8 …`), between nodes of one NVLink domain
//! `via P2P/MNNVL` (since 2.21). A libfabric network plugin adds its provider: `NET/OFI Selected
//! Provider is efa`.

use crate::config::Transport;
use crate::event::{Link, Ready};
use std::collections::BTreeMap;

/// The variable that enables the log.
const DEBUG: &str = "NCCL_DEBUG";

/// What a rank of our engine logs. NCCL flushes each line of a named file. Without a name, C
/// buffers the pipe in blocks, which end in the middle of lines and tear the events between them.
/// On the same pipe as the events, all channels precede the event that the rank is ready.
const LOG: [(&str, &str); 3] =
    [(DEBUG, "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NET,P2P,SHM"), ("NCCL_DEBUG_FILE", "/dev/stdout")];

/// Maximum number of paths of a process; a rank has a few per peer.
const MAX_PATHS: usize = 4096;

/// Variables for a rank's process, so that NCCL logs its channels. A user's settings win; `is_set`
/// returns whether a variable has one.
pub fn log_variables(is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, &'static str)> {
    if is_set(DEBUG) {
        return Vec::new();
    }
    LOG.into_iter().filter(|(name, _)| !is_set(name)).collect()
}

/// A line of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line<'a> {
    /// The network of a communicator, such as `IB`, `Socket` or `AWS Libfabric`.
    Network(&'a str),
    /// The NICs of a network, by index.
    Adapters {
        /// The network.
        network: &'a str,
        /// `[0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]`.
        list: &'a str,
    },
    /// A channel from one rank to another.
    Channel {
        /// The sending rank.
        from: u32,
        /// The receiving rank.
        to: u32,
        /// Whether the receiving rank printed the line.
        is_receiver: bool,
        /// NCCL's path, such as `P2P/CUMEM/read` or `NET/IB/0/GDRDMA`.
        path: &'a str,
    },
    /// The libfabric provider.
    Provider(&'a str),
    /// All channels are connected.
    Connected,
}

impl<'a> Line<'a> {
    /// Parses a line of a process's output; `None` if NCCL did not print it or it is of no use
    /// here.
    pub fn parse(text: &'a str) -> Option<Line<'a>> {
        let (_, line) = text.split_once("NCCL INFO ")?;
        let line = line.trim_end();
        let network = line.strip_prefix("Using network ");
        let assigned = || line.strip_prefix("Assigned NET plugin ")?.strip_suffix(" to comm");
        if let Some(name) = network.or_else(assigned) {
            return Some(Line::Network(name.trim())).filter(|_| !name.trim().is_empty());
        }
        if line.contains("Init COMPLETE") || line.contains("Connected all ") {
            return Some(Line::Connected);
        }
        channel(line).or_else(|| adapters(line)).or_else(|| provider(line))
    }
}

fn channel(line: &str) -> Option<Line<'_>> {
    if !line.starts_with("Channel ") && !line.starts_with("Ring ") {
        return None;
    }
    let (ends, path) = line.split_once(" via ")?;
    let (from, to) = ends.split_once(" : ")?.1.split_once(" -> ")?;
    let rank = |end: &str| end[..end.find(|c: char| !c.is_ascii_digit()).unwrap_or(end.len())].parse().ok();
    Some(Line::Channel {
        from: rank(from.trim())?,
        to: rank(to.trim())?,
        is_receiver: to.contains("[receive]"),
        path: path.trim(),
    })
}

/// `NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>`.
fn adapters(line: &str) -> Option<Line<'_>> {
    let (network, list) = line.strip_prefix("NET/")?.split_once(" : Using ")?;
    let list = list.split_once(';').map_or(list, |(list, _)| list);
    Some(Line::Adapters { network, list: list.trim() })
}

/// `NET/OFI Selected Provider is efa (found 4 nics)`; newer releases write `provider` and append
/// `, fabric is …`.
fn provider(line: &str) -> Option<Line<'_>> {
    let rest = line.strip_prefix("NET/OFI Selected ")?;
    let rest = rest.strip_prefix("Provider is ").or_else(|| rest.strip_prefix("provider is "))?;
    rest.split([' ', ',']).next().filter(|name| !name.is_empty()).map(Line::Provider)
}

/// The channels of the ranks of one process or pod, collected from its output.
#[derive(Debug, Clone, Default)]
pub struct Channels {
    /// Names of the NICs per network, by NCCL's index.
    adapters: BTreeMap<String, Vec<String>>,
    /// Number of channels by sender, receiver and path.
    paths: BTreeMap<(u32, u32, String), u32>,
}

impl Channels {
    /// Handles a line of output.
    pub fn line(&mut self, text: &str) {
        match Line::parse(text) {
            Some(Line::Adapters { network, list }) => {
                let names = list.split_whitespace().filter_map(|entry| entry.strip_prefix('[')?.split_once(']'));
                let names = names.filter(|(index, _)| index.bytes().all(|digit| digit.is_ascii_digit()));
                self.adapters.insert(network.to_owned(), names.map(|(_, name)| adapter(name).to_owned()).collect());
            }
            Some(Line::Channel { from, to, is_receiver: false, path }) => {
                let key = (from, to, path.to_owned());
                if self.paths.len() < MAX_PATHS || self.paths.contains_key(&key) {
                    *self.paths.entry(key).or_default() += 1;
                }
            }
            _ => {}
        }
    }

    /// Adds the links of a rank that uses NCCL to its event. Returns whether there are any.
    pub fn complete(&self, ready: &mut Ready) -> bool {
        if ready.transport == Transport::Nccl {
            ready.links.extend(self.links(ready.rank));
        }
        ready.transport == Transport::Nccl && !ready.links.is_empty()
    }

    /// The links from a rank, by peer.
    pub fn links(&self, rank: u32) -> Vec<Link> {
        let own = self.paths.iter().filter(|((from, ..), _)| *from == rank);
        own.map(|((_, to, path), channels)| Link::Nccl {
            rank: *to,
            path: path.clone(),
            channels: *channels,
            adapter: self.adapter(path),
        })
        .collect()
    }

    /// The NIC of a path like `NET/IB/0/GDRDMA`.
    fn adapter(&self, path: &str) -> Option<String> {
        let mut parts = path.strip_prefix("NET/")?.split('/');
        let names = self.adapters.get(parts.next()?)?;
        names.get(parts.next()?.parse::<usize>().ok()?).cloned()
    }
}

/// `mlx5_0` of `mlx5_0:1/IB`, and `eth0` of `eth0:10.0.0.1<0>`.
fn adapter(entry: &str) -> &str {
    entry.split(':').next().unwrap_or(entry)
}

/// The channels of a rank by path: `8 x P2P/CUMEM/read, 2 x NET/IB/0/GDRDMA (mlx5_0)`. `None`
/// without NCCL links.
pub fn summary<'a>(links: impl IntoIterator<Item = &'a Link>) -> Option<String> {
    let mut counts = BTreeMap::<(&str, Option<&str>), u32>::new();
    for link in links {
        if let Link::Nccl { path, channels, adapter, .. } = link {
            *counts.entry((path, adapter.as_deref())).or_default() += channels;
        }
    }
    let describe = |((path, adapter), channels): ((&str, Option<&str>), u32)| {
        let adapter = adapter.map_or_else(String::new, |name| format!(" ({name})"));
        format!("{channels} x {path}{adapter}")
    };
    let parts: Vec<String> = counts.into_iter().map(describe).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "n:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>
n:7:19 [0] NCCL INFO Using network IB
n:7:19 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
n:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n:7:19 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n:7:21 [1] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/1/GDRDMA
n:7:19 [0] NCCL INFO Connected all rings";

    fn channels(lines: &str) -> Channels {
        let mut channels = Channels::default();
        lines.lines().for_each(|line| channels.line(line));
        channels
    }

    #[test]
    fn each_rank_has_the_channels_that_it_sends_on() {
        let seen = channels(LINES);
        let peer = Link::Nccl { rank: 1, path: "P2P/CUMEM/read".into(), channels: 2, adapter: None };
        assert_eq!(seen.links(0), [peer]);
        let network =
            Link::Nccl { rank: 8, path: "NET/IB/1/GDRDMA".into(), channels: 1, adapter: Some("mlx5_3".into()) };
        assert_eq!(seen.links(1), [network]);
        assert_eq!(
            summary(seen.links(0).iter().chain(&seen.links(1))).as_deref(),
            Some("1 x NET/IB/1/GDRDMA (mlx5_3), 2 x P2P/CUMEM/read")
        );
        assert_eq!(summary(&[]), None);
    }

    #[test]
    fn old_forms_and_sockets_are_parsed() {
        let seen = channels(
            "NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0> [1]eth1:10.0.5.51<0>\nNCCL INFO Ring 00 : 3 -> 4 [send] via NET/Socket/1\n\
             NCCL INFO Channel 00 : 3[101d0] -> 2[101c0] via direct shared memory",
        );
        let path = |rank, path: &str, adapter: Option<&str>| Link::Nccl {
            rank,
            path: path.into(),
            channels: 1,
            adapter: adapter.map(str::to_owned),
        };
        assert_eq!(seen.links(3), [path(2, "direct shared memory", None), path(4, "NET/Socket/1", Some("eth1"))]);
    }

    #[test]
    fn damaged_lines_are_ignored() {
        for line in [
            "NCCL INFO Channel 00/0 : x -> 1[1] via P2P",
            "NCCL INFO Channel 00/0 : 0[0] -> [1] via P2P",
            "NCCL INFO Channel 00/0 : 99999999999[0] -> 1[1] via P2P",
            "NCCL INFO Channel via -> : ",
            "NCCL INFO Using network ",
            "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
        ] {
            assert_eq!(Line::parse(line), None, "{line}");
        }
        let empty =
            channels("NCCL INFO NET/IB : Using [x]a:1 []b [0]\nNCCL INFO Channel 00 : 0 -> 1 via NET/IB/7/GDRDMA");
        assert_eq!(summary(&empty.links(0)).as_deref(), Some("1 x NET/IB/7/GDRDMA"));
    }

    #[test]
    fn a_users_settings_win() {
        assert_eq!(log_variables(|_| false).len(), LOG.len());
        assert_eq!(log_variables(|name| name == DEBUG), []);
        let rest = log_variables(|name| name == "NCCL_DEBUG_FILE");
        assert!(rest.contains(&(DEBUG, "INFO")) && rest.len() == LOG.len() - 1, "{rest:?}");
    }
}
