//! The NVLink fabric: switches of a machine, and its position among machines that share one.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// NVSwitches of a machine.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NvSwitch {
    /// Switches on the PCI bus. Absent if there are none: an NVL72 has its switches in separate
    /// trays, and a virtual machine can have the GPUs without the switches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// GPUs with at least one active NVLink to a switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
}

/// Registration of a GPU with the fabric manager.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Fabric {
    /// State of the registration with the fabric manager.
    pub state: FabricState,
    /// Result of the registration once it is complete: `Success`, or `Code` and the number of an
    /// NVML error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub result: Option<String>,
    /// Cluster of machines that share NVLinks. Absent for a single machine, whose driver reports
    /// all zeros.
    #[serde(default, rename = "clusterUUID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub cluster_uuid: Option<String>,
    /// Part of the cluster whose GPUs reach each other. Absent without `clusterUUID`.
    #[serde(default, rename = "cliqueID", skip_serializing_if = "Option::is_none")]
    pub clique_id: Option<u32>,
    /// Health, if the driver reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<FabricHealth>,
}

/// State of the registration with the fabric manager.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricState {
    /// The fabric manager has not registered the GPU yet.
    NotStarted,
    /// In progress.
    InProgress,
    /// Done: see `result`.
    Completed,
}

/// Health of a GPU's fabric connection.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FabricHealth {
    /// The driver's summary; for drivers without one, `Unhealthy` if there is a fault.
    pub summary: FabricSummary,
    /// Faults: `DegradedBandwidth`, `RouteRecovery`, `RouteUnhealthy`, `AccessTimeoutRecovery`,
    /// `IncorrectSystemGUID`, `IncorrectChassisSerial`, `NoPartition`, `InsufficientNVLinks`, or
    /// `Configuration` and a number that only a newer driver defines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub faults: Vec<String>,
}

/// Health summary.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricSummary {
    /// No faults.
    Healthy,
    /// Not usable.
    Unhealthy,
    /// Usable, with reduced capacity.
    LimitedCapacity,
}
