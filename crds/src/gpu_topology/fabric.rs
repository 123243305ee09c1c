//! The NVLink fabric: switches of a machine, and its place among machines that share one.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// NVSwitches of a machine.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NvSwitch {
    /// Switches on the PCI bus. Absent when there are none: those of an NVL72 are in separate trays, and a virtual machine may
    /// have the GPUs without the switches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// GPUs with at least one NVLink to a switch that is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
}

/// A place in the fabric, as the fabric manager gave it to a GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Fabric {
    /// State of the registration with the fabric manager.
    pub state: FabricState,
    /// Result of the registration once it is complete: `Success`, or `Code` and the number of an NVML error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub result: Option<String>,
    /// The cluster of machines that share NVLinks. Absent for a single machine, whose driver reports all zeros.
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
    /// No fabric manager has spoken yet.
    NotStarted,
    /// Under way.
    InProgress,
    /// Done: see `result`.
    Completed,
}

/// Health of a GPU's place in the fabric.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FabricHealth {
    /// The driver's summary; from drivers without one, `Unhealthy` if there is a fault.
    pub summary: FabricSummary,
    /// What is wrong: `DegradedBandwidth`, `RouteRecovery`, `RouteUnhealthy`, `AccessTimeoutRecovery`, `IncorrectSystemGUID`,
    /// `IncorrectChassisSerial`, `NoPartition`, `InsufficientNVLinks`, or `Configuration` and a number that only a newer driver
    /// defines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub faults: Vec<String>,
}

/// Health in one word.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricSummary {
    /// Nothing is wrong.
    Healthy,
    /// Not usable.
    Unhealthy,
    /// Usable, with less than it could have.
    LimitedCapacity,
}
