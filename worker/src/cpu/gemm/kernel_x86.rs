//! The x86-64 micro-kernels.
//!
//! Inlined helpers compile with the instructions of the calling kernel, and the sums stay in
//! registers.
#![allow(unsafe_code)]

use super::tile::{Layout, ROW, Sums, Tile, finish};
use crate::cpu::Isa;
use std::arch::x86_64::*;

/// # Safety
/// See [`super::kernel::Kernel::run`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn avx512_12x32(
    layout: Layout,
    k: usize,
    a: *const f32,
    b: *const f32,
    tile: &Tile,
    sums: &mut Sums,
) {
    prefetch(tile);
    // SAFETY: as promised by the caller. Constant strides fold into addresses; constant row counts
    // keep the last tile of a column from computing many rows that do not exist.
    unsafe {
        match (layout, tile.rows.div_ceil(4)) {
            (Layout::Rows, 1) => store(multiply_f32::<4, ROW, 1>(k, a, b), tile, sums),
            (Layout::Rows, 2) => store(multiply_f32::<8, ROW, 1>(k, a, b), tile, sums),
            (Layout::Rows, _) => store(multiply_f32::<12, ROW, 1>(k, a, b), tile, sums),
            (Layout::Columns, 1) => store(multiply_f32::<4, 1, 12>(k, a, b), tile, sums),
            (Layout::Columns, 2) => store(multiply_f32::<8, 1, 12>(k, a, b), tile, sums),
            (Layout::Columns, _) => store(multiply_f32::<12, 1, 12>(k, a, b), tile, sums),
        }
    }
}

/// # Safety
/// `a` and `b` point to panels of `k` lanes; the CPU has AVX-512 F.
#[inline(always)]
unsafe fn multiply_f32<const ROWS: usize, const ALONG: usize, const DEPTH: usize>(
    k: usize,
    mut a: *const f32,
    mut b: *const f32,
) -> [[__m512; 2]; ROWS] {
    // SAFETY: as promised by the caller.
    let mut sums = unsafe { [[_mm512_setzero_ps(); 2]; ROWS] };
    for _ in 0..k {
        // SAFETY: as promised by the caller.
        unsafe {
            let low = _mm512_loadu_ps(b);
            let high = _mm512_loadu_ps(b.add(16));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.add(i * ALONG));
                sum[0] = _mm512_fmadd_ps(x, low, sum[0]);
                sum[1] = _mm512_fmadd_ps(x, high, sum[1]);
            }
            a = a.add(DEPTH);
            b = b.add(32);
        }
    }
    sums
}

/// # Safety
/// See [`super::kernel::Kernel::run`]; A in [`Layout::Rows`].
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn dpbf16_12x32(lanes: usize, a: *const f32, b: *const f32, tile: &Tile, sums: &mut Sums) {
    prefetch(tile);
    // SAFETY: as promised by the caller.
    unsafe {
        match tile.rows.div_ceil(4) {
            1 => store(multiply_pairs::<4>(lanes, a, b), tile, sums),
            2 => store(multiply_pairs::<8>(lanes, a, b), tile, sums),
            _ => store(multiply_pairs::<12>(lanes, a, b), tile, sums),
        }
    }
}

/// # Safety
/// `a` and `b` point to panels of `lanes` lanes; the CPU has AVX-512 F and BF16.
#[inline(always)]
unsafe fn multiply_pairs<const ROWS: usize>(lanes: usize, mut a: *const f32, mut b: *const f32) -> [[__m512; 2]; ROWS] {
    // SAFETY: both types are 512 bits without invalid values.
    let halves = |lanes: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(lanes) };
    // SAFETY: as promised by the caller.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        for _ in 0..lanes {
            let low = halves(_mm512_loadu_si512(b.cast()));
            let high = halves(_mm512_loadu_si512(b.add(16).cast()));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = halves(_mm512_set1_epi32(*a.add(i * ROW).cast::<i32>()));
                sum[0] = _mm512_dpbf16_ps(sum[0], x, low);
                sum[1] = _mm512_dpbf16_ps(sum[1], x, high);
            }
            a = a.add(1);
            b = b.add(32);
        }
        sums
    }
}

/// Prefetches the tile, which is needed only after the loop; a prefetch never faults.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch(tile: &Tile) {
    if let Some((c, stride)) = tile.plain() {
        for i in 0..tile.rows {
            let row = c.wrapping_add(i * stride).cast::<i8>();
            _mm_prefetch::<_MM_HINT_T1>(row);
            _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(64));
            _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(124));
        }
    }
}

