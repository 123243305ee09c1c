//! Kernel times of a rank's GPU in the profiled steps. These run eagerly because a graph cannot be
//! timed from inside.

use crate::prediction::{Cost, Part};
use serde::{Deserialize, Serialize};

/// `record/rank-R.kernels.json` in a run directory. Times are device clock times.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelTimes {
    /// Attempt that was profiled.
    pub attempt: u32,
    /// Profiled steps; all other figures are sums over them.
    pub steps: u64,
    /// Name of the GPU.
    pub gpu: String,
    /// f32 matrix products use TF32.
    pub tf32: bool,
    /// Launches grouped by equal cost, in the order of their first launch.
    pub kernels: Vec<Launches>,
    /// Idle time between a launch and the next one of the same step.
    pub gaps: Gaps,
    /// Host-to-device copies of batches, alongside the launches.
    pub copies: Copies,
}

/// Launches of a kernel with equal cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Launches {
    /// Part of the step.
    pub part: Part,
    /// Kernel name; `product` and `copy` are not our kernels.
    pub name: String,
    /// Number of launches.
    pub launches: u64,
    /// Cost of each launch.
    pub cost: Cost,
    /// Tensors are 16-bit.
    pub half: bool,
    /// A product that tensor cores can compute without padding: the contiguous sides of its factors
    /// are multiples of 16 bytes. Also true for 16-bit attention.
    pub aligned: bool,
    /// Total seconds.
    pub seconds: f64,
}

/// Time without a running launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gaps {
    /// Number of gaps.
    pub count: u64,
    /// Total seconds.
    pub seconds: f64,
    /// Seconds of the longest gap.
    pub longest_seconds: f64,
}

/// Host-to-device copies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Copies {
    /// Number of copies.
    pub count: u64,
    /// Total bytes.
    pub bytes: u64,
    /// Total seconds.
    pub seconds: f64,
}
