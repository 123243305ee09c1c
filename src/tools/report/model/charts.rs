//! Sections with a chart over the steps, and the all-reduce.

use super::PartTime;

data! {
    /// Loss over the steps.
    pub struct Loss {
        pub window_steps: u64,
        /// One per window.
        pub windows: Vec<LossWindow>,
        /// Losses on the validation split.
        pub validation: Vec<Point>,
        /// First steps of windows in which a checkpoint was taken.
        pub checkpoints: Vec<u64>,
        /// Attempts after the first.
        pub restarts: Vec<Restart>,
        /// No bigram model scores lower, nats.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bigram: Option<f64>,
    }

    /// Loss of a window of steps, nats.
    pub struct LossWindow {
        /// First step.
        pub step: u64,
        /// The least of a step.
        pub least: f64,
        /// The most of a step.
        pub most: f64,
        pub mean: f64,
        /// Exponential mean of the windows so far.
        pub smoothed: f64,
    }

    /// A figure at a step.
    pub struct Point {
        pub step: u64,
        /// The figure.
        pub value: f64,
    }

    /// An attempt after the first.
    pub struct Restart {
        pub attempt: u32,
        /// Its first step.
        pub step: u64,
        /// Steps that it did again.
        pub repeated_steps: u64,
    }

    /// Throughput over the steps.
    pub struct Throughput {
        /// `tokens/s` and its like.
        pub unit: String,
        /// One per window.
        pub windows: Vec<Point>,
    }

    /// Where the time of a step goes.
    pub struct StepTime {
        /// The rank that is shown.
        pub rank: u32,
        pub window_steps: u64,
        /// One per window.
        pub windows: Vec<StepWindow>,
    }

    pub struct StepWindow {
        /// First step.
        pub step: u64,
        /// Mean of each part, ms.
        pub parts: Vec<PartTime>,
        /// Median wall time, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub p50_ms: Option<f64>,
        /// 99th percentile, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub p99_ms: Option<f64>,
    }

    /// Ranks against each other.
    pub struct RankSkew {
        /// `rank`, or `node`: then the worst rank of each.
        pub by: String,
        pub window_steps: u64,
        /// First step of each window.
        pub steps: Vec<u64>,
        /// Median compute time of a rank, ms.
        pub median_ms: f64,
        /// One per rank or node.
        pub rows: Vec<SkewRow>,
    }

    /// A rank or a node.
    pub struct SkewRow {
        pub label: String,
        /// Share of the windows in which it is > 5 % slower than the median, percent.
        pub slow_percent: f64,
        /// Mean compute time over the median, ms.
        pub mean_over_ms: f64,
        /// The same for each window; null where nothing is known.
        pub over_ms: Vec<Option<f64>>,
    }

    /// Reduction of gradients, of the rank whose time is the time of the step.
    pub struct AllReduce {
        /// How gradients travel.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub transport: Option<String>,
        /// Bytes of each all-reduce, in the order in which backward starts them.
        pub bucket_bytes: Vec<u64>,
        /// Reduced in a step, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bytes: Option<f64>,
        /// Not reduced yet when backward ended, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub left_bytes: Option<f64>,
        /// One all-reduce of everything with nothing else running, measured before the first step, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub alone_ms: Option<f64>,
        /// Time in which one was running, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub under_way_ms: Option<f64>,
        /// Part of it that the step waited for, ms.
        pub exposed_ms: f64,
        /// Part of it behind the backward pass, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub hidden_ms: Option<f64>,
        /// Hidden share, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub overlap_percent: Option<f64>,
        /// Bus bandwidth while one was running, GB/s.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bus_gigabytes_per_second: Option<f64>,
        /// Bus bandwidth of the one alone, GB/s.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub alone_gigabytes_per_second: Option<f64>,
        /// What the placement was predicted to give, GB/s.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub predicted_gigabytes_per_second: Option<f64>,
    }
}
