//! Tensors whose format is chosen at run time.

use switchyard_worker::cpu::{Element, Format, Values, ValuesMut, bf16, f16};

#[derive(Debug, Clone)]
pub enum Tensor {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

pub const FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::F16];

impl Tensor {
    /// Rounds `x` to a format.
    pub fn of(format: Format, x: &[f32]) -> Tensor {
        match format {
            Format::F32 => Tensor::F32(x.to_vec()),
            Format::Bf16 => Tensor::Bf16(x.iter().map(|&x| Element::of(x)).collect()),
            Format::F16 => Tensor::F16(x.iter().map(|&x| Element::of(x)).collect()),
        }
    }

    pub fn values(&self) -> Values<'_> {
        match self {
            Tensor::F32(x) => x.into(),
            Tensor::Bf16(x) => x.into(),
            Tensor::F16(x) => x.into(),
        }
    }

    pub fn values_mut(&mut self) -> ValuesMut<'_> {
        match self {
            Tensor::F32(x) => x.into(),
            Tensor::Bf16(x) => x.into(),
            Tensor::F16(x) => x.into(),
        }
    }

    pub fn numbers(&self) -> Vec<f32> {
        match self {
            Tensor::F32(x) => x.clone(),
            Tensor::Bf16(x) => x.iter().map(|&x| Element::get(x)).collect(),
            Tensor::F16(x) => x.iter().map(|&x| Element::get(x)).collect(),
        }
    }
}

/// Largest error of a result that was rounded once to a format, relative to the sum of `k` products
/// of values below 1 that it represents.
pub fn tolerance(format: Format, k: usize, want: f64) -> f64 {
    let rounding = match format {
        Format::F32 => 0.0,
        Format::Bf16 => want.abs() / 256.0,
        // Half an ulp, and half of the smallest subnormal.
        Format::F16 => want.abs() / 2048.0 + 3e-8,
    };
    2e-6 * (k as f64).sqrt().max(1.0) + rounding * 1.001
}
