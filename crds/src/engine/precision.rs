//! Number formats.

use super::DECIMAL;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Precision mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum PrecisionMode {
    /// 32-bit floats everywhere.
    #[default]
    FP32,
    /// Automatic mixed precision: 16-bit activations and matrix products, 32-bit weights and weight
    /// gradients.
    AMP,
}

/// How GPUs multiply matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum Matmul {
    /// 32-bit products with the full 23-bit fraction.
    #[default]
    IEEE,
    /// 10-bit fraction with the range of 32-bit floats.
    TF32,
    /// 8-bit values with a scale per tensor, for products that otherwise use `BF16`.
    FP8,
}

/// The 16-bit number format of mode `AMP`. Default `BF16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ComputeType {
    /// 8-bit exponent and 7-bit fraction: the range of 32-bit floats.
    BF16,
    /// 5-bit exponent and 10-bit fraction.
    FP16,
}

/// Number formats.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.mode == 'AMP' || (!has(self.computeType) && !has(self.lossScaling))")
    .message("computeType and lossScaling are for mode AMP").field_path(".mode"))]
pub struct Precision {
    /// `FP32` (default): 32-bit floats everywhere. `AMP`: automatic mixed precision.
    #[serde(default)]
    pub mode: PrecisionMode,

    /// The 16-bit format of mode `AMP`. Default `BF16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_type: Option<ComputeType>,

    /// Loss scaling, which keeps small gradients from vanishing in 16 bits. A step whose gradients
    /// overflow is skipped and counted. Default: none (static, 1) with `BF16`, dynamic with `FP16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scaling: Option<LossScaling>,

    /// How GPUs multiply matrices. `IEEE` (default): exact 32-bit products, as PyTorch computes by
    /// default. `TF32`: tensor cores round 32-bit factors to a 10-bit fraction and accumulate in 32
    /// bits, which is several times as fast; 16-bit products (mode `AMP`) are unaffected. `FP8`:
    /// with mode `AMP` and `BF16` on GPUs of compute capability 8.9 or higher, such as H100, linear
    /// layers whose dimensions are multiples of 16 round both factors to 8 bits with a scale per
    /// tensor, in the forward pass and for input gradients; weight gradients and all sums are
    /// unaffected.
    #[serde(default)]
    pub matmul: Matmul,
}

/// How the loss scale is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LossScalingType {
    /// Decreases after an overflow, increases after many steps without one.
    Dynamic,
    /// Constant.
    Static,
}

/// Loss scaling.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.type == 'Static') == has(self.scale)")
    .message("scale must be set with type Static, and with no other").field_path(".scale"))]
#[x_kube(validation = Rule::new("self.type == 'Dynamic' \
    || (!has(self.initialScale) && !has(self.growthFactor) && !has(self.backoffFactor) && !has(self.growthIntervalSteps))")
    .message("initialScale, growthFactor, backoffFactor and growthIntervalSteps are for type Dynamic").field_path(".type"))]
#[x_kube(validation = Rule::new("!has(self.scale) || double(self.scale) > 0.0")
    .message("scale must be greater than 0").field_path(".scale"))]
#[x_kube(validation = Rule::new("!has(self.initialScale) || double(self.initialScale) > 0.0")
    .message("initialScale must be greater than 0").field_path(".initialScale"))]
#[x_kube(validation = Rule::new("!has(self.growthFactor) || double(self.growthFactor) > 1.0")
    .message("growthFactor must be greater than 1").field_path(".growthFactor"))]
#[x_kube(validation = Rule::new("!has(self.backoffFactor) || (double(self.backoffFactor) > 0.0 && double(self.backoffFactor) < 1.0)")
    .message("backoffFactor must be greater than 0 and less than 1").field_path(".backoffFactor"))]
pub struct LossScaling {
    /// `Dynamic`: adapted during training. `Static`: given by `scale`.
    #[serde(rename = "type")]
    pub kind: LossScalingType,

    /// Loss scale of type `Static`, a decimal string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub scale: Option<String>,

    /// Initial loss scale of type `Dynamic`, a decimal string. Default "65536".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub initial_scale: Option<String>,

    /// Multiplier of the loss scale after `growthIntervalSteps` steps without overflow, a decimal
    /// string. Default "2".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub growth_factor: Option<String>,

    /// Multiplier of the loss scale after an overflow, a decimal string. Default "0.5".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub backoff_factor: Option<String>,

    /// Steps without overflow after which the loss scale grows. Default 2000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub growth_interval_steps: Option<i64>,
}
