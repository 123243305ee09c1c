//! Number formats.

use super::DECIMAL;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which number formats are used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum PrecisionMode {
    /// 32 bits everywhere.
    #[default]
    FP32,
    /// Activations and products in 16 bits, weights and their gradients in 32.
    AMP,
}

/// How GPUs multiply matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum Matmul {
    /// All 23 bits of fraction count.
    #[default]
    IEEE,
    /// 10 bits of fraction, the range of 32-bit floats.
    TF32,
    /// 8 bits with a scale for each tensor, for products that are in `BF16` otherwise.
    FP8,
}

/// The 16-bit number format of mode `AMP`. Default `BF16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ComputeType {
    /// 8 bits of exponent, 7 of fraction: the range of 32-bit floats.
    BF16,
    /// 5 bits of exponent, 10 of fraction.
    FP16,
}

/// Number formats.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.mode == 'AMP' || (!has(self.computeType) && !has(self.lossScaling))")
    .message("computeType and lossScaling are for mode AMP").field_path(".mode"))]
pub struct Precision {
    /// `FP32` (default): 32 bits everywhere. `AMP`: automatic mixed precision.
    #[serde(default)]
    pub mode: PrecisionMode,

    /// The 16-bit format of mode `AMP`. Default `BF16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_type: Option<ComputeType>,

    /// Factor of the loss that keeps small gradients from vanishing in 16 bits; a step whose gradients overflow is skipped and
    /// counted. Default: none (static, 1) with `BF16`, dynamic with `FP16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scaling: Option<LossScaling>,

    /// How GPUs multiply matrices. `IEEE` (default): numbers of 32 bits exactly, as PyTorch does unless it is told otherwise. `TF32`: tensor
    /// cores round factors of 32 bits to 10 bits of fraction first and add in 32 bits, which is several times as fast; products in 16 bits
    /// (mode `AMP`) stay as they are. `FP8`: with mode `AMP` and `BF16` on GPUs of compute capability 8.9 or higher, such as H100, linear layers
    /// whose sides are multiples of 16 round both factors to 8 bits with a scale for each tensor, forward and for the gradients of their
    /// inputs; the gradients of weights and all sums stay as they are.
    #[serde(default)]
    pub matmul: Matmul,
}

/// How the factor of the loss is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LossScalingType {
    /// Smaller after an overflow, larger after many steps without one.
    Dynamic,
    /// The same always.
    Static,
}

/// Factor of the loss.
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
    /// `Dynamic`: found while training. `Static`: given by `scale`, if you know it.
    #[serde(rename = "type")]
    pub kind: LossScalingType,

    /// The factor of type `Static`, a decimal string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub scale: Option<String>,

    /// The first factor of type `Dynamic`, a decimal string. Default "65536".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub initial_scale: Option<String>,

    /// The factor is multiplied by this after `growthIntervalSteps` steps without overflow, a decimal string. Default "2".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub growth_factor: Option<String>,

    /// The factor is multiplied by this after an overflow, a decimal string. Default "0.5".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub backoff_factor: Option<String>,

    /// Steps without overflow after which the factor grows. Default 2000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub growth_interval_steps: Option<i64>,
}
