//! The host around the devices: kernel, driver, limits, and what was measured.

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
    /// Newest CUDA that the driver can run, as `MAJOR.MINOR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub cuda_version: Option<String>,
    /// Kind of the NVIDIA kernel module. Absent when none is loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_module: Option<DriverModule>,
    /// Whether NICs may reach GPU memory through the module nvidia-peermem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peermem: Option<ModuleState>,
    /// Whether NICs may reach GPU memory through DMA-BUF. A guess from its two conditions, the open kernel module and
    /// Linux 5.12; nothing was tried out.
    #[serde(default, rename = "dmaBuf", skip_serializing_if = "Option::is_none")]
    pub dma_buf: Option<DmaBuf>,
    /// The character device through which programs manage RDMA connections. Absent on machines without RDMA devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_cm: Option<CharDevice>,
    /// Bridges that send traffic between a GPU and another device of its root complex through the root complex. Absent when the
    /// agent is not configured to read this, or may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acs: Option<Acs>,
    /// Channels for memory shared between machines, by number. Not all of them need exist.
    #[serde(default, rename = "imexChannels", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2048))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub imex_channels: Vec<u32>,
    /// Memory a process may lock: `Unlimited` or bytes. It is the agent's own soft limit, which is the container
    /// runtime's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub locked_memory_limit: Option<String>,
    /// Files a process may have open: `Unlimited` or a number. The agent's own soft limit, as for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub open_files_limit: Option<String>,
    /// Size of the stack of a thread: `Unlimited` or bytes. The agent's own soft limit, as for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub stack_limit: Option<String>,
    /// The files through which programs reach the driver and each GPU that it knows: `nvidiactl`, `nvidia-uvm`, `nvidia0`, …
    /// Absent without the driver.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 80))]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub device_files: Vec<CharDevice>,
    /// Size of `/dev/shm` as the agent sees it, bytes: the container runtime's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory_bytes: Option<u64>,
    /// Interface of the IPv4 default route with the lowest metric; if there is none, of the IPv6 default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub default_route: Option<String>,
    /// How the kubelet places containers on CPUs, memory and devices. Absent when its configuration cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletPolicies>,
}

/// Kind of the NVIDIA kernel module.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverModule {
    /// The one with public source.
    Open,
    /// The other one.
    Proprietary,
}

/// Whether a kernel module is loaded.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleState {
    /// It is.
    Loaded,
    /// It is not.
    NotLoaded,
}

/// Whether DMA-BUF can be expected to work.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaBuf {
    /// Both conditions hold.
    Likely,
    /// One does not.
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

/// A speed that somebody measured.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// What was measured.
    pub link: MeasuredLink,
    /// The speed, one direction, megabytes (10^6) per second, at least 1.
    #[schemars(range(min = 1))]
    pub megabytes_per_second: u64,
    /// How it was measured, in the words of whoever measured it.
    #[schemars(length(max = 256))]
    pub source: String,
}

/// What a measured speed is the speed of.
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
