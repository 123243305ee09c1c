//! Wire formats of gradients between hosts. Sums are computed in f32; a 2-byte format halves the
//! traffic.

use super::kernels::detect;
use crate::cpu::element::{Element, bf16, f16};
use crate::cpu::isa::per_isa;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// 4 bytes, exact.
    #[default]
    F32,
    /// 2 bytes, 11 significant bits, up to 65,504. Larger sums become infinity.
    F16,
    /// 2 bytes, 8 significant bits, the range of f32.
    Bf16,
}

impl Wire {
    /// Name in messages.
    pub fn word(self) -> &'static str {
        match self {
            Wire::F32 => "f32",
            Wire::F16 => "f16",
            Wire::Bf16 => "bf16",
        }
    }

    /// Bytes per element on the wire.
    pub fn size(self) -> usize {
        match self {
            Wire::F32 => 4,
            Wire::F16 | Wire::Bf16 => 2,
        }
    }

    /// Sets `to[i]` to `from[i] * scale` in this format, rounded to nearest, ties to even. `scale`
    /// is a power of two. No-op for F32, which needs no conversion.
    pub(super) fn encode(self, from: &[f32], to: &mut [u16], scale: f32) {
        match self {
            Wire::F32 => {}
            Wire::F16 => encode_f16(detect(), from, bytemuck::cast_slice_mut(to), scale),
            Wire::Bf16 => encode_bf16(detect(), from, bytemuck::cast_slice_mut(to), scale),
        }
    }

    /// Combines received values, as many as `to` has, with `to`; the received values contain the
    /// factor `scale`.
    pub(super) fn combine(self, from: &[u8], to: &mut [f32], mode: Combine, scale: f32) {
        match self {
            Wire::F32 => combine_f32(detect(), bytemuck::cast_slice(from), to, mode, scale),
            Wire::F16 => combine_f16(detect(), bytemuck::cast_slice(from), to, mode, scale),
            Wire::Bf16 => combine_bf16(detect(), bytemuck::cast_slice(from), to, mode, scale),
        }
    }
}

/// How a received value is combined with this rank's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Combine {
    /// Add it.
    Add,
    /// Add it and round the sum to the wire format: no other rank adds to it.
    AddRounded,
    /// Replace this rank's value.
    Replace,
}

per_isa! { fn encode_f16 = encode_body(from: &[f32], to: &mut [f16], scale: f32) }
per_isa! { fn encode_bf16 = encode_body(from: &[f32], to: &mut [bf16], scale: f32) }
per_isa! { fn combine_f32 = combine_body(from: &[f32], to: &mut [f32], mode: Combine, scale: f32) }
per_isa! { fn combine_f16 = combine_body(from: &[f16], to: &mut [f32], mode: Combine, scale: f32) }
per_isa! { fn combine_bf16 = combine_body(from: &[bf16], to: &mut [f32], mode: Combine, scale: f32) }

#[inline(always)]
fn encode_body<E: Element>(from: &[f32], to: &mut [E], scale: f32) {
    for (from, to) in from.iter().zip(to) {
        *to = E::of(*from * scale);
    }
}

