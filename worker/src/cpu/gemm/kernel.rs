//! Micro-kernels: one tile of C from one packed panel of A and one of B.
//!
//! A panel consists of 32-bit lanes, each one f32 or a pair of bf16 values adjacent in k. A panel
//! of B holds, for each lane of k, `nr` adjacent columns. A panel of A holds `mr` rows [`ROW`]
//! lanes apart, or is like a panel of B with `mr` adjacent rows. Every kernel sums over k in
//! ascending order into one accumulator per element of C, so an element's bits do not depend on its
//! position in a tile.
#![allow(unsafe_code)]

use super::amx;
use super::tile::{Layout, ROW, Sums, Tile, finish};
use crate::cpu::{HalfKernel, Isa};

/// The inner loop of a kernel.
#[derive(Clone, Copy)]
enum Loop {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Dpbf16,
    Tiles(amx::Tiles),
}

/// A micro-kernel with its tile size.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub isa: Isa,
    /// Rows of a tile, width of an A panel.
    pub mr: usize,
    /// Columns of a tile, width of a B panel.
    pub nr: usize,
    /// Whether lanes are pairs of bf16.
    pub pairs: bool,
    /// Panels are zero-padded to a multiple of this many lanes.
    pub step: usize,
    run: Loop,
}

impl Kernel {
    /// The f32 kernel for an instruction set; the portable one if the CPU lacks it.
    pub fn of(isa: Isa) -> Kernel {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if isa.available() => Kernel { isa, mr: 12, nr: 32, pairs: false, step: 1, run: Loop::Avx512 },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if isa.available() => Kernel { isa, mr: 6, nr: 16, pairs: false, step: 1, run: Loop::Avx2 },
            _ => Kernel { isa: Isa::Portable, mr: 8, nr: 8, pairs: false, step: 1, run: Loop::Portable },
        }
    }

    /// The kernel for bf16 pairs, if one is selected and the CPU supports it.
    pub fn half(isa: Isa, half: HalfKernel) -> Option<Kernel> {
        if isa != Isa::Avx512 || !half.available() {
            return None;
        }
        match half {
            HalfKernel::Amx => Some(Kernel::tiles(isa, amx::Tiles::hardware()?)),
            #[cfg(target_arch = "x86_64")]
            HalfKernel::Dpbf16 => Some(Kernel { isa, mr: 12, nr: 32, pairs: true, step: 1, run: Loop::Dpbf16 }),
            _ => None,
        }
    }

    /// The 32 x 32 tile kernel; packing uses the instructions of `isa`.
    pub fn tiles(isa: Isa, tiles: amx::Tiles) -> Kernel {
        Kernel { isa, mr: amx::SIDE, nr: amx::SIDE, pairs: true, step: amx::STEP, run: Loop::Tiles(tiles) }
    }

    /// Values of k per lane.
    pub fn per_lane(self) -> usize {
        if self.pairs { 2 } else { 1 }
    }

    /// Lanes for `k` values, including zero padding.
    pub fn lanes(self, k: usize) -> usize {
        k.div_ceil(self.per_lane()).next_multiple_of(self.step)
    }

    /// Every thread calls this before running the kernel, and keeps the guard until after the last
    /// run.
    pub fn enter(self) -> Option<amx::Configured> {
        match self.run {
            Loop::Tiles(tiles) => tiles.configure(),
            _ => None,
        }
    }

    /// Computes `tile = A panel * B panel (+ partial sums) (+ bias) (+ addend)`. Tile kernels take
    /// A in [`Layout::Rows`]; portable ones take either layout.
    ///
    /// # Safety
    /// `a` points to a panel of `lanes` lanes in `layout` (tile kernels: rows), `b` to one of B;
    /// the tile's pointers are valid for its rows, columns and strides, and nothing else writes the
    /// tile during the call. The thread is inside [`Kernel::enter`].
    #[inline]
    pub unsafe fn run(self, layout: Layout, lanes: usize, a: *const f32, b: *const f32, tile: &Tile, sums: &mut Sums) {
        match self.run {
            // SAFETY: `of` checked the CPU; the pointers are promised by the caller.
            #[cfg(target_arch = "x86_64")]
            Loop::Avx512 => unsafe { super::kernel_x86::avx512_12x32(layout, lanes, a, b, tile, sums) },
            // SAFETY: `half` checked the CPU; the pointers are promised by the caller.
            #[cfg(target_arch = "x86_64")]
            Loop::Dpbf16 => unsafe { super::kernel_x86::dpbf16_12x32(lanes, a, b, tile, sums) },
            // SAFETY: as for AVX-512.
            #[cfg(target_arch = "x86_64")]
            Loop::Avx2 => unsafe { super::kernel_x86::avx2_6x16(layout, lanes, a, b, tile, sums) },
            // SAFETY: the pointers are promised by the caller.
            Loop::Portable => unsafe { portable_8x8(layout, lanes, a, b, tile, sums) },
            Loop::Tiles(tiles) => {
                // SAFETY: as promised by the caller; `sums` has the size of a tile.
                unsafe { tiles.run(lanes / amx::STEP, a, b, sums) };
                finish(self.isa, tile, self.nr, sums);
            }
        }
    }
}

/// # Safety
/// See [`Kernel::run`].
unsafe fn portable_8x8(layout: Layout, k: usize, a: *const f32, b: *const f32, tile: &Tile, sums: &mut Sums) {
    let (along, depth) = if layout == Layout::Rows { (ROW, 1) } else { (1, 8) };
    // Half of the rows at a time: their sums fit into eight 4-lane registers.
    for half in 0..2 {
        let mut local = [[0.0f32; 8]; 4];
        for p in 0..k {
            // SAFETY: the panel has 8 rows and `k` lanes.
            let x = [0, 1, 2, 3].map(|i| unsafe { *a.add((half * 4 + i) * along + p * depth) });
            // SAFETY: panels hold `k * 8` floats.
            let y = unsafe { &*b.add(p * 8).cast::<[f32; 8]>() };
            for i in 0..4 {
                for j in 0..8 {
                    local[i][j] += x[i] * y[j];
                }
            }
        }
        for (i, row) in local.iter().enumerate() {
            sums.0[(half * 4 + i) * 8..][..8].copy_from_slice(row);
        }
    }
    finish(Isa::Portable, tile, 8, sums);
}
