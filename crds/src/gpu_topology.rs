//! `GPUTopology`: what one machine is made of, as its node agent reads it.
//!
//! Cluster-scoped and named like the node. There is nothing to ask for, so `spec` is empty; everything is in
//! [`GPUTopologyStatus`]. Three habits hold for every field:
//!
//! * **Unknown is absent**, never 0: a NIC without `numaNode` is one whose NUMA node the kernel does not know.
//! * **Facts only, no counters.** Nothing here changes while the machine runs undisturbed (free memory, temperatures
//!   and error counts do), so that an agent can write on change only.
//! * **Every list of facts says where it comes from** and whether it is complete: see [`FactSource`].
//!
//! CPU lists are the kernel's (`0-3,8`): sorted, without overlap, neighbours joined.

use crate::device_use::{DeviceUse, IN_USE_KEYS, KubeletPolicies};
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
    /// Which host this is. Two names for the same `bootID` are the same running kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_identity: Option<HostIdentity>,
    /// GPUs the driver counts; more than entries in `gpus` when one of them cannot be read. Absent when they could not
    /// be counted: no driver is not the same as no GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_count: Option<u32>,
    /// Number of entries in `nics`. Absent when the network devices could not be listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_count: Option<u32>,
    /// Number of entries in `numaNodes`. Absent when the kernel does not tell.
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
    /// Kernel and limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Where each list of facts comes from, and what is missing there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["facts".into()]))]
    #[schemars(length(max = 16))]
    pub sources: Vec<FactSource>,
    /// Devices that the kubelet gave to containers, in the order of their keys. Absent when it could not be asked.
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
    /// Random id the kernel draws at every boot. Shared by all containers of a host.
    #[serde(default, rename = "bootID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub boot_id: Option<String>,
    /// Name of the host as the agent sees it; in a container, the container's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub hostname: Option<String>,
}

/// Processors and caches.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Cpus {
    /// Marketing name of the first processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub model: Option<String>,
    /// Vendor as the processor names it, for example `GenuineIntel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub vendor: Option<String>,
    /// Instruction set as `uname -m` says it, for example `x86_64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub architecture: Option<String>,
    /// Processor packages with at least one CPU that is online.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u32>,
    /// Cores with at least one CPU that is online, over all sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// CPUs that are online (hardware threads), over all sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// All CPUs that are online, as a CPU list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub online: Option<String>,
    /// CPUs the agent itself may run on, as a CPU list: its affinity mask, which is that of its container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub usable: Option<String>,
    /// Limit of CPU time of the agent's control group, thousandths of a CPU: the lowest on the way up to the root.
    /// Absent when there is no limit, or none can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_millicores: Option<u64>,
    /// The CPUs of each core, one CPU list per core, in ascending order of the first CPU. A core without
    /// simultaneous multithreading has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub siblings: Vec<String>,
    /// Caches by kind, nearest to the core first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub caches: Vec<Cache>,
}

/// All caches of one kind.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Cache {
    /// Distance from the core: 1, 2, 3 or 4.
    pub level: u32,
    /// What it holds.
    #[serde(rename = "type")]
    pub kind: CacheKind,
    /// Size of one of them, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The CPUs that share one, a CPU list per cache, in ascending order of the first CPU.
    #[schemars(length(max = 4096), inner(length(max = 8192)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub shared_by: Vec<String>,
}

/// What a cache holds.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKind {
    /// Data only.
    Data,
    /// Instructions only.
    Instruction,
    /// Both.
    Unified,
}

/// One NUMA node.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NumaNode {
    /// The kernel's number. Numbers may have gaps.
    pub id: u32,
    /// Its CPUs that are online, as a CPU list. Empty for a node of memory only; absent when it cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub cpus: Option<String>,
    /// Its memory, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Relative cost of memory access from this node to every node of `numaNodes`, itself included, in that order.
    /// 10 is local; 21 is 2.1 times as far. The firmware's figures, not measurements.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub distances: Vec<u32>,
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
    /// NUMA node of the PCI device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Root complex, the first element of `pciePath`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub pcie_root: Option<String>,
    /// The way from the root complex (`pci0000:17`) over all bridges to the device, the device last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pcie_path: Vec<String>,
    /// Whether the GPU is split into instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// What the driver says about its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<GpuHealth>,
}

/// Multi-instance GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// The current mode.
    pub mode: MigMode,
}

/// Mode of multi-instance GPU.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigMode {
    /// One whole GPU.
    Disabled,
    /// Split into instances.
    Enabled,
}

/// What the driver says about a GPU's state.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GpuHealth {
    /// What the driver asks for: `None`, `GPUReset`, `NodeReboot`, `DrainP2P`, `DrainAndReset`, or `Code` and a number
    /// of a newer driver.
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
    /// UUID of the other one.
    #[schemars(length(max = 96))]
    pub b: String,
    /// What connects them.
    pub kind: LinkKind,
    /// Active NVLinks between the two. Behind a switch: the lower of what each has to switches. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Whether NVLinks go through a switch. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<LinkVia>,
    /// Speed of all active NVLinks together, one direction, megabytes (10^6) per second. Absent for `PCIe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub megabytes_per_second: Option<u64>,
    /// Where two GPUs meet on the PCIe side, in the words of `nvidia-smi topo`. Absent for `NVLink`.
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

