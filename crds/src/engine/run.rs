//! How a run executes: overlap, memory, evaluation, profiling.

use super::{DECIMAL, Switch, disabled};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Format of gradients between hosts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WireType {
    /// 4 bytes per value.
    #[default]
    FP32,
    /// 2 bytes, with a 10-bit fraction.
    FP16,
    /// 2 bytes, with a 7-bit fraction and the range of 32-bit floats.
    BF16,
}

/// Overlap of communication with the backward pass.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Overlap {
    /// `Enabled` (default): the all-reduce of a bucket starts as soon as its last gradient is
    /// final. `Disabled`: all start after the backward pass. Both give the same numbers.
    #[serde(default)]
    pub mode: Switch,

    /// Maximum size of a fused gradient bucket, in MiB. Default: none. Without a limit the first
    /// and the last bucket have about 1 MiB. The size of the others, at most 25 MiB, is chosen to
    /// saturate the measured link between the ranks. The numbers do not depend on it.
    #[serde(skip_serializing_if = "Option::is_none", rename = "bucketSizeMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_size_mib: Option<i32>,

    /// All-reduces that can run concurrently, each with its own connections. Default: 2 with
    /// several nodes, otherwise 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 8))]
    pub communicators: Option<i32>,

    /// Format of gradients between hosts; they are summed in 32 bits. Default `FP32`.
    /// 16-bit formats halve the traffic, and the result is no longer bit-identical.
    #[serde(default)]
    pub wire_type: WireType,

    /// `Enabled`: the rank blocks on every all-reduce where it starts. Default `Disabled`.
    #[serde(default = "disabled")]
    pub sync_all_reduce: Switch,
}

impl Default for Overlap {
    fn default() -> Self {
        Overlap {
            mode: Switch::Enabled,
            bucket_size_mib: None,
            communicators: None,
            wire_type: WireType::FP32,
            sync_all_reduce: Switch::Disabled,
        }
    }
}

/// Memory of a rank.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("double(self.fraction) > 0.0 && double(self.fraction) <= 1.0")
    .message("fraction must be greater than 0 and at most 1").field_path(".fraction"))]
pub struct Memory {
    /// Fraction of the memory limit, or of the machine's memory, that all ranks of a node can use
    /// together, a decimal string. Their requirement is known before the start and does not grow
    /// later; a job that needs more is rejected. The system allocates pages on first use. Default
    /// "0.92".
    #[serde(default = "most")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub fraction: String,

    /// Steps between releases of unused memory to the system; 0 disables them. Default 30.
    #[serde(default = "thirty")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub release_every_steps: i32,
}

impl Default for Memory {
    fn default() -> Self {
        Memory { fraction: most(), release_every_steps: 30 }
    }
}

/// What backward computes again instead of keeping it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Recomputation {
    /// Nothing.
    #[default]
    None,
    /// The activations within each block.
    Blocks,
}

/// Validation during training.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evaluation {
    /// Steps between two evaluations; 0 for only one at the end. Default 100.
    #[serde(default = "hundred")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub every_steps: i64,

    /// Batches of `batchSizePerProcess` samples per process in one evaluation, evenly spaced over
    /// the validation samples; or `All`: each validation sample exactly once, so that the result
    /// does not depend on the number of processes. Default 20.
    #[serde(default = "twenty")]
    #[schemars(schema_with = "batches")]
    pub batches: IntOrString,
}

impl Default for Evaluation {
    fn default() -> Self {
        Evaluation { every_steps: 100, batches: twenty() }
    }
}

/// Steps to record operation by operation.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// First profiled step, from 1. Default 10, because the first steps of a run are not typical.
    #[serde(default = "ten_i64")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub from_step: i64,

    /// Number of profiled steps. Default 5.
    #[serde(default = "five")]
    #[schemars(range(min = 1, max = 1000))]
    pub steps: i32,
}

fn five() -> i32 {
    5
}
fn ten_i64() -> i64 {
    10
}
fn twenty() -> IntOrString {
    IntOrString::Int(20)
}
fn thirty() -> i32 {
    30
}
fn hundred() -> i64 {
    100
}
fn most() -> String {
    "0.92".into()
}

/// Schema of a number of batches.
fn batches(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "nullable": false,
        "minimum": 1,
        "maximum": 100_000,
        "pattern": "^All$",
    })
}
