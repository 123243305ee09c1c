//! Micro-kernels: one tile of C from one packed panel of A and one of B.
//!
//! A panel holds, for each k, `mr` values of A (or `nr` of B) side by side. Every kernel sums over k in ascending order
//! into one accumulator per element of C, so an element's bits do not depend on where in a tile it lies.
#![allow(unsafe_code)]

use crate::cpu::Isa;

/// Where a tile goes and what is added to it.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First element of the tile in C.
    pub c: *mut f32,
    /// Elements between two rows of C.
    pub stride: usize,
    /// Rows of the tile that exist (at most `mr`).
    pub rows: usize,
    /// Columns of the tile that exist (at most `nr`).
    pub columns: usize,
    /// `columns` values added to each row, or null.
    pub bias: *const f32,
    /// Tile of C's stride added element by element, or null. C itself when products accumulate.
    pub addend: *const f32,
}

/// A micro-kernel with its tile size.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub isa: Isa,
    /// Rows of a tile, width of an A panel.
    pub mr: usize,
    /// Columns of a tile, width of a B panel.
    pub nr: usize,
}

/// The widest tile of any kernel.
pub(super) const MAX_MR: usize = 12;
/// The widest tile of any kernel.
pub(super) const MAX_NR: usize = 32;

impl Kernel {
    /// The kernel for an instruction set; portable if the CPU lacks it.
    pub fn of(isa: Isa) -> Kernel {
        match isa {
            Isa::Avx512 if isa.available() => Kernel { isa, mr: 12, nr: 32 },
            Isa::Avx2 if isa.available() => Kernel { isa, mr: 6, nr: 16 },
            _ => Kernel { isa: Isa::Portable, mr: 8, nr: 8 },
        }
    }

    /// Computes `tile = A panel * B panel (+ bias) (+ addend)`.
    ///
    /// # Safety
    /// `a` points to `k * mr` floats, `b` to `k * nr`; the tile's pointers are valid for its rows, columns and strides, and
    /// nobody else writes the tile meanwhile.
    #[inline]
    pub unsafe fn run(self, k: usize, a: *const f32, b: *const f32, tile: &Tile) {
        match self.isa {
            // SAFETY: `of` checked the CPU; the pointers are the caller's promise.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::avx512_12x32(k, a, b, tile) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2_6x16(k, a, b, tile) },
            // SAFETY: the pointers are the caller's promise.
            _ => unsafe { portable_8x8(k, a, b, tile) },
        }
    }
}

/// # Safety
/// See [`Kernel::run`].
unsafe fn portable_8x8(k: usize, a: *const f32, b: *const f32, tile: &Tile) {
    let mut sums = [[0.0f32; 8]; 8];
    // Half of the rows at a time: the sums of a half fit into 8 registers of 4 lanes.
    for (half, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let mut local = [[0.0f32; 8]; 4];
        for p in 0..k {
            // SAFETY: panels hold `k * 8` floats.
            let x = unsafe { &*a.add(p * 8 + half * 4).cast::<[f32; 4]>() };
            // SAFETY: as above.
            let y = unsafe { &*b.add(p * 8).cast::<[f32; 8]>() };
            for i in 0..4 {
                for j in 0..8 {
                    local[i][j] += x[i] * y[j];
                }
            }
        }
        *sums = local;
    }
    // SAFETY: the tile's promise; `sums` has 8 columns.
    unsafe { store(tile, 8, sums.as_ptr().cast()) };
}

