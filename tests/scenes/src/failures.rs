//! Failures of a machine.

use crate::scene::SceneError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// All current failures. GPUs are given by index.
#[derive(Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Failures {
    /// Whether the driver responds.
    pub driver: Driver,
    /// GPUs that the driver counts but cannot reach.
    pub lost: Vec<u32>,
    /// NVLinks that are down, by GPU, in the format of CPU lists (`0-3,8`).
    pub nvlinks_down: BTreeMap<u32, String>,
    /// Lanes in use on a GPU's PCIe link.
    pub gpu_width: BTreeMap<u32, u32>,
    /// Lanes in use on a NIC's PCIe link, by RDMA device.
    pub nic_width: BTreeMap<String, u32>,
    /// GPUs whose NUMA node neither kernel nor driver knows.
    pub numa_unknown: Vec<u32>,
    /// Recovery action of the driver, by GPU: an `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery: BTreeMap<u32, u32>,
    /// Memory rows that will be remapped at the next reset.
    pub rows_pending: Vec<u32>,
    /// Memory rows that could not be remapped.
    pub rows_failed: Vec<u32>,
    /// Fabric registrations that differ from the scene's.
    pub fabric: BTreeMap<u32, FabricFailure>,
    /// Errors reported by the driver so far. A reader sees those that occur after it has
    /// registered.
    pub xids: Vec<Xid>,
}

impl Failures {
    /// Parses failures.
    ///
    /// # Errors
    /// The text is not valid JSON for failures.
    pub fn parse(text: &str) -> Result<Failures, SceneError> {
        Ok(serde_json::from_str(text)?)
    }
}

/// Whether the driver responds.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Driver {
    /// The driver responds.
    #[default]
    Running,
    /// NVML cannot be initialised. Clients that have initialised it must do so again.
    Restarting,
}

/// Fabric registration; absent fields are as in the scene.
#[derive(Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FabricFailure {
    /// An `nvmlGpuFabricState_t`.
    pub state: Option<u8>,
    /// Part of the cluster.
    pub clique: Option<u32>,
    /// Health mask.
    pub mask: Option<u32>,
    /// Health summary.
    pub summary: Option<u8>,
}

/// An error that the driver reports as an event.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    /// Index of the GPU.
    pub gpu: u32,
    /// XID number.
    pub xid: u64,
}
