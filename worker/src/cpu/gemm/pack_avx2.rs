//! AVX2 packers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

/// Transposes up to 8 lines, contiguous along the steps, into up to 8 floats of each `width`.
///
/// # Safety
/// See [`super::pack`]; `lines` at most 8.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn transpose(
    width: usize,
    lines: usize,
    steps: usize,
    start: *const f32,
    along: usize,
    panel: *mut f32,
) {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let write = _mm256_cmpgt_epi32(_mm256_set1_epi32(width.min(8) as i32), lanes);
    for first in (0..steps).step_by(8) {
        let count = (steps - first).min(8);
        let read = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
        let mut r = [_mm256_setzero_ps(); 8];
        for (i, r) in r.iter_mut().enumerate() {
            if i < lines {
                // SAFETY: line `i` exists; masked to the steps that exist.
                *r = unsafe { _mm256_maskload_ps(start.add(i * along + first), read) };
            }
        }
        let columns = transposed_8x8(&r);
        for (j, column) in columns.iter().enumerate() {
            if j < count {
                // SAFETY: step `first + j` of the panel; masked to its width.
                unsafe { _mm256_maskstore_ps(panel.add((first + j) * width), write, *column) };
            }
        }
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn transposed_8x8(r: &[__m256; 8]) -> [__m256; 8] {
    let zero = _mm256_setzero_ps();
    let mut pairs = [zero; 8];
    for i in 0..4 {
        pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // quads[4 * i + j], lane L: column 4 * L + j of rows 4 * i .. 4 * i + 4
    let mut quads = [zero; 8];
    for i in 0..2 {
        quads[4 * i] = _mm256_shuffle_ps::<0x44>(pairs[4 * i], pairs[4 * i + 2]);
        quads[4 * i + 1] = _mm256_shuffle_ps::<0xee>(pairs[4 * i], pairs[4 * i + 2]);
        quads[4 * i + 2] = _mm256_shuffle_ps::<0x44>(pairs[4 * i + 1], pairs[4 * i + 3]);
        quads[4 * i + 3] = _mm256_shuffle_ps::<0xee>(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
    let mut out = [zero; 8];
    for j in 0..4 {
        out[j] = _mm256_permute2f128_ps::<0x20>(quads[j], quads[4 + j]);
        out[4 + j] = _mm256_permute2f128_ps::<0x31>(quads[j], quads[4 + j]);
    }
    out
}
