//! The scale of gradients that travel between hosts in f16.

/// On the wire the norm of all gradients is from a half of this to all of it: no number can be larger, and in a hundred
/// million numbers a typical one is still 8,000 times the smallest normal f16.
const NORM: i32 = 13;

/// A power of two that keeps gradients inside the range of f16. Ranks that see the same reduced gradients have the same
/// scale.
#[derive(Debug, Clone, PartialEq)]
pub struct WireScale {
    /// Running maximum of the norm; `None`: no step has shown one.
    norm: Option<f32>,
}

impl WireScale {
    /// Continues with a norm that [`WireScale::norm`] has returned.
    pub fn new(norm: Option<f32>) -> WireScale {
        WireScale { norm }
    }

    pub fn norm(&self) -> Option<f32> {
        self.norm
    }

    /// The scale of the next step; `None`: in 4 bytes, because nothing is known of its gradients.
    pub fn scale(&self) -> Option<f32> {
        let norm = self.norm.filter(|norm| norm.is_normal())?;
        // The norm is from 2^exponent to twice that.
        let exponent = (norm.to_bits() >> 23) as i32 - 127;
        Some(2f32.powi((NORM - 1 - exponent).clamp(-100, 100)))
    }

    /// Ends a step with this norm of the reduced gradients. Small steps lower the maximum slowly, as the next one may be
    /// large again. After gradients that were not finite, the next ones travel in 4 bytes.
    pub fn update(&mut self, norm: f64) {
        let norm = norm as f32;
        self.norm = norm.is_finite().then(|| self.norm.map_or(norm, |before| norm.max(before / 2.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_comes_to_lie_below_8192_whatever_it_is() {
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
    fn it_follows_a_larger_norm_at_once_and_a_smaller_one_slowly() {
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
