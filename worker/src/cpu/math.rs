//! Elementary f32 functions, branch-free so that loops over them vectorise.
//!
//! Multiplications and additions are never fused, so the results are the same on every CPU.

/// Below this argument [`exp`] returns 0: the results would soon be denormals, which some CPUs
/// handle slowly.
pub const LOWEST: f32 = -60.0;

/// e to the power `x`, relative error below 3e-7; 0 below [`LOWEST`], infinity above 88.3; NaN
/// stays NaN.
///
/// Cody and Waite's reduction by multiples of ln 2, then a degree-6 polynomial (Taylor coefficients
/// adjusted for +-ln 2 / 2).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Adding this constant rounds to an integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > 88.3 { 88.3 } else { x };
    let clamped = if clamped < LOWEST { LOWEST } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.388_889e-3;
    let p = p * r + 8.333_334e-3;
    let p = p * r + 4.166_666_7e-2;
    let p = p * r + 1.666_666_7e-1;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    let exponent = (shifted.to_bits() << 23).wrapping_add(0x3f80_0000);
    let y = p * f32::from_bits(exponent);
    let y = if x < LOWEST { 0.0 } else { y };
    if x > 88.3 { f32::INFINITY } else { y }
}

/// Hyperbolic tangent, computed from [`exp`]; absolute error below 3e-7.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    2.0 / (1.0 + exp(-2.0 * x)) - 1.0
}

/// The bits of `x` rounded to bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could carry a NaN into infinity or zero.
    (if x.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// The bits of `x` rounded to f16, ties to even; infinity beyond 65,520; NaN stays NaN.
///
/// Adding a value with a suitable exponent makes the adder round at the last bit of f16, for
/// denormals as well.
#[inline(always)]
pub fn f16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // All values below the smallest normal f16 (2^-14) have the same last bit.
    let exponent = if magnitude < 0x3880_0000 { 0x3880_0000 } else { magnitude & 0x7f80_0000 };
    let unit = f32::from_bits(exponent.wrapping_add(13 << 23));
    let rounded = (f32::from_bits(magnitude) + unit).to_bits().wrapping_sub(unit.to_bits());
    // `rounded` counts ulps, including the implicit bit of normal values.
    let normal = ((exponent >> 23).wrapping_sub(113) << 10).wrapping_add(rounded);
    let finite = if magnitude >= 0x477f_f000 { 0x7c00 } else { normal };
    sign | (if magnitude > 0x7f80_0000 { 0x7e00 } else { finite }) as u16
}

/// Converts f16 bits to f32, exactly.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    // Shifted to f32's position, the exponent is too small by 112. A denormal gets the f32 exponent
    // of the smallest normal f16, which is then subtracted as the implicit bit it lacks: no
    // operation sees a denormal f32, which CPUs handle slowly.
    const SMALLEST: u32 = (112 + 1) << 23;
    let normal = (magnitude << 13) + (112 << 23);
    let denormal = (f32::from_bits((magnitude << 13) + SMALLEST) - f32::from_bits(SMALLEST)).to_bits();
    let finite = if magnitude < 0x400 { denormal } else { normal };
    let special = (magnitude << 13) | 0x7f80_0000;
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

/// Cosine of pi times `x` for `x` in 0..=1, with the same additions and multiplications on every
/// machine. (The system's `cos` can differ in the last bit between CPUs, and ranks must agree on
/// the learning rate.)
pub fn cos_pi(x: f64) -> f64 {
    // cos(pi x) = -cos(pi (1 - x)): the series is only used up to a quarter turn.
    let (x, sign) = if x > 0.5 { (1.0 - x, -1.0) } else { (x, 1.0) };
    let squared = (std::f64::consts::PI * x) * (std::f64::consts::PI * x);
    let mut sum = 0.0;
    for k in (1..=12u32).rev() {
        let k = f64::from(k);
        sum = (1.0 + sum) * -squared / ((2.0 * k - 1.0) * (2.0 * k));
    }
    sign * (1.0 + sum)
}

/// Natural logarithm of a positive normal number, with the same operations on every machine;
/// relative error below 1e-15 away from 1.
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    let (mantissa, exponent) =
        if mantissa > std::f64::consts::SQRT_2 { (mantissa / 2.0, exponent + 1) } else { (mantissa, exponent) };
    // ln m = 2 atanh((m - 1) / (m + 1)); the argument is at most 0.1716.
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let mut sum = 0.0;
    for k in (0..=10u32).rev() {
        sum = sum * z * z + 1.0 / f64::from(2 * k + 1);
    }
    2.0 * z * sum + f64::from(exponent) * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate() {
        for i in -600_000..=880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 3e-7, "exp({x}): relative error {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-61.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_accurate() {
        for i in -100_000..=100_000 {
            let x = i as f32 * 2e-4;
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 3e-7, "tanh({x})");
        }
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn cosine_and_logarithm_are_accurate() {
        for i in 0..=10_000 {
            let x = f64::from(i) / 10_000.0;
            assert!((cos_pi(x) - (std::f64::consts::PI * x).cos()).abs() < 1e-15, "cos_pi({x})");
            let y = (f64::from(i) + 1.0) * 1.234e-4;
            assert!((ln(y) - y.ln()).abs() < 1e-14, "ln({y})");
        }
        assert_eq!((cos_pi(0.0), cos_pi(1.0)), (1.0, -1.0));
    }
}
