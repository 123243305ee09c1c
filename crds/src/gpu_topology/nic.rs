//! The RDMA and PCI side of a network device.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Virtual functions of a device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct VirtualFunctions {
    /// Number of virtual functions that exist now.
    pub enabled: u32,
    /// Number of virtual functions that can exist.
    pub total: u32,
}

/// Events on an RDMA port since the agent started watching: when its counters changed, not their
/// values.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PortWatch {
    /// When the agent started watching.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When the link was last observed going down (`link_downed`), even if it is up again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_link_down: Option<Time>,
    /// When one of `errors` was last observed growing. Renewed every half hour while they grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<Time>,
    /// Error counters that have grown, by kernel name: `symbol_error`, `rnr_nak_retry_err`,
    /// `packet_seq_err`, `implied_nak_seq_err`, `local_ack_timeout_err`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub errors: Vec<String>,
}

/// Addresses (GIDs) of one type and family.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GidGroup {
    /// Type of the addresses.
    #[serde(rename = "type")]
    pub kind: GidType,
    /// IP family. Absent for InfiniBand, whose addresses have no IP family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<GidFamily>,
    /// Number of addresses.
    pub count: u32,
    /// Index of the first one in the port's table.
    pub first_index: u32,
}

/// Type of an RDMA address.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidType {
    /// InfiniBand.
    IB,
    /// RDMA over converged Ethernet in its own frames, which routers do not forward.
    RoCEv1,
    /// RDMA over converged Ethernet over UDP.
    RoCEv2,
}

/// IP family of an RDMA address.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidFamily {
    /// An IPv4 address, written as IPv6.
    IPv4,
    /// IPv6.
    IPv6,
}

/// A character device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CharDevice {
    /// Path below `/dev`, for example `infiniband/uverbs0`.
    #[schemars(length(max = 64))]
    pub path: String,
    /// Whether the file exists.
    pub state: FileState,
}

/// Whether a file exists.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// The file exists.
    Present,
    /// The file does not exist, so programs cannot access the device.
    Missing,
}
