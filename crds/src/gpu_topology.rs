//! `GPUTopology`: the hardware of one machine, as its node agent reads it.
//!
//! Cluster-scoped and named like the node. There is nothing to request, so `spec` is empty;
//! everything is in [`GPUTopologyStatus`]. Three rules hold for every field:
//!
//! * **Unknown is absent**, never 0: a NIC without `numaNode` is one whose NUMA node the kernel
//!   does not know.
//! * **Facts only, no counters.** Values that change while the machine runs undisturbed (free
//!   memory, temperatures, error counts) are excluded, so that an agent writes only on change.
//! * **Every list of facts states its source** and whether it is complete: see [`FactSource`].
//!
//! CPU lists use the kernel's format (`0-3,8`): sorted, without overlap, neighbours joined.

use crate::device_use::{DeviceUse, IN_USE_KEYS};
mod cpus;
mod fabric;
mod gpu;
mod host;
mod nic;

pub use cpus::*;
pub use fabric::*;
pub use gpu::*;
pub use host::*;
pub use nic::*;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Empty: a GPUTopology is reported, never requested.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[kube(
    group = "training.switchyard.dev",
    version = "v1alpha1",
    kind = "GPUTopology",
    plural = "gputopologies",
    singular = "gputopology",
    shortname = "gputopo",
    category = "switchyard",
    status = "GPUTopologyStatus",
    derive = "PartialEq",
    doc = "Hardware of one machine: CPUs, NUMA nodes, GPUs, NICs and how they are connected. Named like its node.",
    printcolumn = r#"{"name":"GPUs","type":"integer","jsonPath":".status.gpuCount"}"#,
    printcolumn = r#"{"name":"NICs","type":"integer","jsonPath":".status.nicCount"}"#,
    printcolumn = r#"{"name":"NUMA","type":"integer","jsonPath":".status.numaNodeCount"}"#,
    printcolumn = r#"{"name":"CPUs","type":"integer","jsonPath":".status.cpus.threads"}"#,
    printcolumn = r#"{"name":"Observed","type":"date","jsonPath":".status.observedTime"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GPUTopologySpec {}

/// Facts found by the agent.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = signed_integer_formats)]
pub struct GPUTopologyStatus {
    /// When the facts were read. Written together with a changed fact, and otherwise renewed every
    /// ten minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_time: Option<Time>,
    /// Version of the agent that read the facts, as `MAJOR.MINOR.PATCH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub agent_version: Option<String>,
    /// Identity of the host. Two names with the same `bootID` are the same running kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_identity: Option<HostIdentity>,
    /// Number of GPUs that the driver counts; higher than the number of entries in `gpus` if one of
    /// them is unreadable. Absent if they could not be counted: no driver is not the same as no
    /// GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_count: Option<u32>,
    /// Number of entries in `nics`. Absent if the network devices could not be listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_count: Option<u32>,
    /// Number of entries in `numaNodes`. Absent if the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node_count: Option<u32>,
    /// Total memory that the kernel manages, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Processors and caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Cpus>,
    /// NUMA nodes in ascending order of their id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    #[schemars(length(max = 1024))]
    pub numa_nodes: Vec<NumaNode>,
    /// GPUs in ascending order of their NVML index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uuid".into()]))]
    #[schemars(length(max = 64))]
    pub gpus: Vec<Gpu>,
    /// Connections between two GPUs. At most one entry per pair and kind; `a` has the lower index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["a".into(), "b".into(), "kind".into()]))]
    #[schemars(length(max = 4096))]
    pub links: Vec<Link>,
    /// Network devices in ascending order of their name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    #[schemars(length(max = 256))]
    pub nics: Vec<Nic>,
    /// NVSwitches of this machine. Absent if nothing indicates one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvswitch: Option<NvSwitch>,
    /// Position of this machine in the NVLink fabric, as all GPUs report it. Absent if they
    /// disagree or report nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Kernel, driver and limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Speeds measured on this machine and provided to the agent in a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["link".into()]))]
    #[schemars(length(max = 8))]
    pub measured: Vec<Measured>,
    /// Source of each list of facts, and what is missing in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["facts".into()]))]
    #[schemars(length(max = 16))]
    pub sources: Vec<FactSource>,
    /// Devices that the kubelet assigned to containers, in key order. Absent if the kubelet could
    /// not be queried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(IN_USE_KEYS.map(String::from).into()))]
    #[schemars(length(max = 1024))]
    pub in_use: Vec<DeviceUse>,
    /// `Reported`: all sources were readable. `Consistent`: the facts do not contradict each other.
    /// `Fresh`: the facts are current; if `observedTime` is older than half an hour, no agent
    /// reports, whatever this condition says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl GPUTopologyStatus {
    /// The source of one group of facts.
    pub fn source(&self, facts: Facts) -> Option<&FactSource> {
        self.sources.iter().find(|source| source.facts == facts)
    }
}

/// Identity of a host.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HostIdentity {
    /// Random id that the kernel generates at every boot. Shared by all containers of a host.
    #[serde(default, rename = "bootID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub boot_id: Option<String>,
    /// Host name as the agent sees it; in a container, the container's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub hostname: Option<String>,
}

/// One GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// NVML index, in order of the bus id. Can change if a GPU is lost.
    pub index: u32,
    /// Stable name, `GPU-` and a UUID.
    #[schemars(length(max = 96))]
    pub uuid: String,
    /// PCI address, `0000:1b:00.0`: hexadecimal, lower case, domain of at least four digits.
    #[serde(default, rename = "busID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub bus_id: Option<String>,
    /// Product name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub model: Option<String>,
    /// Total memory, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// NUMA node of the PCI device: from the kernel, otherwise the first node of the driver's
    /// memory affinity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// NUMA node of the GPU's own memory, on machines where it is a NUMA node (Grace).
    #[serde(default, rename = "memoryNUMANode", skip_serializing_if = "Option::is_none")]
    pub memory_numa_node: Option<u32>,
    /// Root complex, the first element of `pciePath`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub pcie_root: Option<String>,
    /// Path from the root complex (`pci0000:17`) over all bridges to the device, which comes last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pcie_path: Vec<String>,
    /// Its PCIe link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_link: Option<PcieLink>,
    /// Its NVLinks. Absent for a GPU without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlinks: Option<NvLinks>,
    /// Error correction of its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc: Option<Ecc>,
    /// Fabric registration of the GPU. Absent if the driver reports no fabric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Whether the GPU is partitioned into instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Health that the driver reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<GpuHealth>,
}

