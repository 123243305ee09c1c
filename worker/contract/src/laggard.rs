//! Ranks that hold up the others: the one that is slow, and the one that stands still.

use crate::recorder::{Entry, Operation};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The rank that computed and read longest: the others waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slowest {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Its node, from 0.
    pub node_rank: u32,
    /// By how much its time is over the median of the other ranks, percent.
    pub over_percent: f64,
    /// Steps that the figure covers.
    pub steps: u64,
}

impl Slowest {
    /// Steps that a straggler is slow in.
    pub const STEPS: u64 = 100;
    /// By how much a straggler is over the median, percent.
    pub const PERCENT: f64 = 15.0;

    /// Whether the rank is so slow for so long that something must be wrong with it.
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

/// A rank that stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stuck {
    /// Rank among all ranks of the job: of those that stand still, the one that does so for longest.
    pub rank: u32,
    /// Its node, from 0.
    pub node_rank: u32,
    /// What it does.
    pub operation: Operation,
    /// The step that this belongs to.
    pub step: u64,
    /// See [`Entry::index`].
    pub index: u32,
    /// Since when, seconds since 1970 by the clock of its host.
    pub since: u64,
    /// Ranks that stand still, without those that wait for them.
    pub ranks: u32,
}

impl Stuck {
    /// What it does, in words.
    pub fn doing(&self) -> String {
        Entry { operation: self.operation, step: self.step, index: self.index, since_us: 0 }.to_string()
    }
}
