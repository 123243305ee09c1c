//! What goes wrong on a machine.

use crate::scene::SceneError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything that is wrong at a time. GPUs by their index.
#[derive(Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Failures {
    /// Whether the driver responds.
    pub driver: Driver,
    /// GPUs that the driver counts and cannot reach.
    pub lost: Vec<u32>,
    /// NVLinks that are down, by GPU, as a list like that of CPUs (`0-3,8`).
    pub nvlinks_down: BTreeMap<u32, String>,
    /// Lanes that are in use of a GPU's PCIe link.
    pub gpu_width: BTreeMap<u32, u32>,
    /// Lanes that are in use of a NIC's PCIe link, by RDMA device.
    pub nic_width: BTreeMap<String, u32>,
    /// GPUs of which neither kernel nor driver knows the NUMA node.
    pub numa_unknown: Vec<u32>,
    /// What the driver asks for, by GPU: an `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery: BTreeMap<u32, u32>,
    /// Rows of memory that wait for a reset.
    pub rows_pending: Vec<u32>,
    /// Rows of memory that could not be replaced.
    pub rows_failed: Vec<u32>,
    /// Places in the fabric that differ from that of the scene.
    pub fabric: BTreeMap<u32, FabricFailure>,
    /// Errors that the driver has reported so far; a reader sees those that come after it has registered.
    pub xids: Vec<Xid>,
}

impl Failures {
    /// Reads failures.
    ///
    /// # Errors
    /// The text is no JSON of failures.
    pub fn parse(text: &str) -> Result<Failures, SceneError> {
        Ok(serde_json::from_str(text)?)
    }
}

/// Whether the driver responds.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Driver {
    /// It does.
    #[default]
    Running,
    /// NVML cannot be initialised, and who has initialised it has to do it again.
    Restarting,
}

/// A place in the fabric; what is absent is as in the scene.
#[derive(Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FabricFailure {
    /// `nvmlGpuFabricState_t`.
    pub state: Option<u8>,
    /// Part of the cluster.
    pub clique: Option<u32>,
    /// Health mask.
    pub mask: Option<u32>,
    /// Health in one number.
    pub summary: Option<u8>,
}

/// An error that the driver reports as an event.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    /// Of which GPU.
    pub gpu: u32,
    /// Which error.
    pub xid: u64,
}