/// Adds bias and addend to a finished tile and stores it: the slow way, for edges and the portable kernel.
///
/// # Safety
/// `sums` points to `tile.rows` rows of `width` floats; the rest as in [`Kernel::run`].
unsafe fn store(tile: &Tile, width: usize, sums: *const f32) {
    for i in 0..tile.rows {
        for j in 0..tile.columns {
            // SAFETY: `i` and `j` are inside the tile.
            unsafe {
                let mut value = *sums.add(i * width + j);
                if !tile.bias.is_null() {
                    value += *tile.bias.add(j);
                }
                if !tile.addend.is_null() {
                    value += *tile.addend.add(i * tile.stride + j);
                }
                *tile.c.add(i * tile.stride + j) = value;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Tile;
    use std::arch::x86_64::*;

    /// # Safety
    /// See [`super::Kernel::run`].
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512_12x32(k: usize, mut a: *const f32, mut b: *const f32, tile: &Tile) {
        const ROWS: usize = 12;
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        for i in 0..tile.rows {
            // The tile is needed only after the loop; a prefetch never faults.
            let row = tile.c.wrapping_add(i * tile.stride).cast::<i8>();
            _mm_prefetch::<_MM_HINT_T1>(row);
            _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(64));
            _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(124));
        }
        for _ in 0..k {
            // SAFETY: panels hold `k * 12` and `k * 32` floats.
            unsafe {
                let low = _mm512_loadu_ps(b);
                let high = _mm512_loadu_ps(b.add(16));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(i));
                    sum[0] = _mm512_fmadd_ps(x, low, sum[0]);
                    sum[1] = _mm512_fmadd_ps(x, high, sum[1]);
                }
                a = a.add(ROWS);
                b = b.add(32);
            }
        }
        let full: u32 = if tile.columns >= 32 { u32::MAX } else { (1 << tile.columns) - 1 };
        let masks = [full as u16, (full >> 16) as u16];
        for half in 0..2 {
            let mask = masks[half];
            if mask == 0 {
                continue;
            }
            let skip = 16 * half;
            let mut bias = _mm512_setzero_ps();
            if !tile.bias.is_null() {
                // SAFETY: masked to the columns that exist.
                bias = unsafe { _mm512_maskz_loadu_ps(mask, tile.bias.add(skip)) };
            }
            for (i, sum) in sums.iter().enumerate() {
                if i < tile.rows {
                    // SAFETY: row `i` exists, columns are masked.
                    unsafe {
                        let mut value = sum[half];
                        if !tile.bias.is_null() {
                            value = _mm512_add_ps(value, bias);
                        }
                        if !tile.addend.is_null() {
                            let from = tile.addend.add(i * tile.stride + skip);
                            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, from));
                        }
                        _mm512_mask_storeu_ps(tile.c.add(i * tile.stride + skip), mask, value);
                    }
                }
            }
        }
    }

    /// # Safety
    /// See [`super::Kernel::run`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2_6x16(k: usize, mut a: *const f32, mut b: *const f32, tile: &Tile) {
        const ROWS: usize = 6;
        let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
        for _ in 0..k {
            // SAFETY: panels hold `k * 6` and `k * 16` floats.
            unsafe {
                let low = _mm256_loadu_ps(b);
                let high = _mm256_loadu_ps(b.add(8));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = _mm256_broadcast_ss(&*a.add(i));
                    sum[0] = _mm256_fmadd_ps(x, low, sum[0]);
                    sum[1] = _mm256_fmadd_ps(x, high, sum[1]);
                }
                a = a.add(ROWS);
                b = b.add(16);
            }
        }
        if tile.columns < 16 {
            let mut flat = [0.0f32; ROWS * 16];
            for (i, sum) in sums.iter().enumerate() {
                // SAFETY: `flat` has 16 columns and `ROWS` rows.
                unsafe {
                    _mm256_storeu_ps(flat.as_mut_ptr().add(i * 16), sum[0]);
                    _mm256_storeu_ps(flat.as_mut_ptr().add(i * 16 + 8), sum[1]);
                }
            }
            // SAFETY: the tile's promise; `flat` has 16 columns.
            unsafe { super::store(tile, 16, flat.as_ptr()) };
            return;
        }
        for (i, sum) in sums.iter().enumerate() {
            if i < tile.rows {
                for (half, &sum) in sum.iter().enumerate() {
                    let skip = 8 * half;
                    // SAFETY: row `i` and all 16 columns exist.
                    unsafe {
                        let mut value = sum;
                        if !tile.bias.is_null() {
                            value = _mm256_add_ps(value, _mm256_loadu_ps(tile.bias.add(skip)));
                        }
                        if !tile.addend.is_null() {
                            let from = tile.addend.add(i * tile.stride + skip);
                            value = _mm256_add_ps(value, _mm256_loadu_ps(from));
                        }
                        _mm256_storeu_ps(tile.c.add(i * tile.stride + skip), value);
                    }
                }
            }
        }
    }
}
