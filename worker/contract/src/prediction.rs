//! Roofline prediction: GPU rates, and the lower bound on step time that follows for each
//! operation.

use serde::{Deserialize, Serialize};

/// GPU rates from a data sheet or measured: the content of a device file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// Product name.
    pub name: String,
    /// Origin of the figures.
    pub source: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory per block, bytes.
    pub shared_bytes_per_block: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Bandwidth of a device-to-device copy in bytes per second, counting both reads and writes.
    pub bytes_per_second: f64,
    /// FLOP/s of matrix products, by factor format.
    pub products: Rates,
    /// FP32 FLOP/s without tensor cores.
    pub flops_per_second: f64,
    /// Time between the starts of two consecutive empty kernels, seconds. Absent: unknown, and
    /// treated as 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_seconds: Option<f64>,
}

/// FLOP/s of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rates {
    /// Exact f32 factors.
    pub f32: f64,
    /// bf16 factors.
    pub bf16: f64,
    /// f16 factors.
    pub f16: f64,
    /// FP8 factors. Absent: twice the bf16 rate, as in NVIDIA's data sheets of all devices with
    /// FP8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<f64>,
}

/// Why a device file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// Not valid JSON of the expected form.
    #[error("device file {file}: {source}")]
    Json {
        /// Its path.
        file: String,
        /// The parse error.
        source: serde_json::Error,
    },
    /// A number that is impossible for a GPU.
    #[error("device file {file}: {field}: got {got}, expected a number greater than 0")]
    Number {
        /// Its path.
        file: String,
        /// The field.
        field: &'static str,
        /// Its value.
        got: f64,
    },
}

impl Gpu {
    /// Parses a device file; `file` is its name in errors.
    ///
    /// # Errors
    /// The text is not JSON, a field is missing or unknown, or a number is not greater than 0.
    pub fn parse(text: &str, file: &str) -> Result<Gpu, GpuError> {
        let gpu: Gpu =
            serde_json::from_str(text).map_err(|source| GpuError::Json { file: file.to_string(), source })?;
        let numbers = [
            ("multiprocessors", f64::from(gpu.multiprocessors)),
            ("sharedBytesPerBlock", f64::from(gpu.shared_bytes_per_block)),
            ("memoryBytes", gpu.memory_bytes as f64),
            ("bytesPerSecond", gpu.bytes_per_second),
            ("products.f32", gpu.products.f32),
            ("products.bf16", gpu.products.bf16),
            ("products.f16", gpu.products.f16),
            ("products.fp8", gpu.products.fp8.unwrap_or(1.0)),
            ("flopsPerSecond", gpu.flops_per_second),
            ("launchSeconds", gpu.launch_seconds.unwrap_or(1.0)),
        ];
        match numbers.into_iter().find(|(_, value)| *value <= 0.0) {
            Some((field, got)) => Err(GpuError::Number { file: file.to_string(), field, got }),
            None => Ok(gpu),
        }
    }
}

/// Arithmetic unit and format that a launch uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Arithmetic {
    /// FP32 without tensor cores.
    Scalar,
    /// Matrix product of f32 factors.
    F32,
    /// Matrix product of bf16 factors.
    Bf16,
    /// Matrix product of f16 factors.
    F16,
    /// Matrix product of FP8 factors.
    Fp8,
}

/// Data movement and arithmetic of a launch, independent of the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cost {
    /// Bytes read and written if each is moved once.
    pub bytes: f64,
    /// FLOPs of matrix products and attention; no others are counted.
    pub flops: f64,
    /// FLOPs without recomputation done to save memory.
    pub needed_flops: f64,
    /// Arithmetic of these FLOPs.
    pub arithmetic: Arithmetic,
}

