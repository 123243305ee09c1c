//! Sections about properties that do not change over the steps.

use serde_json::Value;

data! {
    /// Memory of a rank.
    pub struct Memory {
        /// By purpose.
        pub kinds: Vec<Amount>,
        /// Sum, bytes.
        pub total_bytes: u64,
        /// What the sum would be in FP32, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub fp32_bytes: Option<u64>,
        /// Activations without recomputation, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub kept_activation_bytes: Option<u64>,
        /// GPU memory, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub gpu_bytes: Option<u64>,
        /// What the GPU memory would be in FP32, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub gpu_fp32_bytes: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ranks_per_node: Option<u32>,
        /// Name of the limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bound: Option<String>,
        /// The limit, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub capacity_bytes: Option<u64>,
    }

    /// Memory for one purpose.
    pub struct Amount {
        pub kind: String,
        pub bytes: u64,
    }

    /// Where the ranks ran.
    pub struct PlacementSection {
        /// The reason for the placement.
        pub reason: String,
        /// Compromises of the placement.
        pub warnings: Vec<String>,
        /// What limits the bandwidth.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub limited_by: Option<String>,
        /// The ranks, the first 256 of them.
        pub ranks: Vec<RankPlace>,
        /// Number of ranks that are not listed.
        pub more_ranks: u32,
        /// Monitored GPUs of the listed ranks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub gpus: Vec<GpuSummary>,
    }

    /// Observations of a rank's GPU while it was monitored.
    pub struct GpuSummary {
        pub rank: u32,
        /// PCI address.
        pub bus: String,
        /// Seconds of monitoring.
        pub seconds: f64,
        /// Highest temperature, °C.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub highest_celsius: Option<u32>,
        /// Percent of the time in which a kernel ran.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub busy_percent: Option<f64>,
        /// Reasons for lowered clocks, with the share of time in percent.
        pub slowed: Vec<String>,
        /// Fewest active lanes of its PCIe link, and the maximum.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub pcie_lanes: Option<(u32, u32)>,
        /// Memory errors corrected by ECC.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub corrected_errors: Option<u64>,
        /// Memory errors that ECC could not correct.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub uncorrected_errors: Option<u64>,
        /// Critical errors reported by the driver, by XID.
        pub xids: Vec<u32>,
    }

    /// Where a rank ran.
    pub struct RankPlace {
        pub rank: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub node: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub cpus: Option<String>,
        /// NUMA nodes of the CPUs.
        pub numa_nodes: Vec<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub threads: Option<u32>,
        /// Device and kernels.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub device: Option<String>,
        /// Mean compute time of a step, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub compute_ms: Option<f64>,
    }

    /// An event.
    pub struct EventEntry {
        /// Time, RFC 3339 UTC.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub time: Option<String>,
        /// The attempt.
        pub attempt: u32,
        pub text: String,
        /// Whether it is a problem.
        pub bad: bool,
    }

    /// What ran.
    pub struct Setting {
        /// The manifest without values that can be secret.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub manifest: Option<Value>,
        /// The configuration of every rank.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub engine: Option<Value>,
        /// Environment of the first rank.
        pub environment: Vec<Variable>,
        /// One line about the machine.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub machine: Option<String>,
        /// One line about the data.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub data: Option<String>,
    }

    /// An environment variable.
    pub struct Variable {
        pub name: String,
        /// The value, or a note that it is hidden.
        pub value: String,
        /// Why it is set.
        pub reason: String,
    }
}
