//! Packers: strided matrices into the panels that the micro-kernels read.
//!
//! A panel is `width` rows of A (or columns of B), stored k by k: `panel[p * width + i]`. Missing rows are zeros.
#![allow(unsafe_code)]

use crate::cpu::Isa;

/// One panel's worth of a matrix in memory: element (i, p) lies at `start + i * along + p * depth`, and one of the two
/// strides is 1.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub start: *const f32,
    /// Elements from one panel row to the next.
    pub along: usize,
    /// Elements from one k to the next.
    pub depth: usize,
}

/// Packs `rows` (at most `width`) rows and `k` steps into `panel`.
///
/// # Safety
/// The source is valid for `rows` x `k` elements; `panel` for `k * width` floats that nobody else uses. On the AVX kernels
/// `width` is 6, 12, 16 or 32. `isa` is available.
pub(super) unsafe fn pack(isa: Isa, width: usize, source: Source, rows: usize, k: usize, panel: *mut f32) {
    // SAFETY: all branches: the caller's promise.
    unsafe {
        if source.along == 1 {
            match (isa, width) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, 12) => x86::copy_12(source, rows, k, panel),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, 32) => x86::copy_32(source, rows, k, panel),
                _ => copy(width, source, rows, k, panel),
            }
        } else {
            match (isa, width) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, 12) => x86::transpose_avx512(12, source, rows, k, panel),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, 32) => {
                    x86::transpose_avx512(32, source, rows.min(16), k, panel);
                    let rest = Source { start: source.start.wrapping_add(16 * source.along), ..source };
                    x86::transpose_avx512(32, rest, rows.saturating_sub(16), k, panel.add(16));
                }
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 6) => x86::transpose_avx2(6, source, rows, k, panel),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 16) => {
                    x86::transpose_avx2(16, source, rows.min(8), k, panel);
                    let rest = Source { start: source.start.wrapping_add(8 * source.along), ..source };
                    x86::transpose_avx2(16, rest, rows.saturating_sub(8), k, panel.add(8));
                }
                _ => transpose(width, source, rows, k, panel),
            }
        }
    }
}

/// # Safety
/// See [`pack`].
unsafe fn copy(width: usize, source: Source, rows: usize, k: usize, panel: *mut f32) {
    for p in 0..k {
        // SAFETY: `rows` consecutive elements exist at each k; the panel has `width` floats for it.
        unsafe {
            let to = panel.add(p * width);
            std::ptr::copy_nonoverlapping(source.start.add(p * source.depth), to, rows);
            for i in rows..width {
                *to.add(i) = 0.0;
            }
        }
    }
}

