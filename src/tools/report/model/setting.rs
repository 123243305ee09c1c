//! Sections about what does not change over the steps.

use serde_json::Value;

data! {
    /// Memory of a rank.
    pub struct Memory {
        /// By what it is for.
        pub kinds: Vec<Amount>,
        /// Sum, bytes.
        pub total_bytes: u64,
        /// What it would be in FP32, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub fp32_bytes: Option<u64>,
        /// What it allocates on its GPU, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub gpu_bytes: Option<u64>,
        /// What that would be in FP32, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub gpu_fp32_bytes: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ranks_per_node: Option<u32>,
        /// What bounds it.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bound: Option<String>,
        /// The bound, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub capacity_bytes: Option<u64>,
    }

    /// Memory for something.
    pub struct Amount {
        pub kind: String,
        /// How much.
        pub bytes: u64,
    }

    /// Where the ranks ran.
    pub struct Placed {
        /// Why there.
        pub reason: String,
        /// What was given up.
        pub warnings: Vec<String>,
        /// What bounds the bandwidth.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub limited_by: Option<String>,
        /// The ranks, the first 256 of them.
        pub ranks: Vec<RankPlace>,
        /// Ranks that are not listed.
        pub more_ranks: u32,
        /// GPUs that were watched, of the ranks that are listed.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub gpus: Vec<GpuSeen>,
    }

    /// What the GPU of a rank met while it was watched.
    pub struct GpuSeen {
        pub rank: u32,
        /// PCI address.
        pub bus: String,
        /// Seconds that it was watched.
        pub seconds: f64,
        /// Highest temperature, °C.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub highest_celsius: Option<u32>,
        /// Why clocks were lowered, and for how many percent of the time.
        pub slowed: Vec<String>,
        /// Fewest lanes of its PCIe link in use, and as many as it has.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub pcie_lanes: Option<(u32, u32)>,
        /// Memory errors that ECC mended.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub corrected_errors: Option<u64>,
        /// Memory errors that it could not mend.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub uncorrected_errors: Option<u64>,
        /// Critical errors that the driver reported, by number.
        pub xids: Vec<u32>,
    }

    /// Where a rank ran.
    pub struct RankPlace {
        pub rank: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub node: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pub cpus: Option<String>,
        /// NUMA nodes of those.
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
    pub struct Happened {
        /// When, RFC 3339 UTC.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub time: Option<String>,
        /// In which attempt.
        pub attempt: u32,
        pub text: String,
        /// Something went wrong.
        pub bad: bool,
    }

    /// What ran.
    pub struct Setting {
        /// The manifest; values that may be secret are not shown.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub manifest: Option<Value>,
        /// What every rank read.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub engine: Option<Value>,
        /// Environment of the first rank.
        pub environment: Vec<Variable>,
        /// The machine, in a line.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub machine: Option<String>,
        /// The data, in a line.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub data: Option<String>,
    }

    /// An environment variable.
    pub struct Variable {
        pub name: String,
        /// Value, or that it is not shown.
        pub value: String,
        /// Why it is set.
        pub reason: String,
    }
}
