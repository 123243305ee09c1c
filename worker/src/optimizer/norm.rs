//! Gradient norm and clipping.

use crate::cpu::Isa;
use crate::cpu::isa::per_isa;

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// Sums of squares that are added in parallel.
pub const LANES: usize = 16;

#[inline(always)]
pub(super) fn squares_body(x: &[f32], lanes: &mut [f64; 16]) {
    let mut sums = *lanes;
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            let x = f64::from(chunk[i]);
            sums[i] += x * x;
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(x) * f64::from(x);
    }
    *lanes = sums;
}

per_isa! { fn squares = squares_body(x: &[f32], lanes: &mut [f64; 16]) }

/// Sum of squared gradients, in 16 double-precision lanes.
///
/// Finite exactly when all gradients are finite: the squares of finite f32 values cannot overflow
/// f64 in total (3.4e38² times their number is far below 1.8e308), and squares are never negative,
/// so infinities do not cancel.
pub fn sum_of_squares(gradients: &[f32]) -> f64 {
    squares_with(best_isa(), gradients)
}

/// Adds the squares of some gradients, a multiple of [`LANES`] unless they are the last ones, to
/// their lanes.
pub fn add_squares(gradients: &[f32], lanes: &mut [f64; LANES]) {
    squares(best_isa(), gradients, lanes);
}

fn best_isa() -> Isa {
    Isa::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Portable)
}

pub(super) fn squares_with(isa: Isa, gradients: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    squares(isa, gradients, &mut lanes);
    lanes.iter().sum()
}

/// L2 norm of all gradients.
pub fn gradient_norm(gradients: &[f32]) -> f64 {
    sum_of_squares(gradients).sqrt()
}

/// Gradient factor for [`Optimizer::begin_step`](super::Optimizer::begin_step): removes
/// `loss_scale` (1 without loss scaling) and clips to `max_norm`. `norm` is the unscaled norm:
/// [`gradient_norm`] divided by `loss_scale`.
pub fn gradient_scale(norm: f64, max_norm: Option<f64>, loss_scale: f64) -> f32 {
    let clip = max_norm.map_or(1.0, |max_norm| (max_norm / (norm + CLIP_EPSILON)).min(1.0));
    (clip / loss_scale) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn finite_exactly_when_all_gradients_are(
            mut gradients in prop::collection::vec(any::<f32>().prop_filter("finite", |x| x.is_finite()), 1..200),
            bad in prop::option::of((any::<prop::sample::Index>(), prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]))),
        ) {
            if let Some((at, value)) = bad {
                let at = at.index(gradients.len());
                gradients[at] = value;
            }
            let naive: f64 = gradients.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let sum = squares_with(isa, &gradients);
                prop_assert_eq!(sum.is_finite(), bad.is_none());
                prop_assert!(bad.is_some() || (sum - naive).abs() <= 1e-13 * naive);
            }
        }
    }

    #[test]
    fn largest_gradients_are_finite() {
        assert!(sum_of_squares(&vec![f32::MAX; 100_000]).is_finite());
    }

    #[test]
    fn clips_unscaled_gradients() {
        assert_eq!(gradient_scale(100.0, None, 1.0), 1.0);
        assert_eq!(gradient_scale(0.5, Some(1.0), 1.0), 1.0);
        assert_eq!(gradient_scale(4.0, Some(1.0), 1.0), (1.0f64 / 4.000_001) as f32);
        // Scaled gradients with norm 4 * 1024.
        assert_eq!(gradient_scale(4.0, Some(1.0), 1024.0), gradient_scale(4.0, Some(1.0), 1.0) / 1024.0);
        assert_eq!(gradient_scale(0.0, Some(1.0), 0.5), 2.0);
    }
}