/// Where two PCIe devices meet, in the words of `nvidia-smi topo`.
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
    /// Speed of the link, one direction, megabits (10^6) per second: the RDMA port's rate if there is one, else the
    /// interface's. Absent when the link is down or the driver does not tell, as for most virtual devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_megabits_per_second: Option<u64>,
    /// State of the RDMA port (`Active`, `Down`, …) if there is one, else of the interface (`Up`, `Down`, `Unknown`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub state: Option<String>,
    /// NUMA node of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// The way from the root complex over all bridges to the device, the device last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 64)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pcie_path: Vec<String>,
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

/// Kernel and limits.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// Release of the kernel, as `uname -r` says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub kernel: Option<String>,
    /// Version of the NVIDIA driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub driver: Option<String>,
    /// Memory a process may lock: `Unlimited` or bytes. It is the agent's own soft limit, which is the container
    /// runtime's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub locked_memory_limit: Option<String>,
    /// Size of `/dev/shm` as the agent sees it, bytes: the container runtime's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory_bytes: Option<u64>,
    /// Interface of the IPv4 default route with the lowest metric, or, without one, of the IPv6 default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub default_route: Option<String>,
    /// How the kubelet places containers on CPUs, memory and devices. Absent when its configuration cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletPolicies>,
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
mod tests {
    use super::*;
    use kube::CustomResourceExt;
    use serde_json::Value;

    /// Calls `visit` with the path and the schema of every property.
    fn walk(path: &str, schema: &Value, visit: &mut dyn FnMut(&str, &Value)) {
        visit(path, schema);
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            for (name, property) in properties {
                walk(&format!("{path}.{name}"), property, visit);
            }
        }
        if let Some(items) = schema.get("items") {
            walk(&format!("{path}[]"), items, visit);
        }
    }

    fn status_schema() -> Value {
        let crd = serde_json::to_value(GPUTopology::crd()).expect("a CRD is JSON");
        crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"].clone()
    }

    #[test]
    fn names_and_scope() {
        let crd = GPUTopology::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("gputopologies.training.switchyard.dev"));
        assert_eq!(crd.spec.scope, "Cluster");
        assert_eq!(crd.spec.names.short_names, Some(vec!["gputopo".to_owned()]));
        assert_eq!(crd.spec.names.categories, Some(vec!["switchyard".to_owned()]));
        assert!(crd.spec.versions[0].subresources.as_ref().is_some_and(|sub| sub.status.is_some()));
    }

    #[test]
    fn schema_follows_the_conventions() {
        let mut faults = Vec::new();
        let mut seen = 0;
        walk("status", &status_schema(), &mut |path, schema| {
            // The type of Kubernetes, as it is.
            if path.starts_with("status.conditions[]") {
                return;
            }
            seen += 1;
            let text = |key: &str| schema.get(key).and_then(Value::as_str).unwrap_or_default();
            match text("type") {
                "string" if text("format") == "date-time" || schema.get("enum").is_some() => {}
                "string" if schema.get("maxLength").is_none() => faults.push(format!("{path}: no maxLength")),
                "array" if schema.get("maxItems").is_none() => faults.push(format!("{path}: no maxItems")),
                "number" | "boolean" => faults.push(format!("{path}: {}", text("type"))),
                "object" if schema.get("additionalProperties").is_some() => faults.push(format!("{path}: map")),
                "integer" if !["int32", "int64"].contains(&text("format")) => {
                    faults.push(format!("{path}: format {}", text("format")));
                }
                "integer" if schema.get("minimum").is_none() => faults.push(format!("{path}: no minimum")),
                _ => {}
            }
            if !path.ends_with(']') && text("description").is_empty() {
                faults.push(format!("{path}: no description"));
            }
        });
        assert_eq!(faults, Vec::<String>::new());
        assert!(seen > 60, "the walk saw {seen} properties only");
    }

    #[test]
    fn lists_of_named_objects_merge_by_key() {
        let schema = status_schema();
        for (list, keys) in [
            ("numaNodes", vec!["id"]),
            ("gpus", vec!["uuid"]),
            ("links", vec!["a", "b", "kind"]),
            ("nics", vec!["name"]),
            ("sources", vec!["facts"]),
            ("inUse", IN_USE_KEYS.to_vec()),
            ("conditions", vec!["type"]),
        ] {
            let property = &schema["properties"][list];
            assert_eq!(property["x-kubernetes-list-type"], "map", "{list}");
            assert_eq!(property["x-kubernetes-list-map-keys"], serde_json::json!(keys), "{list}");
            for key in keys {
                let required = property["items"]["required"].as_array().expect("keys are required");
                assert!(required.contains(&Value::from(key)), "{list}.{key} is a key and must be required");
            }
        }
    }

    #[test]
    fn unknown_is_absent_in_json() {
        let nic = Nic { name: "eth0".to_owned(), ..Nic::default() };
        assert_eq!(
            serde_json::to_value(nic).expect("a NIC is JSON"),
            serde_json::json!({"name": "eth0", "kind": "Physical"})
        );
        let status = serde_json::to_value(GPUTopologyStatus::default()).expect("a status is JSON");
        assert_eq!(status, serde_json::json!({}));
    }
}
