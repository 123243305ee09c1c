//! How long a training step takes on a GPU at best: the rates of the GPU, and what follows from them for each operation.

use serde::{Deserialize, Serialize};

/// The rates of a GPU, from a data sheet or measured: a device file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// Name of the product.
    pub name: String,
    /// Where the figures are from.
    pub source: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block can have, bytes.
    pub shared_bytes_per_block: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Bytes read and written per second by a copy within its memory, both counted.
    pub bytes_per_second: f64,
    /// Floating-point operations per second in products, by the format of the factors.
    pub products: Rates,
    /// Floating-point operations per second in 32 bits without tensor cores.
    pub flops_per_second: f64,
    /// From the start of a kernel to that of the next one if they do nothing, seconds. Absent: not known, and counted as nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_seconds: Option<f64>,
}

/// Floating-point operations per second in products.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rates {
    /// 32-bit factors, exactly.
    pub f32: f64,
    /// Factors in bf16.
    pub bf16: f64,
    /// Factors in f16.
    pub f16: f64,
    /// Factors in 8 bits. Absent: twice that of bf16, as in NVIDIA's data sheets of all devices that multiply 8 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<f64>,
}

/// A device file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// It is not what it should be.
    #[error("device file {file}: {source}")]
    Json {
        /// Its path.
        file: String,
        /// Why.
        source: serde_json::Error,
    },
    /// A number that no GPU has.
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
    /// Reads the text of a device file; `file` is its name in errors.
    ///
    /// # Errors
    /// It is no JSON, lacks a field, has one that is not known, or a number is not greater than 0.
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

/// What a launch computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Arithmetic {
    /// 32 bits, one operation of a thread after another.
    Scalar,
    /// A product of 32-bit factors.
    F32,
    /// A product of factors in bf16.
    Bf16,
    /// A product of factors in f16.
    F16,
    /// A product of factors in 8 bits.
    Fp8,
}

/// What a launch moves and computes, whatever the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cost {
    /// Bytes that have to be read and written if each is moved once.
    pub bytes: f64,
    /// Floating-point operations; only those of products and attention are counted.
    pub flops: f64,
    /// Those of them that are not done a second time to save memory.
    pub needed_flops: f64,
    /// What they are done with.
    pub arithmetic: Arithmetic,
}

impl Gpu {
    /// Seconds of a launch at least: the longest of its bytes, its arithmetic and the launch itself; and which that is.
    pub fn floor(&self, cost: &Cost) -> (f64, Bound) {
        let each = [
            (cost.bytes / self.bytes_per_second, Bound::Memory),
            (cost.flops / self.rate(cost.arithmetic), Bound::Arithmetic),
            (self.launch_seconds.unwrap_or_default(), Bound::Launch),
        ];
        each.into_iter().rev().max_by(|a, b| a.0.total_cmp(&b.0)).expect("invariant: there are three")
    }

    /// Floating-point operations per second.
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

/// What an operation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Bound {
    /// Memory is read and written.
    Memory,
    /// Numbers are computed.
    Arithmetic,
    /// Kernels are started.
    Launch,
}

/// All launches of a kernel in a part of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    /// Part of the step.
    pub part: Part,
    /// Name of the kernel; `product`, `copy` and those of convolutions are no kernels of ours.
    pub name: String,
    /// Launches in a step.
    pub launches: u64,
    /// Bytes that have to be read and written if each is moved once.
    pub bytes: f64,
    /// Floating-point operations; only those of products and attention are counted.
    pub flops: f64,
    /// Seconds at least: for each launch the longest of its bytes, its arithmetic and a launch.
    pub seconds: f64,
    /// What takes most of these seconds.
    pub bound: Bound,
}

/// A step of one rank on its GPU, without what ranks do together. Nothing is faster on such a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prediction {
    /// The device file.
    pub gpu: Gpu,
    /// The network in a few words.
    pub model: String,
    /// Trainable numbers.
    pub parameters: u64,
    /// Items of a step of one rank.
    pub items: u64,
    /// Their unit.
    pub item: crate::event::Item,
    /// Memory of the GPU that the rank allocates, bytes.
    pub memory_bytes: u64,
    /// Memory that the rank may allocate: a share of the GPU's.
    pub memory_limit_bytes: u64,
    /// The slowest first.
    pub operations: Vec<Operation>,
}

impl Prediction {
    /// Seconds of a step, at least.
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
