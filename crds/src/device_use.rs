//! Device assignments of a machine, and how its kubelet places containers: the parts of a
//! [`GPUTopology`] that come from the kubelet.
//!
//! [`GPUTopology`]: crate::gpu_topology::GPUTopology

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// List map keys of `inUse`. Containers can share a device, and a container can have many.
pub(crate) const IN_USE_KEYS: [&str; 5] = ["device", "resource", "namespace", "pod", "container"];

/// A device that the kubelet assigned to a container.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct DeviceUse {
    /// Device name from the plugin or driver: usually the UUID of a GPU, or the PCI address of a
    /// NIC.
    #[schemars(length(max = 256))]
    pub device: String,
    /// Resource through which it was assigned, for example `nvidia.com/gpu`; for a claim, the name
    /// of the driver.
    #[schemars(length(max = 256))]
    pub resource: String,
    /// Namespace of the pod.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Name of the container.
    #[schemars(length(max = 253))]
    pub container: String,
    /// How the device was assigned.
    pub source: DeviceUseSource,
    /// The claim that holds the device. Absent for `DevicePlugin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<DeviceClaim>,
}

/// How a container got a device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceUseSource {
    /// An extended resource of a device plugin.
    DevicePlugin,
    /// A ResourceClaim (dynamic resource allocation).
    DynamicResource,
}

/// A ResourceClaim through which a container got a device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct DeviceClaim {
    /// Name of the ResourceClaim, in the namespace of the pod.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The driver's pool that contains the device.
    #[schemars(length(max = 253))]
    pub pool: String,
    /// CDI names that the container runtime uses to add the device to the container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 256)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub cdi_devices: Vec<String>,
}

/// How the kubelet places containers, as spelled in its configuration. A policy that the
/// configuration does not name is absent; the kubelet's default then applies, unless a flag sets
/// another one.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct KubeletPolicies {
    /// `cpuManagerPolicy`: `none` or `static`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub cpu_manager: Option<String>,
    /// `memoryManagerPolicy`: `None` or `Static`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub memory_manager: Option<String>,
    /// `topologyManagerPolicy`: `none`, `best-effort`, `restricted` or `single-numa-node`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub topology_manager: Option<String>,
    /// `topologyManagerScope`: `container` or `pod`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub topology_manager_scope: Option<String>,
}
