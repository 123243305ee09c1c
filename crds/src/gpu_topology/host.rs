//! The host of the devices: kernel, driver, limits, and measurements.

use super::CharDevice;
use crate::device_use::KubeletPolicies;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Kernel, driver and limits.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// Release of the kernel, as `uname -r` prints it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub kernel: Option<String>,
    /// Version of the NVIDIA driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub driver: Option<String>,
    /// Version of NVML.
    #[serde(default, rename = "nvmlVersion", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub nvml_version: Option<String>,
    /// Newest CUDA version that the driver supports, as `MAJOR.MINOR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub cuda_version: Option<String>,
    /// Kind of the NVIDIA kernel module. Absent when none is loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_module: Option<DriverModule>,
    /// Whether NICs can access GPU memory through the module nvidia-peermem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peermem: Option<ModuleState>,
    /// Whether NICs can access GPU memory through DMA-BUF. Inferred from its two prerequisites, the
    /// open kernel module and Linux 5.12; not tested.
    #[serde(default, rename = "dmaBuf", skip_serializing_if = "Option::is_none")]
    pub dma_buf: Option<DmaBuf>,
    /// Character device through which programs manage RDMA connections. Absent on machines without
    /// RDMA devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_cm: Option<CharDevice>,
    /// Bridges that redirect traffic between a GPU and another device of its root complex through
    /// the root complex. Absent if the agent is not configured or not permitted to read this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acs: Option<Acs>,
    /// IMEX channels for memory shared between machines, by number. Not all of them need exist.
    #[serde(default, rename = "imexChannels", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2048))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub imex_channels: Vec<u32>,
    /// Memory that a process can lock: `Unlimited` or bytes. This is the agent's own soft limit,
    /// which is the container runtime's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub locked_memory_limit: Option<String>,
    /// Maximum number of open files of a process: `Unlimited` or a number. The agent's own soft
    /// limit, as for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub open_files_limit: Option<String>,
    /// Stack size of a thread: `Unlimited` or bytes. The agent's own soft limit, as for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub stack_limit: Option<String>,
    /// Device files through which programs access the driver and each GPU that it knows:
    /// `nvidiactl`, `nvidia-uvm`, `nvidia0`, … Absent without the driver.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 80))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub device_files: Vec<CharDevice>,
    /// Size of `/dev/shm` as the agent sees it, bytes: the container runtime's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory_bytes: Option<u64>,
    /// Interface of the IPv4 default route with the lowest metric; if there is none, of the IPv6
    /// default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub default_route: Option<String>,
    /// How the kubelet places containers on CPUs, memory and devices. Absent if its configuration
    /// is unreadable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletPolicies>,
}

/// Kind of the NVIDIA kernel module.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverModule {
    /// The open-source module.
    Open,
    /// The closed-source module.
    Proprietary,
}

/// Whether a kernel module is loaded.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleState {
    /// Loaded.
    Loaded,
    /// Not loaded.
    NotLoaded,
}

/// Whether DMA-BUF can be expected to work.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaBuf {
    /// Both prerequisites are met.
    Likely,
    /// A prerequisite is not met.
    Unlikely,
}

/// Access control services of PCIe bridges.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Acs {
    /// PCI addresses of bridges that redirect requests or completions between peers, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 32)))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub redirecting: Vec<String>,
}

/// A measured speed.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// The link that was measured.
    pub link: MeasuredLink,
    /// One-way speed in megabytes (10^6) per second, at least 1.
    #[schemars(range(min = 1))]
    pub megabytes_per_second: u64,
    /// How it was measured, as stated by the source of the measurement.
    #[schemars(length(max = 256))]
    pub source: String,
}

/// A link that can be measured.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MeasuredLink {
    /// One NVLink.
    NVLink,
    /// From GPU to GPU inside one PCIe switch.
    PCIe,
    /// Between NUMA nodes.
    Socket,
    /// One port of a NIC.
    NIC,
}
