//! What a machine has for training on GPUs, as `switchyard-worker gpu` prints it.

use serde::{Deserialize, Serialize};

/// Libraries and GPUs of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Software {
    /// In the order in which the worker opens them.
    pub libraries: Vec<Library>,
    /// As the driver shows them to this process.
    pub gpus: Vec<Gpu>,
}

/// A library of NVIDIA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Library {
    /// Its common name.
    pub name: String,
    /// The file that the worker would open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The rule that led to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found_by: Option<String>,
    /// As NVIDIA writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why it cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What helps, if the engine needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What the engine does without it.
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
    /// Those that nobody has; absent if NVML does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Processes that compute on it, as far as NVML shows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    /// MIG divides it: a process sees one instance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_divided: bool,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// By the numbers of the host.
    pub pid: u32,
    /// Absent where NVML may not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Memory of the GPU that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}
