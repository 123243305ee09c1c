//! Sums of `f32` arrays in shared memory. Every instruction set adds the same values in the same
//! order, without fused multiply-add, so results are bit-identical.
#![allow(unsafe_code)]

use crate::cpu::Isa;
use std::sync::OnceLock;

/// Floats per inner step; they stay in registers.
const BLOCK: usize = 64;

/// The instruction set named by `SWITCHYARD_KERNEL`, or the best one this CPU has.
pub(super) fn detect() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        let requested = std::env::var(switchyard_worker_contract::env::KERNEL).ok();
        // Engine set-up reports an unknown name. The sums are the same with every instruction set.
        Isa::detect(requested.as_deref()).unwrap_or(Isa::Portable)
    })
}

/// Computes `sum[i] = sources[0][i] + sources[1][i] + ...` and stores it to `destinations[..][i]`
/// in one pass, for `i` in `start..start + len`.
///
/// # Safety
/// All pointers are valid for `start + len` floats, and nothing else touches `start..start + len`
/// of any of them during the call. Sources and destinations may be the same arrays; different
/// arrays must not overlap.
pub(super) unsafe fn reduce(sources: &[*mut f32], destinations: &[*mut f32], start: usize, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { reduce_with(detect(), sources, destinations, start, len) }
}

/// # Safety
/// As [`reduce`]; the CPU has `isa`.
unsafe fn reduce_with(isa: Isa, sources: &[*mut f32], destinations: &[*mut f32], start: usize, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => reduce_avx2(sources, destinations, start, len),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => reduce_avx512(sources, destinations, start, len),
            _ => reduce_body(sources, destinations, start, len),
        }
    }
}

/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_body(sources: &[*mut f32], destinations: &[*mut f32], start: usize, len: usize) {
    // SAFETY: all indices are below `start + len`, as promised by the caller. Whole blocks are read
    // before they are written, and blocks of one array do not overlap.
    unsafe {
        let whole = len / BLOCK * BLOCK;
        for at in (start..start + whole).step_by(BLOCK) {
            let mut sum: [f32; BLOCK] = sources[0].add(at).cast::<[f32; BLOCK]>().read();
            for source in &sources[1..] {
                let next = source.add(at).cast::<[f32; BLOCK]>();
                for (i, sum) in sum.iter_mut().enumerate() {
                    *sum += (*next)[i];
                }
            }
            for destination in destinations {
                destination.add(at).cast::<[f32; BLOCK]>().write(sum);
            }
        }
        for at in start + whole..start + len {
            let mut sum = sources[0].add(at).read();
            for source in &sources[1..] {
                sum += source.add(at).read();
            }
            for destination in destinations {
                destination.add(at).write(sum);
            }
        }
    }
}

/// # Safety
/// As [`reduce`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn reduce_avx2(sources: &[*mut f32], destinations: &[*mut f32], start: usize, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { reduce_body(sources, destinations, start, len) }
}

/// # Safety
/// As [`reduce`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn reduce_avx512(sources: &[*mut f32], destinations: &[*mut f32], start: usize, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { reduce_body(sources, destinations, start, len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u32, len: usize) -> Vec<f32> {
        (0..len as u32)
            .map(|i| {
                let x = i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503));
                (x >> 8) as f32 / 65_536.0 - 128.0
            })
            .collect()
    }

    #[test]
    fn all_instruction_sets_agree_bit_for_bit() {
        for len in [0, 1, 15, 63, 64, 65, 1000] {
            for ranks in 1..6 {
                let inputs: Vec<Vec<f32>> = (0..ranks).map(|r| numbers(r, len + 7)).collect();
                let mut expected: Vec<f32> = inputs[0].clone();
                for input in &inputs[1..] {
                    expected[3..3 + len].iter_mut().zip(&input[3..]).for_each(|(a, b)| *a += *b);
                }
                for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                    let mut arrays = inputs.clone();
                    let pointers: Vec<*mut f32> = arrays.iter_mut().map(|a| a.as_mut_ptr()).collect();
                    // SAFETY: the arrays have len + 7 floats and belong to this test.
                    unsafe { reduce_with(isa, &pointers, &pointers, 3, len) };
                    for (array, input) in arrays.iter().zip(&inputs) {
                        assert_eq!(array[3..3 + len], expected[3..3 + len], "{isa:?} {len} {ranks}");
                        assert_eq!((&array[..3], &array[3 + len..]), (&input[..3], &input[3 + len..]));
                    }
                }
            }
        }
    }
}
