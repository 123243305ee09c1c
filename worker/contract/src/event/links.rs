//! Data paths between ranks, and their measured speed.

use serde::{Deserialize, Serialize};

/// A data path from one rank to others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Link {
    /// Memory shared by the ranks of a host.
    SharedMemory {
        /// The other ranks, as a list like `1-3`.
        ranks: String,
    },
    /// A TCP connection to the next rank of the ring.
    Tcp {
        /// The next rank of the ring.
        rank: u32,
        /// Local end, `ADDRESS:PORT`.
        local: String,
        /// Remote end, `ADDRESS:PORT`.
        remote: String,
        /// Network interface that the kernel routes through; absent if unknown.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        interface: Option<String>,
    },
    /// NCCL channels to another rank over one path.
    Nccl {
        /// The receiving rank.
        rank: u32,
        /// NCCL's path, such as `P2P/CUMEM/read`, `SHM/direct/direct` or `NET/IB/0/GDRDMA`.
        path: String,
        /// Number of channels, over all communicators.
        channels: u32,
        /// The NIC of a network path; absent if unknown.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        adapter: Option<String>,
    },
}

/// Results of an all-reduce over all ranks, and of each TCP connection of its ring alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// Number of ranks.
    pub ranks: u32,
    /// Bytes per all-reduce.
    pub bytes: u64,
    /// Seconds per all-reduce.
    pub seconds: f64,
    /// Bus bandwidth of the all-reduce in bytes per second: `bytes / seconds * 2 (ranks - 1) /
    /// ranks`, as defined by nccl-tests
    /// (<https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>). Equals the traffic
    /// on every link of a ring.
    pub bus_bandwidth: f64,
    /// Bytes per second that the job requires.
    pub least: f64,
    /// Connections between hosts, measured while all of them send simultaneously.
    pub links: Vec<MeasuredLink>,
}

/// A connection from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MeasuredLink {
    /// Sending rank.
    pub from: u32,
    /// Receiving rank.
    pub to: u32,
    /// Measured rate.
    pub bytes_per_second: f64,
}

impl Measured {
    /// Computes the bus bandwidth from the time of one all-reduce of `bytes`.
    pub fn new(ranks: u32, bytes: u64, seconds: f64, least: f64, links: Vec<MeasuredLink>) -> Measured {
        let factor = if ranks > 1 { 2.0 * f64::from(ranks - 1) / f64::from(ranks) } else { 0.0 };
        let bus_bandwidth = bytes as f64 / seconds.max(1e-9) * factor;
        Measured { ranks, bytes, seconds, bus_bandwidth, least, links }
    }

    /// Connections slow enough to keep the all-reduce below the target, slowest first.
    pub fn slow(&self) -> Vec<MeasuredLink> {
        let mut slow: Vec<MeasuredLink> =
            self.links.iter().filter(|link| link.bytes_per_second < self.least).copied().collect();
        slow.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
        slow
    }

    /// Why the bandwidth is insufficient, as one sentence; `None` if it is sufficient.
    pub fn shortfall(&self) -> Option<String> {
        if self.bus_bandwidth >= self.least {
            return None;
        }
        let rate = |bytes: f64| format!("{:.3} GB/s", bytes / 1e9);
        let slow = self.slow();
        let named: Vec<String> = slow
            .iter()
            .take(4)
            .map(|link| format!("rank {} to rank {}: {}", link.from, link.to, rate(link.bytes_per_second)))
            .collect();
        let links = match named.is_empty() {
            true => "no single link is slower than that".to_string(),
            false => format!("slow links: {}", named.join(", ")),
        };
        let (got, least) = (rate(self.bus_bandwidth), rate(self.least));
        let ranks = self.ranks;
        Some(format!(
            "spec.fabric.preflight.minBusBandwidth: got {got} in an all-reduce over {ranks} ranks; expected {least}; {links}"
        ))
    }
}
