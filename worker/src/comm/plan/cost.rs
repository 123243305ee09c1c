//! Predicts the time of an algorithm and chooses the fastest.
//!
//! `t = steps * latency + bytes / bandwidth + reduced / reduction rate`, as in NCCL's
//! `src/graph/tuning.cc`: all ranks compute it from the same figures and get the same choice.

use super::{Collective, DEFINITIONS, Layout};
use std::{fmt, str::FromStr};

/// How the ranks carry out a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    Ring,
    RecursiveDoubling,
    HalvingDoubling,
    Tree,
    Hierarchical,
    Pairwise,
}

impl Algorithm {
    /// All algorithms, in the order in which they win ties.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::HalvingDoubling,
        Algorithm::Tree,
        Algorithm::Hierarchical,
        Algorithm::Pairwise,
    ];

    /// Name in messages, events and options.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Tree => "tree",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Pairwise => "pairwise",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(word: &str) -> Result<Algorithm, String> {
        let names = || Algorithm::ALL.map(Algorithm::name).join(", ");
        let found = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == word);
        found.ok_or_else(|| format!("algorithm: got {word:?}, expected one of {}", names()))
    }
}

/// Price of a plan, for the rank with the most work. Bytes are multiples of the buffer's size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::comm) struct Cost {
    /// Consecutive messages within a host, for plans that distinguish hosts.
    pub local_steps: f64,
    /// Bytes sent or received within a host, the larger of the two.
    pub local_bytes: f64,
    /// Consecutive messages between hosts, or between any ranks.
    pub steps: f64,
    /// Bytes that a host link carries in one direction; for flat plans, bytes of one rank.
    pub bytes: f64,
    pub reduced: f64,
}

impl Cost {
    /// A plan that does not distinguish hosts.
    pub fn flat(steps: f64, bytes: f64, reduced: f64) -> Cost {
        Cost { local_steps: 0.0, local_bytes: 0.0, steps, bytes, reduced }
    }
}

/// Latency in seconds and rate in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::comm) struct Path {
    pub latency: f64,
    pub rate: f64,
}

impl Path {
    /// Between processes of one host, through memory.
    pub const MEMORY: Path = Path { latency: 1e-6, rate: 8e9 };
    /// Between processes of one host, over TCP: `collectives.md` §2.1, half of the kernel's copy
    /// rate.
    pub const LOOPBACK: Path = Path { latency: 6e-6, rate: 2e9 };
    /// Between hosts, before a measurement: 10 Gbit/s.
    pub const NETWORK: Path = Path { latency: 25e-6, rate: 1.25e9 };

    /// This path with a measured rate, in steps of a factor of two: noise in the measurement must
    /// not change the algorithm, and with it the bits of a sum, from run to run.
    pub fn with_rate(self, measured: f64) -> Path {
        if !measured.is_finite() || measured < 1.0 {
            return self;
        }
        Path { rate: measured.log2().round().exp2(), ..self }
    }
}

/// Figures of the links, equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::comm) struct CostModel {
    pub local: Path,
    pub remote: Path,
}

/// Share of the links' rate that flat plans other than a ring reach between three or more hosts.
/// Streams of several partners meet at one host while another link idles. Measured with halving
/// and doubling between four hosts: 86 % of plain streams, a ring 100 %.
const CHANGING_PARTNERS: f64 = 0.86;

/// Bytes that a CPU combines per second: a fused pass beyond the cache, `collectives.md` §2.1.
const REDUCTION_RATE: f64 = 10e9;

impl CostModel {
    /// Predicted seconds of a collective over `bytes` bytes.
    fn seconds(&self, cost: Cost, layout: &Layout, bytes: usize, is_ring: bool) -> f64 {
        let bytes = bytes as f64;
        let hosts = layout.by_host();
        let path = if hosts.len() > 1 { self.remote } else { self.local };
        // In a ring over hosts in rank order, one rank per host sends to another host. Other flat
        // plans share the link of a host among its ranks.
        let changes_partners = hosts.len() > 1 && !is_ring && cost.local_steps == 0.0;
        let sharing = match hosts.iter().map(Vec::len).max() {
            Some(ranks) if changes_partners => ranks as f64,
            _ => 1.0,
        };
        let efficiency = if changes_partners && hosts.len() > 2 { CHANGING_PARTNERS } else { 1.0 };
        cost.local_steps * self.local.latency
            + cost.local_bytes * bytes / self.local.rate
            + cost.steps * path.latency
            + cost.bytes * sharing * bytes / (path.rate * efficiency)
            + cost.reduced * bytes / REDUCTION_RATE
    }

    /// The algorithm with the lowest predicted time; `allowed` filters the candidates. `None` if
    /// no allowed algorithm can do it.
    pub fn choose(
        &self,
        layout: &Layout,
        collective: Collective,
        bytes: usize,
        allowed: impl Fn(Algorithm) -> bool,
    ) -> Option<Algorithm> {
        let mut best: Option<(f64, Algorithm)> = None;
        for definition in DEFINITIONS {
            let algorithm = definition.algorithm;
            if !allowed(algorithm) || algorithm.program(layout, collective).is_none() {
                continue;
            }
            let cost = (definition.cost)(layout, collective);
            let seconds = self.seconds(cost, layout, bytes, algorithm == Algorithm::Ring);
            if best.is_none_or(|(fastest, _)| seconds < fastest) {
                best = Some((seconds, algorithm));
            }
        }
        best.map(|(_, algorithm)| algorithm)
    }
}
