//! Formats a forecast as text.

use super::{Direct, Exit, Forecast, InterNode, IntraNode, NodeForecast, Pair, Slowest, Summary, Target};
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result};
use switchyard_core::rates::gigabytes;
use switchyard_core::units::{counted, rank_list};
use switchyard_topology::fold::{grouped, twins};

/// With more blocks of equal ranks than this, pairs are listed by path instead.
const MAX_BLOCKS: usize = 3;

/// The full forecast: the gang in a line or two, then every node with equal ranks folded. Equal
/// nodes show the ranks of the first.
pub fn lines(forecast: &Forecast) -> Vec<String> {
    let mut lines = forecast.summary.lines();
    for node in &forecast.nodes {
        lines.push(heading(node));
        lines.extend(pairs(node).into_iter().chain(exits(node)).map(|line| format!("  {line}")));
    }
    lines
}

impl Summary {
    /// One line for the gang, and one for its slowest path.
    pub fn lines(&self) -> Vec<String> {
        let mut phrases = Vec::new();
        if !self.within.is_empty() {
            let words: Vec<String> = self.within.iter().map(IntraNode::to_string).collect();
            phrases.push(format!("inside nodes {}", words.join(", else ")));
        }
        if let Some(between) = &self.between {
            let share = self.outward.map_or(String::new(), |rate| format!(", {} GB/s per node", gigabytes(rate)));
            phrases.push(format!("between nodes {between}{share}"));
        }
        let mut lines = Vec::new();
        if !phrases.is_empty() {
            lines.push(format!("transport: {}", phrases.join("; ")));
        }
        lines.extend(self.slowest.as_ref().map(|slowest| format!("slowest: {slowest}")));
        lines
    }
}

impl Display for IntraNode {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        formatter.write_str(match self {
            IntraNode::NvLink => "P2P over NVLink",
            IntraNode::C2c => "P2P over NVLink-C2C",
            IntraNode::Pcie => "P2P over PCIe",
            IntraNode::Host => "SHM through host memory",
        })
    }
}

impl Display for InterNode {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        match self {
            InterNode::NvLink => formatter.write_str("NVLink (MNNVL)"),
            InterNode::Rdma { direct, best, nics } => {
                let how = match (direct, best) {
                    (Direct::Yes, _) => "RDMA with GPUDirect",
                    (Direct::Unknown, _) => "RDMA, GPUDirect not known (no word of nvidia-peermem or DMA-BUF),",
                    (Direct::NoModule, _) => "RDMA through host memory (neither nvidia-peermem nor DMA-BUF)",
                    (_, Direct::Yes) => "RDMA with GPUDirect for some ranks, through host memory for others,",
                    (_, Direct::Unknown) => "RDMA through host memory for some ranks, GPUDirect not known for others,",
                    _ => "RDMA through host memory",
                };
                write!(formatter, "{how} over {}", counted(u64::try_from(*nics).unwrap_or(u64::MAX), "NIC"))
            }
            InterNode::Unknown => formatter.write_str("RDMA or TCP, not known"),
            InterNode::Tcp { interface: Some(interface) } => write!(formatter, "TCP over {interface}"),
            InterNode::Tcp { interface: None } => formatter.write_str("TCP, interface not known"),
        }
    }
}

impl Display for Direct {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        formatter.write_str(match self {
            Direct::Yes => "GPUDirect yes",
            Direct::Unknown => "GPUDirect not known",
            Direct::RdmaUnknown => "RDMA not known",
            Direct::NoModule => "GPUDirect no (no module)",
            Direct::TooFar => "GPUDirect no (farther than PXB)",
            Direct::NoRdma => "no RDMA",
        })
    }
}

impl Display for Slowest {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        let to = match &self.to {
            Target::Rank(rank) => format!("rank {rank}"),
            Target::Nic(nic) => nic.clone(),
        };
        write!(
            formatter,
            "rank {} -> {to}: {} {} GB/s ({})",
            self.rank,
            self.path.word(),
            gigabytes(self.rate),
            self.path.meaning()
        )
    }
}

impl Display for Pair {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        formatter.write_str(self.path.word())?;
        if let Some(rate) = self.rate {
            write!(formatter, " {} GB/s", gigabytes(rate))?;
        }
        if self.transport == IntraNode::Host { formatter.write_str(" through host memory") } else { Ok(()) }
    }
}

/// For example `gpu-01 (ranks 0-7), gpu-03 (ranks 8-15)`.
fn heading(node: &NodeForecast) -> String {
    let count = u32::try_from(node.paths.exits.len()).unwrap_or(u32::MAX);
    let of_one = |(name, first): (&String, &u32)| {
        let word = if count == 1 { "rank" } else { "ranks" };
        format!("{name} ({word} {})", rank_list(*first..first.saturating_add(count)))
    };
    node.names.iter().zip(&node.first_ranks).map(of_one).collect::<Vec<_>>().join(", ")
}

/// For example `ranks 0-7`.
fn named(node: &NodeForecast, members: &[usize]) -> String {
    let word = if members.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", rank_list(members.iter().map(|member| node.rank(*member))))
}

/// The paths between ranks: by blocks of equal ranks, or by path if there are many blocks.
fn pairs(node: &NodeForecast) -> Vec<String> {
    let paths = &node.paths;
    let blocks = twins(paths.exits.len(), |a, b| paths.pair(a, b));
    if blocks.len() > MAX_BLOCKS {
        let mut by_value: BTreeMap<Pair, Vec<String>> = BTreeMap::new();
        for (a, b) in paths.each_pair() {
            by_value.entry(paths.pair(a, b)).or_default().push(format!("{}-{}", node.rank(a), node.rank(b)));
        }
        return by_value.into_iter().map(|(pair, names)| format!("pairs {}: {pair}", names.join(" "))).collect();
    }
    let mut lines = Vec::new();
    for (position, block) in blocks.iter().enumerate() {
        if let [first, second, ..] = block.as_slice() {
            lines.push(format!("{}: {} to each other", named(node, block), paths.pair(*first, *second)));
        }
        for other in &blocks[position + 1..] {
            lines.push(format!("{} to {}: {}", named(node, block), named(node, other), paths.pair(block[0], other[0])));
        }
    }
    lines
}

/// How ranks leave their node. Equal ranks share a line.
fn exits(node: &NodeForecast) -> Vec<String> {
    let exits = &node.paths.exits;
    let same = |a: usize, b: usize| Exit { gpu: 0, ..exits[a].clone() } == Exit { gpu: 0, ..exits[b].clone() };
    let line = |group: Vec<usize>| {
        let exit = &exits[group[0]];
        let Some(path) = exit.path else { return format!("{}: no NIC is known", named(node, &group)) };
        let relay = exit.relay.map_or(String::new(), |relay| format!(" over rank {}", node.rank(relay)));
        let rate = exit.rate.map_or(String::new(), |rate| format!(", {} GB/s", gigabytes(rate)));
        let each = if group.len() > 1 && !rate.is_empty() { " each alone" } else { "" };
        format!(
            "{} -> {}: {}{relay}, {}{rate}{each}",
            named(node, &group),
            exit.nics.join(" "),
            path.word(),
            exit.direct
        )
    };
    grouped(exits.len(), same).into_iter().map(line).collect()
}
