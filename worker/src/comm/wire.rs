//! Number formats of gradients between hosts. Sums are computed in f32; a format of 2 bytes halves the traffic.

use super::kernels::detect;
use crate::cpu::element::{Element, bf16, f16};
use crate::cpu::isa::per_isa;

/// The format in which gradients travel between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// 4 bytes, exact.
    #[default]
    F32,
    /// 2 bytes, 11 significant bits, up to 65,504. A larger sum becomes infinity.
    F16,
    /// 2 bytes, 8 significant bits, the range of f32.
    Bf16,
}

impl Wire {
    /// Its name in messages.
    pub fn word(self) -> &'static str {
        match self {
            Wire::F32 => "f32",
            Wire::F16 => "f16",
            Wire::Bf16 => "bf16",
        }
    }

    /// Bytes of a number on the wire.
    pub fn size(self) -> usize {
        match self {
            Wire::F32 => 4,
            Wire::F16 | Wire::Bf16 => 2,
        }
    }

    /// `to[i]` becomes `from[i]` in this format, rounded to nearest, ties to even. Not for F32, which needs no
    /// conversion.
    pub(super) fn encode(self, from: &[f32], to: &mut [u16]) {
        match self {
            Wire::F32 => {}
            Wire::F16 => encode_f16(detect(), from, bytemuck::cast_slice_mut(to)),
            Wire::Bf16 => encode_bf16(detect(), from, bytemuck::cast_slice_mut(to)),
        }
    }

    /// Applies numbers as they came from the wire, as many as `to` has.
    pub(super) fn absorb(self, from: &[u8], to: &mut [f32], how: Absorb) {
        match self {
            Wire::F32 => absorb_f32(detect(), bytemuck::cast_slice(from), to, how),
            Wire::F16 => absorb_f16(detect(), bytemuck::cast_slice(from), to, how),
            Wire::Bf16 => absorb_bf16(detect(), bytemuck::cast_slice(from), to, how),
        }
    }
}

/// What happens to a number that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absorb {
    /// It is added to this rank's number.
    Add,
    /// It is added to this rank's number, and the sum rounded to the wire format: no other rank adds to it.
    AddRounded,
    /// It replaces this rank's number.
    Replace,
}

per_isa! { fn encode_f16 = encode_body(from: &[f32], to: &mut [f16]) }
per_isa! { fn encode_bf16 = encode_body(from: &[f32], to: &mut [bf16]) }
per_isa! { fn absorb_f32 = absorb_body(from: &[f32], to: &mut [f32], how: Absorb) }
per_isa! { fn absorb_f16 = absorb_body(from: &[f16], to: &mut [f32], how: Absorb) }
per_isa! { fn absorb_bf16 = absorb_body(from: &[bf16], to: &mut [f32], how: Absorb) }

#[inline(always)]
fn encode_body<E: Element>(from: &[f32], to: &mut [E]) {
    for (from, to) in from.iter().zip(to) {
        *to = E::of(*from);
    }
}

#[inline(always)]
fn absorb_body<E: Element>(from: &[E], to: &mut [f32], how: Absorb) {
    let pairs = from.iter().zip(to);
    match how {
        Absorb::Add => pairs.for_each(|(from, to)| *to += from.get()),
        Absorb::AddRounded => pairs.for_each(|(from, to)| *to = E::of(*to + from.get()).get()),
        Absorb::Replace => pairs.for_each(|(from, to)| *to = from.get()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// Numbers of every exponent and both signs, with infinities, NaNs and denormals among them.
    fn numbers(seed: u32) -> Vec<f32> {
        let all = (0..4099u32).map(|i| f32::from_bits((i << 20) ^ (i.wrapping_mul(2_654_435_761) >> 12) ^ seed));
        all.chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::from_bits(1), 65_519.9, 65_520.0]).collect()
    }

    fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
        // Which of two NaNs survives an addition is undefined.
        values.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    fn check<E: Element>(
        encode: impl Fn(Isa, &[f32], &mut [E]),
        absorb: impl Fn(Isa, &[E], &mut [f32], Absorb),
        of: impl Fn(f32) -> E,
        get: impl Fn(E) -> f32,
    ) {
        let (mine, theirs) = (numbers(3), numbers(0x7ff));
        let sent: Vec<E> = theirs.iter().map(|x| of(*x)).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let mut encoded = vec![of(0.0); theirs.len()];
            encode(isa, &theirs, &mut encoded);
            assert_eq!(
                bits(&encoded.iter().map(|x| get(*x)).collect::<Vec<_>>()),
                bits(&sent.iter().map(|x| get(*x)).collect::<Vec<_>>())
            );
            for how in [Absorb::Add, Absorb::AddRounded, Absorb::Replace] {
                let mut got = mine.clone();
                absorb(isa, &encoded, &mut got, how);
                let want: Vec<f32> = mine
                    .iter()
                    .zip(&sent)
                    .map(|(mine, sent)| match how {
                        Absorb::Add => mine + get(*sent),
                        Absorb::AddRounded => get(of(mine + get(*sent))),
                        Absorb::Replace => get(*sent),
                    })
                    .collect();
                assert_eq!(bits(&got), bits(&want), "{isa:?} {how:?}");
                if how != Absorb::Add {
                    // Rounded numbers travel on unchanged, including NaNs.
                    let mut again = encoded.clone();
                    encode(isa, &got, &mut again);
                    let mut back = vec![0.0; got.len()];
                    absorb(isa, &again, &mut back, Absorb::Replace);
                    let exact = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(exact(&back), exact(&got), "{isa:?} {how:?}");
                }
            }
        }
    }

    #[test]
    fn all_instruction_sets_convert_alike_and_rounded_numbers_travel_unchanged() {
        check(encode_f16, absorb_f16, f16::from_f32, f16::to_f32);
        check(encode_bf16, absorb_bf16, bf16::from_f32, bf16::to_f32);
    }

    #[test]
    fn what_f16_cannot_hold_becomes_infinity() {
        let mut sent = [0; 3];
        Wire::F16.encode(&[65_504.0, 65_519.9, -65_520.0], &mut sent);
        let mut got = [0.0; 3];
        Wire::F16.absorb(bytemuck::cast_slice(&sent), &mut got, Absorb::Replace);
        assert_eq!(got, [65_504.0, 65_504.0, f32::NEG_INFINITY]);
    }
}
