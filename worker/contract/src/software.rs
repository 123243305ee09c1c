//! GPU software of a machine, as printed by `switchyard-worker gpu`.

use serde::{Deserialize, Serialize};

/// Libraries and GPUs of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Software {
    /// In the order in which the worker opens them.
    pub libraries: Vec<Library>,
    /// As the driver lists them for this process.
    pub gpus: Vec<Gpu>,
}

/// An NVIDIA library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Library {
    /// Its common name.
    pub name: String,
    /// The file that the worker would open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The search rule that found it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found_by: Option<String>,
    /// In NVIDIA's notation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why it cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Advice, if the engine needs the library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// How the engine behaves without it.
    pub without: String,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// Product name.
    pub name: String,
    /// PCI address.
    pub bus: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Free memory in bytes; absent if NVML does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Compute processes visible through NVML.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    /// MIG is enabled: a process sees one instance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_divided: bool,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// Process ID in the host's PID namespace.
    pub pid: u32,
    /// Absent if NVML cannot see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// GPU memory in use by the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}
