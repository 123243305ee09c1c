//! The section about GPU kernels.

data! {
    /// GPU kernels of a rank in profiled steps, which are launched operation by operation. Figures
    /// are per step.
    pub struct Kernels {
        /// Name of the GPU.
        pub gpu: String,
        pub rank: u32,
        pub profiled_steps: u64,
        /// Launches of kernels, products and copies within the GPU.
        pub launches: f64,
        /// Time of all launches, ms.
        pub kernel_ms: f64,
        /// Idle GPU time in the mean step: excludes launches, input, reductions, checkpoints and
        /// the time between steps, ms.
        pub idle_ms: f64,
        /// Pairs of consecutive launches.
        pub gaps: f64,
        /// Total time between them, ms.
        pub gap_ms: f64,
        /// The longest gap in all profiled steps, ms.
        pub longest_gap_ms: f64,
        /// Batches copied to the GPU.
        pub copies: f64,
        pub copied_bytes: f64,
        /// Time of these copies, which run alongside the launches, ms.
        pub copy_ms: f64,
        /// Floating-point operations of products and attention.
        pub flops: f64,
        /// Share of these in products that tensor cores can do in the given layout, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub tensor_percent: Option<f64>,
        /// Share of launch time with 16-bit tensors, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub half_percent: Option<f64>,
        /// Name in the device file, if one was given.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub device: Option<String>,
        /// Minimum time of all launches on that GPU, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_ms: Option<f64>,
        /// The same as a share of their actual time, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_percent: Option<f64>,
        /// Required floating-point operations of the mean step as a share of the product rate
        /// (MFU), percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub utilization_percent: Option<f64>,
        /// Longest first.
        pub rows: Vec<KernelRow>,
    }

    /// All launches of a kernel in a part of the step.
    pub struct KernelRow {
        /// `forward`, `backward` or `update`.
        pub part: String,
        pub name: String,
        pub launches: f64,
        pub ms: f64,
        /// Share of all launch time, percent.
        pub percent: f64,
        /// Bytes read and written if each is moved once.
        pub bytes: f64,
        /// Floating-point operations.
        pub flops: f64,
        /// Share of these in products that tensor cores can do in the given layout, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub tensor_percent: Option<f64>,
        /// Minimum time, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_ms: Option<f64>,
        /// The same as a share of the actual time, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_percent: Option<f64>,
        /// `memory`, `arithmetic` or `launch`: what bounds most of the minimum time.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bound: Option<String>,
    }
}
