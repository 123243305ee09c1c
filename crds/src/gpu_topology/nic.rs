//! The RDMA and PCI side of a network device.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Virtual functions of a device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct VirtualFunctions {
    /// As many as there are now.
    pub enabled: u32,
    /// As many as there can be.
    pub total: u32,
}

/// Addresses (GIDs) of one type and family.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GidGroup {
    /// Type of the addresses.
    #[serde(rename = "type")]
    pub kind: GidType,
    /// Family. Absent for InfiniBand, whose addresses are of no IP family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<GidFamily>,
    /// Number of addresses.
    pub count: u32,
    /// Position of the first one in the port's table.
    pub first_index: u32,
}

/// Type of an RDMA address.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidType {
    /// InfiniBand.
    IB,
    /// RDMA over converged Ethernet in frames of its own, which no router passes on.
    RoCEv1,
    /// RDMA over converged Ethernet in UDP.
    RoCEv2,
}

/// IP family of an RDMA address.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidFamily {
    /// An IPv4 address written as an IPv6 one.
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
    /// Whether it is there.
    pub state: FileState,
}

/// Whether a file is there.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// It is.
    Present,
    /// It is not: programs cannot reach what is behind it.
    Missing,
}
