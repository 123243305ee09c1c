//! Norm of the gradients, and the factor that follows from it.

use crate::cpu::Isa;
use crate::cpu::isa::per_isa;

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

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

/// Sum of the squares of gradients, in 16 lanes of double precision.
///
/// It is finite exactly when all gradients are: no sum of squares of finite f32 numbers leaves the range of f64 (3.4e38²
/// times their number is far below 1.8e308), and squares are never negative, so infinities do not cancel.
pub fn sum_of_squares(gradients: &[f32]) -> f64 {
    let isa = Isa::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Portable);
    squares_with(isa, gradients)
}

pub(super) fn squares_with(isa: Isa, gradients: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 16];
    squares(isa, gradients, &mut lanes);
    lanes.iter().sum()
}

/// Euclidean norm of all gradients.
pub fn gradient_norm(gradients: &[f32]) -> f64 {
    sum_of_squares(gradients).sqrt()
}

/// Factor of the gradients for [`Optimizer::begin_step`](super::Optimizer::begin_step): removes `loss_scale` (1 without
/// loss scaling) and clips to the norm `most`. `norm` is the norm without the scale: [`gradient_norm`] divided by it.
pub fn gradient_scale(norm: f64, most: Option<f64>, loss_scale: f64) -> f32 {
    let clip = most.map_or(1.0, |most| (most / (norm + CLIP_EPSILON)).min(1.0));
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
    fn clips_the_gradients_without_their_scale() {
        assert_eq!(gradient_scale(100.0, None, 1.0), 1.0);
        assert_eq!(gradient_scale(0.5, Some(1.0), 1.0), 1.0);
        assert_eq!(gradient_scale(4.0, Some(1.0), 1.0), (1.0f64 / 4.000_001) as f32);
        // Scaled gradients of norm 4 * 1024.
        assert_eq!(gradient_scale(4.0, Some(1.0), 1024.0), gradient_scale(4.0, Some(1.0), 1.0) / 1024.0);
        assert_eq!(gradient_scale(0.0, Some(1.0), 0.5), 2.0);
    }
}
