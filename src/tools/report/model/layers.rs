//! The section about layers.

data! {
    /// Computation and communication by layer, on CPUs in profiled steps. Figures are per step.
    pub struct Layers {
        pub rank: u32,
        pub profiled_steps: u64,
        /// Sums of the layers of a kind, longest computation first.
        pub kinds: Vec<LayerRow>,
        /// Single layers, longest computation first.
        pub rows: Vec<LayerRow>,
        /// Layers that are not in `rows`, because the page has a limit.
        pub left_out: u64,
    }

    /// A layer, or all layers of a kind.
    pub struct LayerRow {
        /// Name of the layer; absent for a kind.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// Kind, such as `Linear`.
        pub kind: String,
        pub layers: u64,
        pub parameters: u64,
        /// Forward and backward pass, measured, ms.
        pub compute_ms: f64,
        /// Share of all layers, percent.
        pub percent: f64,
        /// Its share of the all-reduce by bytes, of the time measured without other work, ms.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub all_reduce_ms: Option<f64>,
        /// Computation ÷ all-reduce; absent without parameters or with one rank.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ratio: Option<f64>,
    }
}
