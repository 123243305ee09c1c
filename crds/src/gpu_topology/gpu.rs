//! Details of one GPU: its links, its memory, its instances.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A PCIe link, of a GPU or of a NIC.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PcieLink {
    /// Generation at which the link runs. Absent for a GPU that slows its link to save power,
    /// because that does not indicate its speed under load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u32>,
    /// Highest generation that both ends support.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_generation: Option<u32>,
    /// Lanes in use. Fewer than `maxWidth` means a faulty card, slot or cable, even when idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// Highest number of lanes that both ends support.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_width: Option<u32>,
}

/// NVLinks of a GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NvLinks {
    /// Number of links that are up.
    pub up: u32,
    /// Numbers of the GPU's links that are down, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub down: Vec<u32>,
}

/// Error correction of a GPU's memory.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Ecc {
    /// The current mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<EccMode>,
    /// State of row remapping. Absent for models without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_remapping: Option<RowRemapping>,
}

/// Mode of error correction.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum EccMode {
    /// Off.
    Disabled,
    /// On.
    Enabled,
}

/// State of row remapping, which replaces bad rows of memory.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowRemapping {
    /// Nothing to do.
    Clean,
    /// A row will be remapped at the next reset of the GPU.
    Pending,
    /// A row could not be remapped: the GPU must be replaced.
    Failed,
}

/// Multi-instance GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// The current mode.
    pub mode: MigMode,
    /// The instances, in the driver's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uuid"]))]
    pub instances: Vec<MigInstance>,
}

/// Mode of multi-instance GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigMode {
    /// One whole GPU.
    Disabled,
    /// Split into instances.
    Enabled,
}

/// An instance of a GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// Stable name, `MIG-` and a UUID.
    #[schemars(length(max = 96))]
    pub uuid: String,
    /// Size, by the driver's name: `1g.10gb`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub profile: Option<String>,
}
