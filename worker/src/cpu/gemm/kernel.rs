//! Micro-kernels: one tile of C from one packed panel of A and one of B.
//!
//! A panel consists of 32-bit lanes, each one f32 or a pair of bf16 neighbours in k. A panel of B holds, for each lane
//! of k, `nr` columns next to each other. A panel of A holds `mr` rows [`ROW`] lanes apart, or is like a panel of B
//! with `mr` rows next to each other. Every kernel sums over k in ascending order into one accumulator per element of
//! C, so that an element's bits do not depend on its position in a tile.
#![allow(unsafe_code)]

use super::amx;
use crate::cpu::isa::per_isa;
use crate::cpu::values::{Pointer, with_format};
use crate::cpu::{Element, Format, HalfKernel, Isa};

/// Deepest panel: 256 lanes x 32 columns of B fill 32 KiB, about one L1 cache.
pub(super) const LANES: usize = 256;
/// Lanes from one row of a panel of A to the next: an odd number of cache lines, so that rows do not share cache sets.
pub(super) const ROW: usize = LANES + 16;
/// The tallest tile of any kernel.
pub(super) const MAX_MR: usize = 32;
/// The widest tile of any kernel.
pub(super) const MAX_NR: usize = 32;

/// Sums of a tile on their way to C, row after row of `nr`.
#[repr(align(64))]
pub(super) struct Sums(pub [f32; MAX_MR * MAX_NR]);

/// How a panel of A is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Row after row, [`ROW`] lanes apart.
    Rows,
    /// `mr` rows next to each other for each lane of k.
    Columns,
}

/// How the rows of C are stored.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Lines {
    /// This many elements apart.
    Even(usize),
    /// Every `step`-th pixel in both directions of `rows` x `columns` of them in each image.
    Grid { rows: usize, columns: usize, step: usize, line: usize, image: usize },
}

impl Lines {
    /// Elements from the first row to each row from `row` on, one after another.
    fn offsets(self, row: usize) -> impl Iterator<Item = usize> {
        let (mut y, mut x, mut offset, columns, rows) = match self {
            Lines::Even(stride) => (0, 0, row * stride, usize::MAX, usize::MAX),
            Lines::Grid { rows, columns, step, line, image } => {
                let (above, x) = (row / columns, row % columns);
                let y = above % rows;
                (y, x, above / rows * image + y * line + x * step, columns, rows)
            }
        };
        std::iter::repeat_with(move || {
            let now = offset;
            x += 1;
            match self {
                Lines::Even(stride) => offset += stride,
                Lines::Grid { step, .. } if x < columns => offset += step,
                Lines::Grid { step, line, image, .. } => {
                    offset = offset + line - (columns - 1) * step;
                    (x, y) = (0, y + 1);
                    if y == rows {
                        offset = offset + image - rows * line;
                        y = 0;
                    }
                }
            }
            now
        })
    }
}

/// Where a tile is stored, and what is added to it.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First row of C, at the tile's first column.
    pub c: Pointer,
    pub lines: Lines,
    /// First row of the tile in C.
    pub row: usize,
    /// Rows of the tile within C (at most `mr`).
    pub rows: usize,
    /// Columns of the tile within C (at most `nr`).
    pub columns: usize,
    /// `columns` values added to each row, or null.
    pub bias: *const f32,
    /// Sums of smaller k for this tile, or null, and the elements between their rows. They may be in C itself.
    pub partial: *const f32,
    pub partial_stride: usize,
    /// A matrix that is stored like C and added to it. It may be C itself.
    pub addend: Option<Pointer>,
}

impl Tile {
    /// The tile in C and the stride of its rows, if C and everything that is added are plain f32.
    pub fn plain(&self) -> Option<(*mut f32, usize)> {
        match self.lines {
            Lines::Even(stride) if self.c.format == Format::F32 && self.addend.is_none() => {
                Some((self.c.at(self.row * stride).cast::<f32>(), stride))
            }
            _ => None,
        }
    }
}

/// Which loop a kernel runs.
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
    /// Panels are filled with zeros up to a multiple of this many lanes.
    pub step: usize,
    run: Loop,
}