/// Health of a GPU that the driver reports.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GpuHealth {
    /// Recovery action that the driver recommends: `None`, `GPUReset`, `NodeReboot`, `DrainP2P`,
    /// `DrainAndReset`, or `Code` and a number that only a newer driver defines.
    #[schemars(length(max = 32))]
    pub recovery_action: String,
}

/// A connection between two GPUs.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// UUID of the GPU with the lower index.
    #[schemars(length(max = 96))]
    pub a: String,
    /// UUID of the other GPU.
    #[schemars(length(max = 96))]
    pub b: String,
    /// What connects the two GPUs.
    pub kind: LinkKind,
    /// Active NVLinks between the two. Behind a switch: the lower of their link counts to switches.
    /// Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Whether NVLinks go through a switch. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<LinkVia>,
    /// Total speed of all active NVLinks, one-way, in megabytes (10^6) per second. Absent for
    /// `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub megabytes_per_second: Option<u64>,
    /// PCIe path class of the two GPUs, as `nvidia-smi topo` names it. Absent for `NVLink`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_class: Option<PathClass>,
}

/// What connects two GPUs.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkKind {
    /// NVLink.
    NVLink,
    /// PCIe, and the connection between two root complexes.
    PCIe,
}

/// Whether NVLinks go through a switch.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkVia {
    /// From GPU to GPU.
    Direct,
    /// Through an NVSwitch.
    Switch,
}

/// PCIe path class of two devices, as `nvidia-smi topo` names it.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathClass {
    /// On one board.
    Internal,
    /// Within one PCIe switch.
    PIX,
    /// Across several PCIe switches, without a host bridge.
    PXB,
    /// Across a host bridge.
    PHB,
    /// Between host bridges of a NUMA node.
    NODE,
    /// Between NUMA nodes.
    SYS,
}

