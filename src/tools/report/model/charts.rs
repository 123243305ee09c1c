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
        /// First steps of the windows in which a checkpoint was taken.
        pub checkpoints: Vec<u64>,
        /// Attempts after the first.
        pub restarts: Vec<Restart>,
        /// Bigram entropy of the data: the lower bound of the loss of any bigram model, nats.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bigram: Option<f64>,
    }

    /// Loss of a window of steps, nats.
    pub struct LossWindow {
        /// First step.
        pub step: u64,
        /// The lowest loss of a step.
        pub least: f64,
        /// The highest loss of a step.
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
        /// Steps that it repeated.
        pub repeated_steps: u64,
    }

    /// Throughput over the steps.
    pub struct Throughput {
        /// `tokens/s` and similar.
        pub unit: String,
        /// One per window.
        pub windows: Vec<Point>,
    }

    /// The distribution of a step's time.
    pub struct StepTime {
        /// The rank shown.
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

    /// Comparison of ranks.
    pub struct RankSkew {
        /// `rank` or `node`; by node, each row shows the worst rank.
        pub by: String,
        pub window_steps: u64,
        /// First step of each window.
        pub steps: Vec<u64>,
        /// Median compute time of the ranks, ms.
        pub median_ms: f64,
        /// One per rank or node.
        pub rows: Vec<SkewRow>,
    }

    /// A rank or a node.
    pub struct SkewRow {
        pub label: String,
        /// Share of the windows in which it is more than 5 % slower than the median, percent.
        pub slow_percent: f64,
        /// Mean excess of its compute time over the median, ms.
        pub mean_over_ms: f64,
        /// The same per window; null if unknown.
        pub over_ms: Vec<Option<f64>>,
    }

    /// Gradient reduction of the critical rank.
    pub struct AllReduce {
        /// The transport of gradients.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub transport: Option<String>,
        /// Its NCCL channels over all ranks, by path.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub channels: Option<String>,
        /// Algorithms between hosts and how many all-reduces use each.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub algorithms: Option<String>,
        /// Bytes per all-reduce, in the order in which backward starts them.
        pub bucket_bytes: Vec<u64>,
        /// Bytes reduced per step.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bytes: Option<f64>,
        /// Bytes that a rank sends per step, if the ranks form a ring.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub sent_bytes: Option<f64>,
        /// The same if it sent every gradient in 32 bits, in every step.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub sent_bytes_in_full: Option<f64>,
        /// Bytes not reduced yet when backward ended.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub left_bytes: Option<f64>,
        /// Time of one all-reduce of everything with nothing else running, measured before the
        /// first step, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub alone_ms: Option<f64>,
        /// Time during which one was running, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub under_way_ms: Option<f64>,
        /// Exposed part of that time, ms.
        pub exposed_ms: f64,
        /// Part of that time after the backward pass, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub hidden_ms: Option<f64>,
        /// Hidden share, percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub overlap_percent: Option<f64>,
        /// Bus bandwidth while one was running, GB/s.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub bus_gigabytes_per_second: Option<f64>,
        /// Bus bandwidth of the all-reduce measured alone, GB/s.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub alone_gigabytes_per_second: Option<f64>,
        /// Predicted bus bandwidth of the placement, GB/s.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub predicted_gigabytes_per_second: Option<f64>,
    }

    /// How long the stages of pipelines wait for each other.
    pub struct Pipeline {
        pub stages: u32,
        /// Pipelines that train on different samples.
        pub pipelines: u32,
        /// Micro-batches of a step.
        pub micro_batches: u32,
        /// Share of the time of all ranks' steps in which they wait for other stages, percent.
        pub idle_percent: f64,
        /// The same if stages took equally long and messages no time: (K - 1) / (M + K - 1) with K
        /// stages and M micro-batches.
        pub least_idle_percent: f64,
        /// One per stage with known steps.
        pub waits: Vec<StageWait>,
    }

    /// A stage, in the mean of its ranks.
    pub struct StageWait {
        pub stage: u32,
        /// Forward, backward and optimizer, ms.
        pub compute_ms: f64,
        /// Waiting for other stages, ms.
        pub wait_ms: f64,
        /// The same, percent of its steps' time.
        pub idle_percent: f64,
    }
}