impl Kernel {
    /// The kernel of f32 lanes for an instruction set; the portable one if the CPU lacks it.
    pub fn of(isa: Isa) -> Kernel {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if isa.available() => Kernel { isa, mr: 12, nr: 32, pairs: false, step: 1, run: Loop::Avx512 },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if isa.available() => Kernel { isa, mr: 6, nr: 16, pairs: false, step: 1, run: Loop::Avx2 },
            _ => Kernel { isa: Isa::Portable, mr: 8, nr: 8, pairs: false, step: 1, run: Loop::Portable },
        }
    }

    /// The kernel of bf16 pairs, if one is wanted and the CPU has it.
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

    /// The kernel of 32 x 32 tiles; packed with the instructions of `isa`.
    pub fn tiles(isa: Isa, tiles: amx::Tiles) -> Kernel {
        Kernel { isa, mr: amx::SIDE, nr: amx::SIDE, pairs: true, step: amx::STEP, run: Loop::Tiles(tiles) }
    }

    /// Values of k in a lane.
    pub fn per_lane(self) -> usize {
        if self.pairs { 2 } else { 1 }
    }

    /// Lanes that hold `k` values, including zeros at the end.
    pub fn lanes(self, k: usize) -> usize {
        k.div_ceil(self.per_lane()).next_multiple_of(self.step)
    }

    /// Every thread calls this before it runs the kernel, and keeps the result until after the last run.
    pub fn enter(self) -> Option<amx::Configured> {
        match self.run {
            Loop::Tiles(tiles) => tiles.configure(),
            _ => None,
        }
    }

    /// Computes `tile = A panel * B panel (+ partial sums) (+ bias) (+ addend)`. Tile kernels take A in
    /// [`Layout::Rows`]; portable ones take either layout.
    ///
    /// # Safety
    /// `a` points to a panel of `lanes` lanes in `layout` (tile kernels: rows), `b` to one of B; the tile's pointers
    /// are valid for its rows, columns and strides, and nothing else writes the tile during the call. The thread is
    /// inside [`Kernel::enter`].
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
    // Half of the rows at a time: their sums fit into 8 registers of 4 lanes.
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

#[inline(always)]
fn finish_body(tile: &Tile, width: usize, sums: &mut Sums) {
    let rows = sums.0.chunks_exact_mut(width).take(tile.rows);
    for ((i, row), offset) in rows.enumerate().zip(tile.lines.offsets(tile.row)) {
        let row = &mut row[..tile.columns];
        if !tile.partial.is_null() {
            let from = tile.partial.wrapping_add(i * tile.partial_stride);
            // SAFETY: the promise about the tile ([`Kernel::run`]).
            let from = unsafe { std::slice::from_raw_parts(from, tile.columns) };
            row.iter_mut().zip(from).for_each(|(x, &y)| *x += y);
        }
        if !tile.bias.is_null() {
            // SAFETY: as above.
            let bias = unsafe { std::slice::from_raw_parts(tile.bias, tile.columns) };
            row.iter_mut().zip(bias).for_each(|(x, &y)| *x += y);
        }
        if let Some(addend) = tile.addend {
            with_format!(addend.format, T => {
                // SAFETY: as above.
                let from = unsafe { std::slice::from_raw_parts(addend.at(offset).cast::<T>(), tile.columns) };
                row.iter_mut().zip(from).for_each(|(x, &y)| *x += Element::get(y));
            });
        }
        with_format!(tile.c.format, T => {
            // SAFETY: as above; the slices read from are no longer in use.
            let to = unsafe { std::slice::from_raw_parts_mut(tile.c.at(offset).cast::<T>(), tile.columns) };
            to.iter_mut().zip(row).for_each(|(to, x)| *to = <T as Element>::of(*x));
        });
    }
}

per_isa! {
    /// Adds what has to be added to the sums of a tile (rows of `width`) and stores them, in any format and at edges.
    /// The tile's pointers are those that [`Kernel::run`] requires.
    pub(super) fn finish = finish_body(tile: &Tile, width: usize, sums: &mut Sums)
}
