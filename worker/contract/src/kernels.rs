//! What the kernels of a rank's GPU took in the profiled steps, which are queued one by one: a graph cannot be timed from inside.

use crate::prediction::{Cost, Part};
use serde::{Deserialize, Serialize};

/// `record/rank-R.kernels.json` in a run directory. Times are by the clock of the device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelTimes {
    /// Attempt that was profiled.
    pub attempt: u32,
    /// Profiled steps; all other figures are sums over them.
    pub steps: u64,
    /// Name of the GPU.
    pub gpu: String,
    /// Products of 32-bit factors are done in TF32.
    pub tf32: bool,
    /// Launches of equal cost, in the order of their first launch.
    pub kernels: Vec<Launches>,
    /// From the end of a launch to the start of the next one of the same step.
    pub gaps: Gaps,
    /// Batches on their way to the device, beside the launches.
    pub copies: Copies,
}

/// Launches of a kernel that move and compute the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Launches {
    /// Part of the step.
    pub part: Part,
    /// Name of the kernel; `product` and `copy` are no kernels of ours.
    pub name: String,
    /// How often.
    pub launches: u64,
    /// Of each.
    pub cost: Cost,
    /// Tensors are in 16 bits.
    pub half: bool,
    /// A product that tensor cores can compute as it is: the sides along which its factors lie are multiples of 16 bytes. So are those of
    /// attention in 16 bits.
    pub aligned: bool,
    /// Seconds of all.
    pub seconds: f64,
}

/// Time without a launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gaps {
    /// How many.
    pub count: u64,
    /// Seconds of all.
    pub seconds: f64,
    /// Seconds of the longest.
    pub longest_seconds: f64,
}

/// Copies from the host to the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Copies {
    /// How many.
    pub count: u64,
    /// Bytes of all.
    pub bytes: u64,
    /// Seconds of all.
    pub seconds: f64,
}
