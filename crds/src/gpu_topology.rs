//! `GPUTopology`: what one machine is made of, as its node agent reads it.
//!
//! Cluster-scoped and named like the node. There is nothing to ask for, so `spec` is empty; everything is in
//! [`GPUTopologyStatus`]. Three rules hold for every field:
//!
//! * **Unknown is absent**, never 0: a NIC without `numaNode` is one whose NUMA node the kernel does not know.
//! * **Facts only, no counters.** Nothing here changes while the machine runs undisturbed (free memory, temperatures
//!   and error counts do), so that an agent can write on change only.
//! * **Every list of facts says where it comes from** and whether it is complete: see [`FactSource`].
//!
//! CPU lists are the kernel's (`0-3,8`): sorted, without overlap, neighbours joined.

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

/// Nothing: a GPUTopology is reported, never asked for.
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
    doc = "What one machine is made of: CPUs, NUMA nodes, GPUs, NICs and how they are connected. Named like its node.",
    printcolumn = r#"{"name":"GPUs","type":"integer","jsonPath":".status.gpuCount"}"#,
    printcolumn = r#"{"name":"NICs","type":"integer","jsonPath":".status.nicCount"}"#,
    printcolumn = r#"{"name":"NUMA","type":"integer","jsonPath":".status.numaNodeCount"}"#,
    printcolumn = r#"{"name":"CPUs","type":"integer","jsonPath":".status.cpus.threads"}"#,
    printcolumn = r#"{"name":"Observed","type":"date","jsonPath":".status.observedTime"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GPUTopologySpec {}

/// What the agent found.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = signed_integer_formats)]
pub struct GPUTopologyStatus {
    /// When the facts were read. Written together with a changed fact, and otherwise renewed every ten minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_time: Option<Time>,
    /// Version of the agent that read them, as `MAJOR.MINOR.PATCH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub agent_version: Option<String>,
    /// Which host this is. Two names with the same `bootID` are the same running kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_identity: Option<HostIdentity>,
    /// GPUs the driver counts; more than entries in `gpus` when one of them cannot be read. Absent when they could not
    /// be counted: no driver is not the same as no GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_count: Option<u32>,
    /// Number of entries in `nics`. Absent when the network devices could not be listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_count: Option<u32>,
    /// Number of entries in `numaNodes`. Absent when the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node_count: Option<u32>,
    /// Total memory the kernel manages, bytes.
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
    /// NVSwitches of this machine. Absent when nothing indicates one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvswitch: Option<NvSwitch>,
    /// Where the fabric manager has put this machine, as all GPUs report it. Absent when they disagree or report nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Kernel, driver and limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Speeds that somebody measured on this machine and left in a file for the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["link".into()]))]
    #[schemars(length(max = 8))]
    pub measured: Vec<Measured>,
    /// Where each list of facts comes from, and what is missing in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["facts".into()]))]
    #[schemars(length(max = 16))]
    pub sources: Vec<FactSource>,
    /// Devices that the kubelet gave to containers, in the order of their keys. Absent when the kubelet could not be asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(IN_USE_KEYS.map(String::from).into()))]
    #[schemars(length(max = 1024))]
    pub in_use: Vec<DeviceUse>,
    /// `Reported`: all sources could be read. `Consistent`: the facts do not contradict each other. `Fresh`: the facts are of
    /// now; when nobody has renewed `observedTime` for half an hour, no agent reports, whatever this says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl GPUTopologyStatus {
    /// Where the facts of one group come from.
    pub fn source(&self, facts: Facts) -> Option<&FactSource> {
        self.sources.iter().find(|source| source.facts == facts)
    }
}

/// Which host this is.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HostIdentity {
    /// Random id that the kernel creates at every boot. Shared by all containers of a host.
    #[serde(default, rename = "bootID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub boot_id: Option<String>,
    /// Name of the host as the agent sees it; in a container, the container's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub hostname: Option<String>,
}

/// One GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// NVML's number, in order of the bus id. May change when a GPU is lost.
    pub index: u32,
    /// The stable name, `GPU-` and a UUID.
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
    /// NUMA node of the PCI device: from the kernel, else the first node of the driver's memory affinity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// NUMA node of the GPU's own memory, on machines where that is a NUMA node (Grace).
    #[serde(default, rename = "memoryNUMANode", skip_serializing_if = "Option::is_none")]
    pub memory_numa_node: Option<u32>,
    /// Root complex, the first element of `pciePath`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub pcie_root: Option<String>,
    /// The path from the root complex (`pci0000:17`) over all bridges to the device, which comes last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pcie_path: Vec<String>,
    /// Its PCIe link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_link: Option<PcieLink>,
    /// Its NVLinks. Absent for a GPU that has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlinks: Option<NvLinks>,
    /// Error correction of its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc: Option<Ecc>,
    /// What the fabric manager assigned to it. Absent if the driver knows no fabric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Whether the GPU is split into instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// What the driver says about its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<GpuHealth>,
}