/// A network device: every device with hardware behind it, and the device of the default route in
/// any case.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Nic {
    /// Interface name in the kernel.
    #[schemars(length(max = 32))]
    pub name: String,
    /// Kind of the device.
    pub kind: NicKind,
    /// PCI address. Absent for a device that is not on a PCI bus.
    #[serde(default, rename = "busID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub bus_id: Option<String>,
    /// Name of the RDMA device on the same PCI function, for example `mlx5_0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rdma_device: Option<String>,
    /// Port of the RDMA device, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u32>,
    /// Link layer of that port: `InfiniBand` or `Ethernet`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub link_layer: Option<String>,
    /// Speed of the link, one-way, in megabits (10^6) per second: the rate of the RDMA port if
    /// there is one, otherwise of the interface. Absent if the link is down or the driver does not
    /// report it, as with most virtual devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_megabits_per_second: Option<u64>,
    /// State of the RDMA port (`Active`, `Down`, …) if there is one, otherwise of the interface
    /// (`Up`, `Down`, `Unknown`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub state: Option<String>,
    /// NUMA node of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Path from the root complex over all bridges to the device, which comes last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pcie_path: Vec<String>,
    /// Its PCIe link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_link: Option<PcieLink>,
    /// For a virtual function, PCI address of the physical function. Both are the same port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub virtual_function_of: Option<String>,
    /// Virtual functions, for a device that supports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_functions: Option<VirtualFunctions>,
    /// Maximum packet size of the interface, in bytes.
    #[serde(default, rename = "mtuBytes", skip_serializing_if = "Option::is_none")]
    pub mtu_bytes: Option<u32>,
    /// Addresses of the RDMA port by type and family. Empty for a port without addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub gids: Vec<GidGroup>,
    /// Identifier of the RDMA device, as the kernel writes it: `a088:c203:00ab:cdef`.
    #[serde(default, rename = "nodeGUID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub node_guid: Option<String>,
    /// Firmware version of the RDMA device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub firmware: Option<String>,
    /// Character device through which programs access the RDMA device. Absent if the kernel has
    /// created none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub char_device: Option<CharDevice>,
    /// Events that the agent observed on the RDMA port. Absent if the port is not watched or has no
    /// counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_watch: Option<PortWatch>,
}

/// Kind of a network device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NicKind {
    /// Backed by a device, possibly one that a hypervisor emulates.
    #[default]
    Physical,
    /// Created by the kernel (a bridge, bond, tunnel or the end of a veth pair).
    Virtual,
}

/// Source of a group of facts.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FactSource {
    /// The group of facts.
    pub facts: Facts,
    /// What was read, for example `sysfs` or `NVML 12.580.82`.
    #[schemars(length(max = 128))]
    pub source: String,
    /// Whether everything was readable.
    pub state: SourceState,
    /// What was unreadable and why; for an empty list, why it is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}

/// A group of facts in the status.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Facts {
    /// `cpus`.
    CPUs,
    /// `numaNodes` and `memoryBytes`.
    NUMANodes,
    /// `gpus`.
    GPUs,
    /// `links`.
    Links,
    /// `nics`.
    NICs,
    /// `host` and `hostIdentity`.
    Host,
    /// `inUse`.
    InUse,
    /// `fabric`, of the machine and of each GPU.
    Fabric,
    /// `measured`.
    Measured,
}

/// Whether a group of facts was readable.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// Everything was readable.
    Complete,
    /// Some facts are missing.
    Partial,
    /// Nothing was readable.
    Unavailable,
}

/// Replaces Rust's unsigned formats, because Kubernetes knows only `int32` and `int64` and warns
/// about others. The lower bound of 0 remains.
fn signed_integer_formats(schema: &mut schemars::Schema) {
    if let Some(format) = schema.get_mut("format")
        && format.as_str().is_some_and(|text| text.starts_with("uint"))
    {
        *format = "int64".into();
    }
    schemars::transform::transform_subschemas(&mut signed_integer_formats, schema);
}

#[cfg(test)]
mod tests;
