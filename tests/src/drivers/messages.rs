//! Messages between a kubelet and its node's plugins. Field numbers are from the Kubernetes
//! `api.proto` files (k8s.io/kubelet/pkg/apis: pluginregistration/v1, dra/v1,
//! deviceplugin/v1beta1). Unused fields are omitted.

use std::collections::HashMap;

/// Self-description of a plugin.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PluginInfo {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub endpoint: String,
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// Result of the registration, from the kubelet.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A message whose fields, if any, are not read here.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Empty {}

/// Claims to prepare or unprepare.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Claims {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Claim {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// Response to `NodePrepareResources`, by claim UID.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Prepared {
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, PreparedClaim>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PreparedClaim {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<PreparedDevice>,
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PreparedDevice {
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    #[prost(string, tag = "2")]
    pub pool_name: String,
    #[prost(string, tag = "3")]
    pub device_name: String,
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
}

/// Response to `NodeUnprepareResources`, by claim UID.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Unprepared {
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, UnpreparedClaim>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct UnpreparedClaim {
    #[prost(string, tag = "1")]
    pub error: String,
}

/// Devices of a device plugin.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Devices {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Device {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub health: String,
}

/// Request of `Allocate`, by container.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Allocate {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<AllocateContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AllocateContainer {
    #[prost(string, repeated, tag = "1")]
    pub devices: Vec<String>,
}

/// Response to `Allocate`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Allocated {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<AllocatedContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AllocatedContainer {
    #[prost(map = "string, string", tag = "1")]
    pub environment: HashMap<String, String>,
}