/// Stores plain tiles straight from registers to C, and others through `sums`.
///
/// # Safety
/// See [`super::kernel::Kernel::run`]; the CPU has AVX-512 F.
#[inline(always)]
unsafe fn store<const ROWS: usize>(result: [[__m512; 2]; ROWS], tile: &Tile, sums: &mut Sums) {
    let Some((c, stride)) = tile.plain() else {
        for (i, row) in result.iter().enumerate() {
            // SAFETY: `sums` has 32 rows of 32.
            unsafe {
                _mm512_storeu_ps(sums.0.as_mut_ptr().add(i * 32), row[0]);
                _mm512_storeu_ps(sums.0.as_mut_ptr().add(i * 32 + 16), row[1]);
            }
        }
        finish(Isa::Avx512, tile, 32, sums);
        return;
    };
    let full = ((1u64 << tile.columns.min(32)) - 1) as u32;
    let masks = [full as u16, (full >> 16) as u16];
    for half in 0..2 {
        let mask = masks[half];
        if mask == 0 {
            continue;
        }
        let skip = 16 * half;
        // SAFETY: as promised by the caller.
        let mut bias = unsafe { _mm512_setzero_ps() };
        if !tile.bias.is_null() {
            // SAFETY: masked to the columns that exist.
            bias = unsafe { _mm512_maskz_loadu_ps(mask, tile.bias.add(skip)) };
        }
        for (i, sum) in result.iter().enumerate() {
            if i < tile.rows {
                // SAFETY: row `i` exists, columns are masked.
                unsafe {
                    let mut value = sum[half];
                    if !tile.partial.is_null() {
                        let from = tile.partial.add(i * tile.partial_stride + skip);
                        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, from));
                    }
                    if !tile.bias.is_null() {
                        value = _mm512_add_ps(value, bias);
                    }
                    _mm512_mask_storeu_ps(c.add(i * stride + skip), mask, value);
                }
            }
        }
    }
}

/// # Safety
/// See [`super::kernel::Kernel::run`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn avx2_6x16(layout: Layout, k: usize, a: *const f32, b: *const f32, tile: &Tile, sums: &mut Sums) {
    // SAFETY: as promised by the caller.
    let result = unsafe {
        match layout {
            Layout::Rows => f32_6x16::<ROW, 1>(k, a, b),
            Layout::Columns => f32_6x16::<1, 6>(k, a, b),
        }
    };
    let plain = if tile.columns == 16 && tile.bias.is_null() { tile.plain() } else { None };
    let Some((c, stride)) = plain else {
        for (i, row) in result.iter().enumerate() {
            // SAFETY: `sums` has 6 rows of 16.
            unsafe {
                _mm256_storeu_ps(sums.0.as_mut_ptr().add(i * 16), row[0]);
                _mm256_storeu_ps(sums.0.as_mut_ptr().add(i * 16 + 8), row[1]);
            }
        }
        finish(Isa::Avx2, tile, 16, sums);
        return;
    };
    for (i, row) in result.iter().enumerate() {
        if i < tile.rows {
            for (half, &sum) in row.iter().enumerate() {
                // SAFETY: row `i` and all 16 columns exist.
                unsafe {
                    let mut value = sum;
                    if !tile.partial.is_null() {
                        let from = tile.partial.add(i * tile.partial_stride + 8 * half);
                        value = _mm256_add_ps(value, _mm256_loadu_ps(from));
                    }
                    _mm256_storeu_ps(c.add(i * stride + 8 * half), value);
                }
            }
        }
    }
}

/// # Safety
/// `a` and `b` point to panels of `k` lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn f32_6x16<const ALONG: usize, const DEPTH: usize>(
    k: usize,
    mut a: *const f32,
    mut b: *const f32,
) -> [[__m256; 2]; 6] {
    let mut sums = [[_mm256_setzero_ps(); 2]; 6];
    for _ in 0..k {
        // SAFETY: as promised by the caller.
        unsafe {
            let low = _mm256_loadu_ps(b);
            let high = _mm256_loadu_ps(b.add(8));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = _mm256_broadcast_ss(&*a.add(i * ALONG));
                sum[0] = _mm256_fmadd_ps(x, low, sum[0]);
                sum[1] = _mm256_fmadd_ps(x, high, sum[1]);
            }
            a = a.add(DEPTH);
            b = b.add(16);
        }
    }
    sums
}
