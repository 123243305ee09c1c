//! Scaling of gradients sent between hosts in f16.

/// Exponent of the upper bound of the scaled norm of all gradients; its lower bound is half of
/// that. No value can exceed the norm, and among a hundred million values a typical one is still
/// 8,000 times the smallest normal f16.
const NORM_EXPONENT: i32 = 13;

/// A power-of-two scale that keeps gradients within the range of f16. Ranks that see the same
/// reduced gradients have the same scale.
#[derive(Debug, Clone, PartialEq)]
pub struct WireScale {
    /// Running maximum of the norm; `None` before the first step.
    norm: Option<f32>,
}

impl WireScale {
    /// Continues with a norm returned by [`WireScale::norm`].
    pub fn new(norm: Option<f32>) -> WireScale {
        WireScale { norm }
    }

    pub fn norm(&self) -> Option<f32> {
        self.norm
    }

    /// The scale of the next step; `None` sends gradients as f32, because nothing is known about
    /// them.
    pub fn scale(&self) -> Option<f32> {
        let norm = self.norm.filter(|norm| norm.is_normal())?;
        // The norm is in 2^exponent..2^(exponent + 1).
        let exponent = (norm.to_bits() >> 23) as i32 - 127;
        Some(2f32.powi((NORM_EXPONENT - 1 - exponent).clamp(-100, 100)))
    }

    /// Ends a step with this norm of the reduced gradients. The maximum decays slowly, because a
    /// large norm can recur. After gradients that were not finite, the next ones are sent as f32.
    pub fn update(&mut self, norm: f64) {
        let norm = norm as f32;
        self.norm = norm.is_finite().then(|| self.norm.map_or(norm, |before| norm.max(before / 2.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scaled_norm_is_below_8192_for_any_norm() {
        for norm in [1e-20, 3e-6, 0.999, 1.0, 1.5, 7e4, 1e20] {
            let mut wire = WireScale::new(None);
            assert_eq!(wire.scale(), None, "the first step travels in 4 bytes");
            wire.update(norm);
            let on_the_wire = norm * f64::from(wire.scale().unwrap());
            assert!((4095.9..8192.0).contains(&on_the_wire), "{norm}: {on_the_wire}");
            assert_eq!(WireScale::new(wire.norm()), wire, "a checkpoint keeps it");
        }
    }

    #[test]
    fn follows_a_larger_norm_immediately_and_a_smaller_one_slowly() {
        let mut wire = WireScale::new(None);
        let mut after = |norm: f64| {
            wire.update(norm);
            wire.scale()
        };
        let scales = [1.0, 16.0, 1.0, 1.0, f64::INFINITY, 1.0, 0.0].map(&mut after);
        assert_eq!(scales, [Some(4096.0), Some(256.0), Some(512.0), Some(1024.0), None, Some(4096.0), Some(8192.0)]);
        assert_eq!(WireScale::new(Some(0.0)).scale(), None);
    }
}
