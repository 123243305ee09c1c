//! Ranks that hold up the others: stragglers and hung ranks.

use crate::recorder::{Entry, Operation};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The rank with the longest compute and read time, which the others waited for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slowest {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Its node, from 0.
    pub node_rank: u32,
    /// Percentage by which its time exceeds the median of the other ranks.
    pub over_percent: f64,
    /// Number of steps that the figure covers.
    pub steps: u64,
}

impl Slowest {
    /// Steps over which a straggler must be slow.
    pub const STEPS: u64 = 100;
    /// Percentage by which a straggler exceeds the median.
    pub const PERCENT: f64 = 15.0;

    /// Whether the rank has been slow enough for long enough that something must be wrong with it.
    pub fn is_straggler(&self) -> bool {
        self.steps >= Slowest::STEPS && self.over_percent >= Slowest::PERCENT
    }
}

impl fmt::Display for Slowest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slowest { rank, node_rank, over_percent, steps } = self;
        write!(
            f,
            "rank {rank} on node {node_rank}, {over_percent:.1} % over the median of the other ranks in {steps} steps"
        )?;
        if self.is_straggler() { write!(f, ": a straggler, the others wait for it") } else { Ok(()) }
    }
}

/// A hung rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stuck {
    /// Rank among all ranks of the job: the one that has hung for longest.
    pub rank: u32,
    /// Its node, from 0.
    pub node_rank: u32,
    /// Operation in which it hangs.
    pub operation: Operation,
    /// Step of that operation.
    pub step: u64,
    /// See [`Entry::index`].
    pub index: u32,
    /// Start of the hang in seconds since 1970, by the clock of its host.
    pub since: u64,
    /// Number of hung ranks, not counting those that wait for them.
    pub ranks: u32,
}

impl Stuck {
    /// Describes the operation.
    pub fn doing(&self) -> String {
        Entry { operation: self.operation, step: self.step, index: self.index, since_us: 0 }.to_string()
    }
}
