//! Element formats of tensors in memory. Arithmetic is always in f32.

use super::math::{bf16_from_f32, f16_from_f32, f16_to_f32};
use bytemuck::Pod;
pub use half::{bf16, f16};

/// Element format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    F32,
    /// 8 exponent bits and 7 fraction bits.
    Bf16,
    /// IEEE half precision: 5 exponent bits and 10 fraction bits.
    F16,
}

impl Format {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::Bf16 | Format::F16 => 2,
        }
    }
}

/// A stored element. Conversions are branch-free, so loops over them vectorise, and they are
/// bit-identical on every CPU.
pub trait Element: Pod + Send + Sync {
    const FORMAT: Format;
    /// Converts to f32, exactly.
    fn get(self) -> f32;
    /// Rounds to the nearest value of the format, ties to even. Values beyond its range become
    /// infinite; NaN stays NaN.
    fn of(value: f32) -> Self;
}

impl Element for f32 {
    const FORMAT: Format = Format::F32;

    #[inline(always)]
    fn get(self) -> f32 {
        self
    }

    #[inline(always)]
    fn of(value: f32) -> f32 {
        value
    }
}

impl Element for bf16 {
    const FORMAT: Format = Format::Bf16;

    #[inline(always)]
    fn get(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn of(value: f32) -> bf16 {
        bf16::from_bits(bf16_from_f32(value))
    }
}

impl Element for f16 {
    const FORMAT: Format = Format::F16;

    #[inline(always)]
    fn get(self) -> f32 {
        f16_to_f32(self.to_bits())
    }

    #[inline(always)]
    fn of(value: f32) -> f16 {
        f16::from_bits(f16_from_f32(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_round_trip_and_round_to_nearest_even() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            for (got, want, back) in [
                (Element::get(b), b.to_f32(), <bf16 as Element>::of(Element::get(b)).to_bits()),
                (Element::get(h), h.to_f32(), <f16 as Element>::of(Element::get(h)).to_bits()),
            ] {
                if want.is_nan() {
                    assert!(got.is_nan());
                    continue;
                }
                assert_eq!(got.to_bits(), want.to_bits(), "{bits:#x}");
                assert_eq!(back, bits, "{bits:#x}");
            }
        }
        // All exponents and a sample of fractions, including the halfway cases.
        for high in 0..=0xffff_u32 {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(high << 16 | low);
                let (b, h) = (<bf16 as Element>::of(x), <f16 as Element>::of(x));
                if x.is_nan() {
                    assert!(b.is_nan() && h.is_nan(), "{x:?}");
                } else {
                    assert_eq!(b.to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
                    assert_eq!(h.to_bits(), f16::from_f32(x).to_bits(), "{x:e}");
                }
            }
        }
    }
}
