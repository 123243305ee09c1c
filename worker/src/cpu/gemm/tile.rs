//! A tile of C: its panels, its destination, and its epilogue.
#![allow(unsafe_code)]

use crate::cpu::isa::per_isa;
use crate::cpu::values::{Pointer, with_format};
use crate::cpu::{Element, Format};

/// Maximum panel depth: 256 lanes x 32 columns of B fill 32 KiB, about one L1 cache.
pub(super) const LANES: usize = 256;
/// Lanes between rows of an A panel: an odd number of cache lines, so that rows do not share cache
/// sets.
pub(super) const ROW: usize = LANES + 16;
/// The tallest tile of any kernel.
pub(super) const MAX_MR: usize = 32;
/// The widest tile of any kernel.
pub(super) const MAX_NR: usize = 32;

/// Accumulated sums of a tile before they reach C, row after row of `nr`.
#[repr(align(64))]
pub(super) struct Sums(pub [f32; MAX_MR * MAX_NR]);

/// How a panel of A is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Row after row, [`ROW`] lanes apart.
    Rows,
    /// `mr` adjacent rows for each lane of k.
    Columns,
}

/// How the rows of C are stored.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Lines {
    /// This many elements apart.
    Even(usize),
    /// Every `step`-th pixel in both directions: `rows` x `columns` of them in each image.
    Grid { rows: usize, columns: usize, step: usize, line: usize, image: usize },
}

impl Lines {
    /// Element offsets from the first row to each row from `row` on.
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

/// Where a tile is stored, and its epilogue operands.
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
    /// Partial sums over smaller k for this tile, or null, and their row stride. They can be in C
    /// itself.
    pub partial: *const f32,
    pub partial_stride: usize,
    /// A matrix that is stored like C and added to it. It can be C itself.
    pub addend: Option<Pointer>,
}

impl Tile {
    /// The tile in C and its row stride, if C and all epilogue operands are plain f32.
    pub fn plain(&self) -> Option<(*mut f32, usize)> {
        match self.lines {
            Lines::Even(stride) if self.c.format == Format::F32 && self.addend.is_none() => {
                Some((self.c.at(self.row * stride).cast::<f32>(), stride))
            }
            _ => None,
        }
    }
}

#[inline(always)]
fn finish_body(tile: &Tile, width: usize, sums: &mut Sums) {
    let rows = sums.0.chunks_exact_mut(width).take(tile.rows);
    for ((i, row), offset) in rows.enumerate().zip(tile.lines.offsets(tile.row)) {
        let row = &mut row[..tile.columns];
        if !tile.partial.is_null() {
            let from = tile.partial.wrapping_add(i * tile.partial_stride);
            // SAFETY: guaranteed for the tile by [`super::kernel::Kernel::run`].
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
    /// Applies the epilogue to the sums of a tile (rows of `width`) and stores them, in any format
    /// and at edges. The tile's pointers are those that [`super::kernel::Kernel::run`] requires.
    pub(super) fn finish = finish_body(tile: &Tile, width: usize, sums: &mut Sums)
}
