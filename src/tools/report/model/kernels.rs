//! The section about the kernels of a GPU.

data! {
    /// Kernels of the GPU of a rank, in profiled steps, which are queued one by one. Figures are of one step.
    pub struct Kernels {
        /// Its name.
        pub gpu: String,
        pub rank: u32,
        pub profiled_steps: u64,
        /// Of kernels, products and copies within the GPU.
        pub launches: f64,
        /// Time of all launches, ms.
        pub kernel_ms: f64,
        /// Of the mean step of the run, what neither the launches nor input, reductions, checkpoints or the time between steps take, ms.
        pub idle_ms: f64,
        /// Pairs of launches that follow each other.
        pub gaps: f64,
        /// Time between them, ms.
        pub gap_ms: f64,
        /// The longest of all profiled steps, ms.
        pub longest_gap_ms: f64,
        /// Batches copied to the GPU.
        pub copies: f64,
        pub copied_bytes: f64,
        /// Beside the launches, ms.
        pub copy_ms: f64,
        /// Floating-point operations of products and attention.
        pub flops: f64,
        /// Of these, in products that tensor cores can do as they lie, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub tensor_percent: Option<f64>,
        /// Of the time of launches, in those whose tensors have 16 bits, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub half_percent: Option<f64>,
        /// Name in the device file, if one was given.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub device: Option<String>,
        /// What all launches take at least on such a GPU, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_ms: Option<f64>,
        /// The same as a share of their time, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_percent: Option<f64>,
        /// Floating-point operations that are needed, in the mean step, as a share of the rate of products (MFU), percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub utilization_percent: Option<f64>,
        /// The longest first.
        pub rows: Vec<KernelRow>,
    }

    /// All launches of a kernel in a part of the step.
    pub struct KernelRow {
        /// `forward`, `backward` or `update`.
        pub part: String,
        pub name: String,
        pub launches: f64,
        pub ms: f64,
        /// Of the time of all launches.
        pub percent: f64,
        /// Read and written if each byte is moved once.
        pub bytes: f64,
        /// Floating-point operations.
        pub flops: f64,
        /// Of these, in products that tensor cores can do as they lie, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub tensor_percent: Option<f64>,
        /// At least, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_ms: Option<f64>,
        /// The same as a share of the time, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub floor_percent: Option<f64>,
        /// `memory`, `arithmetic` or `launch`: what takes most of the least time.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bound: Option<String>,
    }
}