/// # Safety
/// See [`pack`].
unsafe fn transpose(width: usize, source: Source, rows: usize, k: usize, panel: *mut f32) {
    for i in 0..width {
        for p in 0..k {
            // SAFETY: row `i` is read only if it exists; the panel has `k * width` floats.
            unsafe {
                let value = if i < rows { *source.start.add(i * source.along + p * source.depth) } else { 0.0 };
                *panel.add(p * width + i) = value;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Source;
    use std::arch::x86_64::*;

    fn mask(n: usize) -> u16 {
        if n >= 16 { u16::MAX } else { (1u16 << n) - 1 }
    }

    /// # Safety
    /// See [`super::pack`]; the source is contiguous along the panel.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy_12(source: Source, rows: usize, k: usize, panel: *mut f32) {
        let read = mask(rows);
        for p in 0..k {
            // SAFETY: reads are masked to the rows that exist, writes to the 12 of the panel.
            unsafe {
                let value = _mm512_maskz_loadu_ps(read, source.start.add(p * source.depth));
                _mm512_mask_storeu_ps(panel.add(p * 12), 0x0fff, value);
            }
        }
    }

    /// # Safety
    /// See [`super::pack`]; the source is contiguous along the panel.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy_32(source: Source, rows: usize, k: usize, panel: *mut f32) {
        let (low, high) = (mask(rows), mask(rows.saturating_sub(16)));
        for p in 0..k {
            let from = source.start.wrapping_add(p * source.depth);
            // SAFETY: reads are masked to the rows that exist; the panel has 32 floats for each k.
            unsafe {
                _mm512_storeu_ps(panel.add(p * 32), _mm512_maskz_loadu_ps(low, from));
                _mm512_storeu_ps(panel.add(p * 32 + 16), _mm512_maskz_loadu_ps(high, from.wrapping_add(16)));
            }
        }
    }

    /// Transposes up to 16 rows, contiguous along k, into 12 or 16 floats of each `width`.
    ///
    /// # Safety
    /// See [`super::pack`]; `rows` at most 16.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose_avx512(width: usize, source: Source, rows: usize, k: usize, panel: *mut f32) {
        let write = mask(width);
        let mut p = 0;
        while p < k {
            let steps = (k - p).min(16);
            let read = mask(steps);
            let mut r = [_mm512_setzero_ps(); 16];
            for (i, r) in r.iter_mut().enumerate() {
                if i < rows {
                    // SAFETY: row `i` exists; masked to the steps that exist.
                    *r = unsafe { _mm512_maskz_loadu_ps(read, source.start.add(i * source.along + p)) };
                }
            }
            let columns = transposed_16x16(&r);
            for (j, column) in columns.iter().enumerate() {
                if j < steps {
                    // SAFETY: step `p + j` of the panel; masked to its width.
                    unsafe { _mm512_mask_storeu_ps(panel.add((p + j) * width), write, *column) };
                }
            }
            p += 16;
        }
    }

    /// Rows to columns: pairs, then quadruples inside 128-bit lanes, then the lanes themselves.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn transposed_16x16(r: &[__m512; 16]) -> [__m512; 16] {
        let zero = _mm512_setzero_ps();
        let mut pairs = [zero; 16];
        for i in 0..8 {
            pairs[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let low = |a, b| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        let high = |a, b| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        // quads[4 * i + j], lane L: column 4 * L + j of rows 4 * i .. 4 * i + 4
        let mut quads = [zero; 16];
        for i in 0..4 {
            quads[4 * i] = low(pairs[4 * i], pairs[4 * i + 2]);
            quads[4 * i + 1] = high(pairs[4 * i], pairs[4 * i + 2]);
            quads[4 * i + 2] = low(pairs[4 * i + 1], pairs[4 * i + 3]);
            quads[4 * i + 3] = high(pairs[4 * i + 1], pairs[4 * i + 3]);
        }
        let mut out = [zero; 16];
        for j in 0..4 {
            let a = _mm512_shuffle_f32x4::<0x88>(quads[j], quads[4 + j]);
            let b = _mm512_shuffle_f32x4::<0x88>(quads[8 + j], quads[12 + j]);
            let c = _mm512_shuffle_f32x4::<0xdd>(quads[j], quads[4 + j]);
            let d = _mm512_shuffle_f32x4::<0xdd>(quads[8 + j], quads[12 + j]);
            out[j] = _mm512_shuffle_f32x4::<0x88>(a, b);
            out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(a, b);
            out[4 + j] = _mm512_shuffle_f32x4::<0x88>(c, d);
            out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(c, d);
        }
        out
    }

    /// Transposes up to 8 rows, contiguous along k, into 6 or 8 floats of each `width`.
    ///
    /// # Safety
    /// See [`super::pack`]; `rows` at most 8.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose_avx2(width: usize, source: Source, rows: usize, k: usize, panel: *mut f32) {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let write = _mm256_cmpgt_epi32(_mm256_set1_epi32(width.min(8) as i32), lanes);
        let mut p = 0;
        while p < k {
            let steps = (k - p).min(8);
            let read = _mm256_cmpgt_epi32(_mm256_set1_epi32(steps as i32), lanes);
            let mut r = [_mm256_setzero_ps(); 8];
            for (i, r) in r.iter_mut().enumerate() {
                if i < rows {
                    // SAFETY: row `i` exists; masked to the steps that exist.
                    *r = unsafe { _mm256_maskload_ps(source.start.add(i * source.along + p), read) };
                }
            }
            let columns = transposed_8x8(&r);
            for (j, column) in columns.iter().enumerate() {
                if j < steps {
                    // SAFETY: step `p + j` of the panel; masked to its width.
                    unsafe { _mm256_maskstore_ps(panel.add((p + j) * width), write, *column) };
                }
            }
            p += 8;
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
}