/// What the driver says about a GPU's state.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GpuHealth {
    /// What the driver asks for: `None`, `GPUReset`, `NodeReboot`, `DrainP2P`, `DrainAndReset`, or `Code` and a number that only
    /// a newer driver defines.
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
    /// Active NVLinks between the two. Behind a switch: the lower number of links that either has to switches. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Whether NVLinks go through a switch. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<LinkVia>,
    /// Speed of all active NVLinks together, one direction, megabytes (10^6) per second. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub megabytes_per_second: Option<u64>,
    /// Where two GPUs meet on the PCIe side, in the terms of `nvidia-smi topo`. Absent for `NVLink`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_class: Option<PathClass>,
}

/// What connects two GPUs.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkKind {
    /// NVLink.
    NVLink,
    /// PCIe, and what lies between two root complexes.
    PCIe,
}

/// Whether NVLinks go through a switch.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkVia {
    /// From one GPU to the other.
    Direct,
    /// Through an NVSwitch.
    Switch,
}

/// Where two PCIe devices meet, in the terms of `nvidia-smi topo`.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathClass {
    /// On one board.
    Internal,
    /// In one PCIe switch.
    PIX,
    /// Over several PCIe switches without a host bridge.
    PXB,
    /// At a host bridge.
    PHB,
    /// Between host bridges of a NUMA node.
    NODE,
    /// Between NUMA nodes.
    SYS,
}

/// A network device: every one with hardware behind it, and the one of the default route whatever it is.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Nic {
    /// The kernel's name of the interface.
    #[schemars(length(max = 32))]
    pub name: String,
    /// What it is.
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
    /// Speed of the link, one direction, megabits (10^6) per second: the RDMA port's rate if there is one, else the interface's.
    /// Absent when the link is down or the driver does not report it, as for most virtual devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_megabits_per_second: Option<u64>,
    /// State of the RDMA port (`Active`, `Down`, …) if there is one, else of the interface (`Up`, `Down`, `Unknown`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub state: Option<String>,
    /// NUMA node of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// The path from the root complex over all bridges to the device, which comes last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pcie_path: Vec<String>,
    /// Its PCIe link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_link: Option<PcieLink>,
    /// PCI address of the physical function, for a virtual function: it is the same port seen twice, not another port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub virtual_function_of: Option<String>,
    /// Virtual functions, for a device that can have some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_functions: Option<VirtualFunctions>,
    /// Largest packet of the interface, bytes.
    #[serde(default, rename = "mtuBytes", skip_serializing_if = "Option::is_none")]
    pub mtu_bytes: Option<u32>,
    /// Addresses of the RDMA port by type and family. Empty for a port without any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub gids: Vec<GidGroup>,
    /// Identifier of the RDMA device, as the kernel writes it: `a088:c203:00ab:cdef`.
    #[serde(default, rename = "nodeGUID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub node_guid: Option<String>,
    /// Version of the firmware of the RDMA device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub firmware: Option<String>,
    /// The character device through which programs reach the RDMA device. Absent when the kernel has created none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub char_device: Option<CharDevice>,
    /// What the agent has seen on the RDMA port. Absent when the port is not watched or has no counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_watch: Option<PortWatch>,
}

/// What a network device is.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NicKind {
    /// Has a device of its own, which may be one that a hypervisor makes.
    #[default]
    Physical,
    /// Made by the kernel (a bridge, bond, tunnel or the end of a container's cable).
    Virtual,
}

/// Where a group of facts comes from.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FactSource {
    /// Which facts.
    pub facts: Facts,
    /// What was read, for example `sysfs` or `NVML 12.580.82`.
    #[schemars(length(max = 128))]
    pub source: String,
    /// Whether all of it could be read.
    pub state: SourceState,
    /// What could not be read and why; for an empty list, why it is empty.
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

/// Whether a group of facts could be read.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// Everything.
    Complete,
    /// Some facts are missing.
    Partial,
    /// Nothing could be read.
    Unavailable,
}

/// Kubernetes knows the formats `int32` and `int64` only and warns about the unsigned ones of Rust; the lower bound
/// of 0 stays.
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
