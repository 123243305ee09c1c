//! Number formats.

use super::Check;
use switchyard_crds as api;
use switchyard_worker_contract::config::{Amp, HalfType, LossScaling, Precision};

/// Translates the block. Dynamic loss scaling has the initial value and update rule of PyTorch
/// (<https://pytorch.org/docs/stable/amp.html#torch.amp.GradScaler>).
pub(super) fn precision(precision: &api::Precision, check: &mut Check<'_>) -> Precision {
    if precision.mode == api::PrecisionMode::FP32 {
        return Precision::Fp32;
    }
    let compute_type = match precision.compute_type {
        Some(api::ComputeType::FP16) => HalfType::Fp16,
        Some(api::ComputeType::BF16) | None => HalfType::Bf16,
    };
    let dynamic = |given: Option<&api::LossScaling>, check: &mut Check<'_>| {
        let mut number = |name: &str, text: Option<&String>, default: f64| {
            check.decimal_or(&format!("precision.lossScaling.{name}"), text, default)
        };
        LossScaling::Dynamic {
            initial_scale: number("initialScale", given.and_then(|block| block.initial_scale.as_ref()), 65_536.0),
            growth_factor: number("growthFactor", given.and_then(|block| block.growth_factor.as_ref()), 2.0),
            backoff_factor: number("backoffFactor", given.and_then(|block| block.backoff_factor.as_ref()), 0.5),
            growth_interval_steps: given.and_then(|block| block.growth_interval_steps).map_or(2000, i64::unsigned_abs),
        }
    };
    let loss_scaling = match &precision.loss_scaling {
        Some(block) if block.kind == api::LossScalingType::Static => {
            LossScaling::Static { scale: check.decimal_or("precision.lossScaling.scale", block.scale.as_ref(), 1.0) }
        }
        Some(block) => dynamic(Some(block), check),
        // bf16 has the range of f32: nothing underflows that would not underflow in f32.
        None if compute_type == HalfType::Bf16 => LossScaling::Static { scale: 1.0 },
        None => dynamic(None, check),
    };
    Precision::Amp(Amp { compute_type, loss_scaling })
}