impl Gpu {
    /// Lower bound on the seconds of a launch: the longest of its memory, arithmetic and launch
    /// times, and which one that is.
    pub fn floor(&self, cost: &Cost) -> (f64, Bound) {
        let each = [
            (cost.bytes / self.bytes_per_second, Bound::Memory),
            (cost.flops / self.rate(cost.arithmetic), Bound::Arithmetic),
            (self.launch_seconds.unwrap_or_default(), Bound::Launch),
        ];
        each.into_iter().rev().max_by(|a, b| a.0.total_cmp(&b.0)).expect("invariant: there are three")
    }

    /// FLOP/s in this arithmetic.
    pub fn rate(&self, arithmetic: Arithmetic) -> f64 {
        match arithmetic {
            Arithmetic::Scalar => self.flops_per_second,
            Arithmetic::F32 => self.products.f32,
            Arithmetic::Bf16 => self.products.bf16,
            Arithmetic::F16 => self.products.f16,
            Arithmetic::Fp8 => self.products.fp8.unwrap_or(2.0 * self.products.bf16),
        }
    }
}

/// Part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    /// Forward of all micro-batches.
    Forward,
    /// Backward of all micro-batches.
    Backward,
    /// Norm, loss scale and optimizer.
    Update,
}

/// The bottleneck of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Bound {
    /// Memory bandwidth.
    Memory,
    /// Arithmetic throughput.
    Arithmetic,
    /// Kernel launch latency.
    Launch,
}

/// All launches of a kernel in one part of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    /// Part of the step.
    pub part: Part,
    /// Kernel name; `product`, `copy` and those of convolutions are not our kernels.
    pub name: String,
    /// Launches per step.
    pub launches: u64,
    /// Bytes read and written if each is moved once.
    pub bytes: f64,
    /// FLOPs of matrix products and attention; no others are counted.
    pub flops: f64,
    /// Lower bound on the seconds: the sum over its launches of the longest of memory, arithmetic
    /// and launch time.
    pub seconds: f64,
    /// The bottleneck that accounts for most of these seconds.
    pub bound: Bound,
}

/// Lower bound on a step of one rank on its GPU, without communication between ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prediction {
    /// The device file.
    pub gpu: Gpu,
    /// Short model description.
    pub model: String,
    /// Trainable parameters.
    pub parameters: u64,
    /// Items per step of one rank.
    pub items: u64,
    /// Unit of `items`.
    pub item: crate::event::Item,
    /// GPU memory that the rank allocates, bytes.
    pub memory_bytes: u64,
    /// GPU memory that the rank may allocate, bytes.
    pub memory_limit_bytes: u64,
    /// Slowest first.
    pub operations: Vec<Operation>,
}

impl Prediction {
    /// Lower bound on the seconds of a step.
    pub fn seconds(&self) -> f64 {
        self.operations.iter().map(|operation| operation.seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"name": "G", "source": "S", "multiprocessors": 2, "sharedBytesPerBlock": 65536, "memoryBytes": 1000000,
        "bytesPerSecond": 1e9, "products": {"f32": 1e10, "bf16": 1e11, "f16": 1e11}, "flopsPerSecond": 1e10}"#;

    #[test]
    fn a_device_file_is_read_and_written() {
        let gpu = Gpu::parse(FILE, "g.json").unwrap();
        assert_eq!((gpu.launch_seconds, gpu.products.bf16), (None, 1e11));
        assert_eq!(Gpu::parse(&serde_json::to_string(&gpu).unwrap(), "g.json").unwrap(), gpu);
    }

    #[test]
    fn a_wrong_device_file_is_refused_by_file_and_field() {
        for (from, to, expected) in [
            ("1e9", "0", "device file g.json: bytesPerSecond: got 0, expected a number greater than 0"),
            (
                "1e11, \"f16\"",
                "-3, \"f16\"",
                "device file g.json: products.bf16: got -3, expected a number greater than 0",
            ),
            ("\"name\"", "\"nam\"", "device file g.json: unknown field `nam`"),
            ("\"source\": \"S\",", "", "device file g.json: missing field `source`"),
            ("{\"name\"", "name", "device file g.json: expected "),
        ] {
            let error = Gpu::parse(&FILE.replacen(from, to, 1), "g.json").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
