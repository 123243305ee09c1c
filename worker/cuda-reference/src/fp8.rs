//! FP8 by definition: "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0, tables 1 and
//! 2.

use switchyard_cuda::kernels;

/// A format with sign, exponent and fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8 {
    fraction_bits: i32,
    bias: i32,
    /// Bits of the largest finite value.
    largest: u8,
    /// Bits of infinity, if the format has one.
    infinity: Option<u8>,
}

/// No infinity, and one NaN per sign.
pub const E4M3: Fp8 = Fp8 { fraction_bits: 3, bias: 7, largest: 0x7e, infinity: None };
/// Infinity and NaN as in IEEE 754.
pub const E5M2: Fp8 = Fp8 { fraction_bits: 2, bias: 15, largest: 0x7b, infinity: Some(0x7c) };

const SIGN: u8 = 0x80;
const NAN: u8 = 0x7f;

impl From<kernels::fp8::Fp8> for Fp8 {
    fn from(format: kernels::fp8::Fp8) -> Fp8 {
        match format {
            kernels::fp8::Fp8::E4m3 => E4M3,
            kernels::fp8::Fp8::E5m2 => E5M2,
        }
    }
}

impl Fp8 {
    pub fn decoded(self, bits: u8) -> f32 {
        let magnitude = bits & !SIGN;
        let number = if magnitude <= self.largest {
            let (exponent, fraction) = (i32::from(magnitude >> self.fraction_bits), f32::from(magnitude & self.mask()));
            let one = (1 << self.fraction_bits) as f32;
            let significand = if exponent == 0 { fraction } else { one + fraction };
            significand * 2f32.powi(exponent.max(1) - self.bias - self.fraction_bits)
        } else if self.infinity == Some(magnitude) {
            f32::INFINITY
        } else {
            f32::NAN
        };
        if bits & SIGN == 0 { number } else { -number }
    }

    fn mask(self) -> u8 {
        (1 << self.fraction_bits) - 1
    }

    /// Rounds to nearest, ties to even; larger values saturate, as with PTX's `satfinite`.
    pub fn encoded(self, number: f32) -> u8 {
        let sign = if number.is_sign_negative() { SIGN } else { 0 };
        if number.is_nan() {
            return NAN;
        }
        let magnitude = f64::from(number.abs()).min(f64::from(self.decoded(self.largest)));
        if magnitude == 0.0 {
            return sign;
        }
        let lowest = 1 - self.bias;
        let exponent = (magnitude.log2().floor() as i32).max(lowest);
        let steps = (magnitude / 2f64.powi(exponent - self.fraction_bits)).round_ties_even() as i32;
        // A value that rounds up to the next power of two has the next bit pattern.
        let bits = if steps < 1 << self.fraction_bits {
            steps
        } else {
            ((exponent + self.bias) << self.fraction_bits) + steps - (1 << self.fraction_bits)
        };
        sign | (bits as u8).min(self.largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_values_match_the_specification() {
        let e4m3 =
            [(0x01, 2f32.powi(-9)), (0x07, 0.875 * 2f32.powi(-6)), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0x7e, 448.0)];
        let e5m2 = [
            (0x01, 2f32.powi(-16)),
            (0x03, 0.75 * 2f32.powi(-14)),
            (0x04, 2f32.powi(-14)),
            (0x3c, 1.0),
            (0x7b, 57344.0),
        ];
        for (format, numbers) in [(E4M3, e4m3), (E5M2, e5m2)] {
            for (bits, number) in numbers {
                assert_eq!((format.decoded(bits), format.encoded(number)), (number, bits));
                assert_eq!((format.decoded(bits | SIGN), format.encoded(-number)), (-number, bits | SIGN));
            }
        }
        assert!(E4M3.decoded(0x7f).is_nan() && E5M2.decoded(0x7d).is_nan() && E5M2.decoded(0x7c).is_infinite());
    }

    #[test]
    fn encoding_rounds_to_nearest_and_ties_to_even() {
        for format in [E4M3, E5M2] {
            for bits in 0..format.largest {
                let (low, high) = (format.decoded(bits), format.decoded(bits + 1));
                let middle = f32::midpoint(low, high);
                assert_eq!(format.encoded(low), bits);
                assert_eq!(format.encoded(middle), bits + bits % 2, "{middle}");
                assert_eq!(format.encoded(middle.next_down()), bits);
                assert_eq!(format.encoded(middle.next_up()), bits + 1);
            }
            assert_eq!([1e9, f32::INFINITY].map(|number| format.encoded(number)), [format.largest; 2]);
            assert!(format.decoded(format.encoded(f32::NAN)).is_nan());
        }
    }
}
