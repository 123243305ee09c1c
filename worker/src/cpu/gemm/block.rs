//! Blocks of a matrix product, and products small enough for one thread.
#![allow(unsafe_code)]

use super::kernel::Kernel;
use super::operand::Operand;
use super::pack::{Piece, layout, pack_a, pack_b};
use super::tile::{LANES, Lines, MAX_MR, MAX_NR, ROW, Sums, Tile};
use super::{MC, NC, NC_SMALL, Size, View, even_part};
use crate::cpu::values::Pointer;
use crate::cpu::{Format, Isa};

/// The part of a product that uses one packed block of B.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub row: usize,
    pub rows: usize,
    pub column: usize,
    pub columns: usize,
    pub depth: usize,
    pub depths: usize,
    /// Whether this is the first block of K.
    pub first: bool,
    pub last: bool,
}

/// Rows of C, and columns relative to the block.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub row: usize,
    pub rows: usize,
    pub column: usize,
    pub columns: usize,
}

/// C and the epilogue operands.
pub(in crate::cpu) struct Target {
    pub c: Pointer,
    pub lines: Lines,
    /// One value per column, or null.
    pub bias: *const f32,
    /// Stored like C; can be C itself.
    pub addend: Option<Pointer>,
}

// SAFETY: bias and addend are only read; each task touches only its own tiles of C.
unsafe impl Sync for Target {}

impl Target {
    /// Whether C itself can hold the partial sums between blocks of K.
    pub(super) fn holds_sums(&self) -> bool {
        self.c.format == Format::F32 && matches!(self.lines, Lines::Even(_))
    }
}

/// Partial sums between blocks of K.
pub(super) struct Partial {
    /// Rows of [`NC`] from the block's first row and column on; null if the sums are in C.
    pub staged: Address,
    pub block: Block,
}

pub(super) struct Address(pub *mut f32);

// SAFETY: each task touches its own tiles.
unsafe impl Sync for Address {}

impl Partial {
    /// The tile at (`row`, `column`) of C. Bias and addend are applied in the last block for staged
    /// sums, in the first for sums in C.
    fn tile(&self, c: &Target, row: usize, column: usize, rows: usize, columns: usize) -> Tile {
        let (block, staged) = (self.block, !self.staged.0.is_null());
        let mut tile = Tile {
            c: c.c.at(column),
            lines: c.lines,
            row,
            rows,
            columns,
            bias: if c.bias.is_null() { c.bias } else { c.bias.wrapping_add(column) },
            partial: std::ptr::null(),
            partial_stride: 0,
            addend: c.addend.map(|addend| addend.at(column)),
        };
        let mut add = |from: *const f32, stride: usize| (tile.partial, tile.partial_stride) = (from, stride);
        if staged {
            let sums = self.staged.0.wrapping_add((row - block.row) * NC + column - block.column);
            if !block.first {
                add(sums, NC);
            }
            if !block.last {
                (tile.c, tile.lines, tile.row) = (Pointer::new(sums.cast_const()), Lines::Even(NC), 0);
            }
        } else if let (Lines::Even(stride), false) = (c.lines, block.first) {
            add(tile.c.at(row * stride).cast::<f32>(), stride);
        } else if let (Lines::Even(stride), Some(addend)) = (c.lines, tile.addend)
            && addend.format == Format::F32
        {
            // The addend has the layout of the sums, so it can stand in for them.
            add(addend.at(row * stride).cast::<f32>(), stride);
            tile.addend = None;
        }
        if if staged { !block.last } else { !block.first } {
            (tile.bias, tile.addend) = (std::ptr::null(), None);
        }
        tile
    }
}

/// One task: multiplies rows of A by panels of the packed B.
///
/// # Safety
/// The given rows and depths are within A; nothing else writes this part of C.
pub(super) unsafe fn multiply_part(
    kernel: Kernel,
    a: &Operand,
    part: Part,
    partial: &Partial,
    packed_b: &[f32],
    buffer: &mut [f32],
    c: &Target,
) {
    let Kernel { mr, nr, .. } = kernel;
    let block = partial.block;
    let (lanes, layout) = (kernel.lanes(block.depths), layout(kernel, a));
    for i in (0..part.rows).step_by(mr) {
        let piece = Piece { line: part.row + i, lines: mr.min(part.rows - i), step: block.depth, steps: block.depths };
        let panel = &mut buffer[i * ROW..][..mr * ROW];
        // SAFETY: the rows and depths exist in A; the panel is a slice of the right length.
        unsafe { pack_a(kernel, a, piece, panel.as_mut_ptr()) };
    }
    let mut sums = Sums([0.0; MAX_MR * MAX_NR]);
    let _entered = kernel.enter();
    for j in (0..part.columns).step_by(nr) {
        let b = &packed_b[(part.column + j) * lanes..][..lanes * nr];
        for i in (0..part.rows).step_by(mr) {
            let panel = &buffer[i * ROW..][..mr * ROW];
            let (row, column) = (part.row + i, block.column + part.column + j);
            let tile = partial.tile(c, row, column, mr.min(part.rows - i), nr.min(part.columns - j));
            // SAFETY: panels have the lengths that the kernel reads; the tile is in this task's
            // part of C.
            unsafe { kernel.run(layout, lanes, panel.as_ptr(), b.as_ptr(), &tile, &mut sums) };
        }
    }
}

/// Multiplies on the calling thread, for use inside tasks: C (`m` x `n` f32, row stride `c_stride`)
/// = or += A B.
///
/// # Safety
/// `a` (m x k), `b` (k x n) and `c` are valid for their shapes and strides, and nothing else
/// touches `c` during the call. `scratch` has [`SMALL_SCRATCH`] floats.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn small(
    isa: Isa,
    size: Size,
    a: View,
    b: View,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let Size { m, n, k } = size;
    let kernel = Kernel::of(isa);
    let (a, b) = (a.as_a(), b.as_b());
    let (packed_a, packed_b) = scratch.split_at_mut(MC * ROW);
    let start = Pointer::new(c.cast_const());
    let addend = accumulate.then_some(start);
    let target = Target { c: start, lines: Lines::Even(c_stride), bias: std::ptr::null(), addend };
    let rows = MC / kernel.mr * kernel.mr;
    let depths = even_part(k, LANES, 16);
    for column in (0..n).step_by(NC_SMALL) {
        for depth in (0..k).step_by(depths) {
            let columns = NC_SMALL.min(n - column);
            let block = Block {
                row: 0,
                rows: m,
                column,
                columns,
                depth,
                depths: depths.min(k - depth),
                first: depth == 0,
                last: depth + depths >= k,
            };
            for j in (0..columns).step_by(kernel.nr) {
                let piece =
                    Piece { line: column + j, lines: kernel.nr.min(columns - j), step: depth, steps: block.depths };
                let panel = &mut packed_b[j * block.depths..][..kernel.nr * block.depths];
                // SAFETY: the columns and depths exist in B; the panel is a slice of the right
                // length.
                unsafe { pack_b(kernel, &b, piece, panel.as_mut_ptr()) };
            }
            let partial = Partial { staged: Address(std::ptr::null_mut()), block };
            for row in (0..m).step_by(rows) {
                let part = Part { row, rows: rows.min(m - row), column: 0, columns };
                // SAFETY: as promised by the caller.
                unsafe { multiply_part(kernel, &a, part, &partial, packed_b, packed_a, &target) };
            }
        }
    }
}