#[inline(always)]
fn combine_body<E: Element>(from: &[E], to: &mut [f32], mode: Combine, scale: f32) {
    let pairs = from.iter().zip(to);
    // Exact, like every in-range product with a power of two.
    let inverse = 1.0 / scale;
    match mode {
        Combine::Add => pairs.for_each(|(from, to)| *to += from.get() * inverse),
        Combine::AddRounded => {
            pairs.for_each(|(from, to)| *to = E::of((*to + from.get() * inverse) * scale).get() * inverse);
        }
        Combine::Replace => pairs.for_each(|(from, to)| *to = from.get() * inverse),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// Values of every exponent and both signs, with infinities, NaNs and denormals among them.
    fn numbers(seed: u32) -> Vec<f32> {
        let all = (0..4099u32).map(|i| f32::from_bits((i << 20) ^ (i.wrapping_mul(2_654_435_761) >> 12) ^ seed));
        all.chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::from_bits(1), 65_519.9, 65_520.0]).collect()
    }

    fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
        // Which of two NaNs survives an addition is undefined.
        values.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    fn check<E: Element>(
        encode: impl Fn(Isa, &[f32], &mut [E], f32),
        combine: impl Fn(Isa, &[E], &mut [f32], Combine, f32),
        of: impl Fn(f32) -> E,
        get: impl Fn(E) -> f32,
    ) {
        let (mine, theirs) = (numbers(3), numbers(0x7ff));
        let sent: Vec<E> = theirs.iter().map(|x| of(*x)).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let mut encoded = vec![of(0.0); theirs.len()];
            encode(isa, &theirs, &mut encoded, 1.0);
            assert_eq!(
                bits(&encoded.iter().map(|x| get(*x)).collect::<Vec<_>>()),
                bits(&sent.iter().map(|x| get(*x)).collect::<Vec<_>>())
            );
            for mode in [Combine::Add, Combine::AddRounded, Combine::Replace] {
                let mut got = mine.clone();
                combine(isa, &encoded, &mut got, mode, 1.0);
                let want: Vec<f32> = mine
                    .iter()
                    .zip(&sent)
                    .map(|(mine, sent)| match mode {
                        Combine::Add => mine + get(*sent),
                        Combine::AddRounded => get(of(mine + get(*sent))),
                        Combine::Replace => get(*sent),
                    })
                    .collect();
                assert_eq!(bits(&got), bits(&want), "{isa:?} {mode:?}");
                if mode != Combine::Add {
                    // Rounded numbers travel on unchanged, including NaNs.
                    let mut resent = encoded.clone();
                    encode(isa, &got, &mut resent, 1.0);
                    let mut back = vec![0.0; got.len()];
                    combine(isa, &resent, &mut back, Combine::Replace, 1.0);
                    let exact = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(exact(&back), exact(&got), "{isa:?} {mode:?}");
                }
            }
        }
    }

    #[test]
    fn all_instruction_sets_agree_and_rounded_values_travel_unchanged() {
        check(encode_f16, combine_f16, f16::from_f32, f16::to_f32);
        check(encode_bf16, combine_bf16, bf16::from_f32, bf16::to_f32);
    }

    #[test]
    fn f16_overflow_becomes_infinity() {
        let mut sent = [0; 3];
        Wire::F16.encode(&[65_504.0, 65_519.9, -65_520.0], &mut sent, 1.0);
        let mut got = [0.0; 3];
        Wire::F16.combine(bytemuck::cast_slice(&sent), &mut got, Combine::Replace, 1.0);
        assert_eq!(got, [65_504.0, 65_504.0, f32::NEG_INFINITY]);
    }

    /// Relative error of the sum of a segment that has passed all members of a ring.
    fn error_around_a_ring(members: &[Vec<f32>], scale: f32) -> f64 {
        let mut sent = vec![0; members[0].len()];
        let mut sum = members[0].clone();
        for (hop, own) in members.iter().enumerate().skip(1) {
            Wire::F16.encode(&sum, &mut sent, scale);
            sum.clone_from(own);
            let mode = if hop + 1 == members.len() { Combine::AddRounded } else { Combine::Add };
            Wire::F16.combine(bytemuck::cast_slice(&sent), &mut sum, mode, scale);
        }
        let exact = |i: usize| members.iter().map(|own| f64::from(own[i])).sum::<f64>();
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let off = norm(&mut sum.iter().enumerate().map(|(i, &x)| f64::from(x) - exact(i)));
        off / norm(&mut (0..sum.len()).map(exact))
    }

    /// Each element is rounded in 64 partial sums, which costs 0.25 % of the sum at any magnitude.
    #[test]
    fn small_gradients_of_64_ranks_are_summed_in_f16_as_accurately_as_large_ones() {
        const RANKS: usize = 64;
        const NUMBERS: usize = 4096;
        // Nearly normal, and already divided by the number of ranks, as the engine reduces them.
        let noise = |seed: usize| {
            let uniform = |k: usize| ((seed * 12 + k) as u32).wrapping_mul(2_654_435_761).rotate_left(13);
            let sum: f64 = (0..12).map(|k| f64::from(uniform(k).wrapping_mul(0x85eb_ca6b)) / 4_294_967_296.0).sum();
            ((sum - 6.0) / RANKS as f64) as f32
        };
        let errors = |deviation: f32| {
            let member =
                |rank: usize| (0..NUMBERS).map(|i| deviation * noise(rank * NUMBERS + i)).collect::<Vec<f32>>();
            let members: Vec<Vec<f32>> = (0..RANKS).map(member).collect();
            let square = |i: usize| members.iter().map(|own| f64::from(own[i])).sum::<f64>().powi(2);
            // The norm that the ranks saw in the step before.
            let mut wire = crate::amp::WireScale::new(None);
            wire.update((0..NUMBERS).map(square).sum::<f64>().sqrt());
            (error_around_a_ring(&members, wire.scale().unwrap()), error_around_a_ring(&members, 1.0))
        };
        let (large, _) = errors(1.0);
        assert!(large < 3e-3, "{large}");
        // 1e-3, 8e-6, 1e-6, 1e-9
        for exponent in [-10, -17, -20, -30] {
            let (scaled, plain) = errors(2f32.powi(exponent));
            assert_eq!(scaled, large, "deviation 2^{exponent}");
            assert!(exponent > -17 || plain > 0.05, "deviation 2^{exponent}: {plain} without a scale");
        }
    }
}
