//! GEMM for any element format, accumulating in f32.
//!
//! ```text
//! for each block of N, for each block of K:  pack B once, shared by all threads
//!     for each block of M (in parallel):     pack A (per-thread buffer), micro-kernel tiles
//! ```
//!
//! Packing converts to f32. If both operands are bf16 and [`Cpu::half`] has a faster kernel, bf16
//! pairs are multiplied directly. The order of the sums over k is fixed (blocks ascending, k
//! ascending within a block), and only M and N are split between threads, so the result is
//! bit-identical for any number of threads. Sums are rounded once, when stored.
#![allow(unsafe_code)]

pub(super) mod amx;
mod block;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod kernel_x86;
pub(super) mod operand;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pack_avx2;
#[cfg(target_arch = "x86_64")]
mod pack_avx512;
mod panel;
#[cfg(test)]
mod tests;
mod tile;
mod windows;
pub(super) mod winograd;

use super::pool::Shared;
use super::values::{Pointer, Values, ValuesMut};
use super::{AlignedBuffer, Cpu, Format};
pub(super) use block::Target;
pub(crate) use block::small;
use block::{Address, Block, Part, Partial, multiply_part};
use kernel::Kernel;
use operand::Operand;
use pack::{Piece, pack_b};
pub(super) use tile::Lines;
use tile::{LANES, MAX_MR, MAX_NR, ROW};

/// Width of the packed block of B: 256 x 512 lanes, 512 KiB, a part of the L2 cache.
const NC: usize = 512;
/// Maximum rows of A packed at once: 240 x 272 lanes, a part of the L2 cache.
const MC: usize = 240;
/// Rows of C whose f32 sums are staged between blocks of K if C itself cannot hold them: 2 MiB with
/// NC columns.
const STAGED: usize = 1024;
/// Width of B packed at once by a single-thread product inside a task.
const NC_SMALL: usize = 256;
/// Products with fewer multiplications run on the calling thread.
const PARALLEL_FROM: usize = 200_000;

/// Scratch floats for [`small`].
pub(crate) const SMALL_SCRATCH: usize = MC * ROW + NC_SMALL * LANES;

/// A matrix in memory: row-major with a row stride, or the transpose of one.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: Values<'a>,
    rows: usize,
    columns: usize,
    stride: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Row-major `rows` x `columns`, contiguous.
    pub fn new(data: impl Into<Values<'a>>, rows: usize, columns: usize) -> Matrix<'a> {
        Matrix::strided(data, rows, columns, columns)
    }

    /// Row-major `rows` x `columns`, with a row stride of `stride` elements.
    ///
    /// # Panics
    /// If the slice is too short or the stride less than the number of columns.
    pub fn strided(data: impl Into<Values<'a>>, rows: usize, columns: usize, stride: usize) -> Matrix<'a> {
        let data = data.into();
        assert!(stride >= columns, "row stride {stride} below {columns} columns");
        assert!(data.len() >= extent(rows, columns, stride), "{rows}x{columns} matrix in {} numbers", data.len());
        Matrix { data, rows, columns, stride, transposed: false }
    }

    /// The transpose, without a copy.
    pub fn t(self) -> Matrix<'a> {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    fn view(&self) -> View {
        let (down, right) = if self.transposed { (1, self.stride) } else { (self.stride, 1) };
        View { start: self.data.pointer(), down, right }
    }
}

fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}

/// A matrix by address: element (i, j) at `start + i * down + j * right`; one stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct View {
    pub start: Pointer,
    pub down: usize,
    pub right: usize,
}

impl View {
    pub fn as_a(self) -> Operand {
        Operand::Strided { start: self.start, along: self.down, depth: self.right }
    }

    pub fn as_b(self) -> Operand {
        Operand::Strided { start: self.start, along: self.right, depth: self.down }
    }
}

/// What is stored: the product, alone or added to something.
#[derive(Clone, Copy)]
pub enum Epilogue<'a> {
    /// C = AB
    Overwrite,
    /// C += AB
    Accumulate,
    /// C = AB + a row added to each row
    Bias(&'a [f32]),
    /// C = AB + a matrix of C's shape in any format, contiguous
    Matrix(Values<'a>),
    /// C = AB + bias + matrix
    BiasAndMatrix(&'a [f32], Values<'a>),
}

/// GEMM with its packing buffers.
pub struct Gemm {
    pub(super) cpu: Cpu,
    kernel: Kernel,
    /// Kernel for bf16 operands, if other than `kernel`.
    half: Option<Kernel>,
    packed_b: AlignedBuffer,
    /// One part per thread.
    packed_a: AlignedBuffer,
    /// [`STAGED`] rows of [`NC`] sums.
    staged: AlignedBuffer,
}

/// Sizes of an `m` x `k` by `k` x `n` product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// Splits `whole` evenly into parts of at most `most`; a multiple of `step` unless it is all of
/// `whole`.
fn even_part(whole: usize, most: usize, step: usize) -> usize {
    whole.div_ceil(whole.div_ceil(most).max(1)).next_multiple_of(step).clamp(step, most)
}

impl Gemm {
    /// Allocates buffers for products of any shape: 2.5 MiB, plus 255 KiB per thread.
    pub fn new(cpu: Cpu) -> Gemm {
        let packed_a = AlignedBuffer::zeroed(cpu.pool.threads() * MC * ROW);
        Gemm {
            kernel: Kernel::of(cpu.isa),
            half: Kernel::half(cpu.isa, cpu.half),
            packed_b: AlignedBuffer::zeroed(LANES * NC),
            packed_a,
            staged: AlignedBuffer::zeroed(STAGED * NC),
            cpu,
        }
    }

    /// Bytes of the packing buffers.
    pub fn memory_bytes(&self) -> usize {
        4 * (self.packed_a.len() + self.packed_b.len() + self.staged.len())
    }

    /// `c` (rows of A x columns of B, contiguous) = A B, with the epilogue.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn multiply<'c>(&mut self, a: Matrix<'_>, b: Matrix<'_>, c: impl Into<ValuesMut<'c>>, epilogue: Epilogue<'_>) {
        let mut c = c.into();
        let size = Size { m: a.rows, n: b.columns, k: a.columns };
        assert_eq!(size.k, b.rows, "columns of A and rows of B");
        assert_eq!(c.len(), size.m * size.n, "size of C");
        let (bias, addend) = match epilogue {
            Epilogue::Overwrite | Epilogue::Accumulate => (None, None),
            Epilogue::Bias(bias) => (Some(bias), None),
            Epilogue::Matrix(matrix) => (None, Some(matrix)),
            Epilogue::BiasAndMatrix(bias, matrix) => (Some(bias), Some(matrix)),
        };
        assert!(bias.is_none_or(|bias| bias.len() == size.n), "length of the bias");
        assert!(addend.is_none_or(|matrix| matrix.len() == c.len()), "size of the added matrix");
        let addend = if matches!(epilogue, Epilogue::Accumulate) {
            Some(c.pointer())
        } else {
            addend.map(|matrix| matrix.pointer())
        };
        let bias = bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
        let target = Target { c: c.pointer(), lines: Lines::Even(size.n), bias, addend };
        // SAFETY: the sizes were checked.
        unsafe { self.product(&a.view().as_a(), &b.view().as_b(), size, &target) };
    }

    /// Multiplies two operands.
    ///
    /// # Safety
    /// The operands are valid for `size`, and so is the target, which nothing else uses during the
    /// call.
    pub(super) unsafe fn product(&mut self, a: &Operand, b: &Operand, size: Size, c: &Target) {
        let formats = (a.start().format, b.start().format);
        let kernel = match self.half {
            Some(half) if formats == (Format::Bf16, Format::Bf16) => half,
            _ => self.kernel,
        };
        let columns = even_part(size.n, NC, kernel.nr);
        // Whole tiles of the kernels and the packers.
        let depths = even_part(size.k, LANES * kernel.per_lane(), 16 * kernel.per_lane());
        let staged = size.k > depths && !c.holds_sums();
        let rows = if staged { STAGED } else { size.m.max(1) };
        for column in (0..size.n).step_by(columns) {
            for row in (0..size.m).step_by(rows) {
                // With zero depth, a single block stores the epilogue alone.
                for depth in (0..size.k.max(1)).step_by(depths) {
                    let block = Block {
                        row,
                        rows: rows.min(size.m - row),
                        column,
                        columns: columns.min(size.n - column),
                        depth,
                        depths: depths.min(size.k - depth),
                        first: depth == 0,
                        last: depth + depths >= size.k,
                    };
                    // SAFETY: as promised by the caller.
                    unsafe {
                        self.pack_b(kernel, b, block);
                        self.block(kernel, a, block, staged, c);
                    }
                }
            }
        }
    }

    /// Packs a block of B: panels of `nr` columns, each for the whole depth of the block.
    ///
    /// # Safety
    /// The block lies inside B.
    unsafe fn pack_b(&mut self, kernel: Kernel, b: &Operand, block: Block) {
        if block.depths == 0 {
            return;
        }
        let nr = kernel.nr;
        let panel = nr * kernel.lanes(block.depths);
        let packed = Shared::new(&mut self.packed_b);
        let panels = block.columns.div_ceil(nr);
        let parallel = block.columns * block.depths * 8 >= PARALLEL_FROM;
        let each = if parallel { panels.div_ceil(4 * self.cpu.pool.threads()) } else { panels };
        self.cpu.pool.run(panels.div_ceil(each), &|task, _| {
            for j in task * each..panels.min((task + 1) * each) {
                let piece = Piece {
                    line: block.column + j * nr,
                    lines: nr.min(block.columns - j * nr),
                    step: block.depth,
                    steps: block.depths,
                };
                // SAFETY: panel `j` belongs to this task; the block lies inside B.
                unsafe { pack_b(kernel, b, piece, packed.piece(j * panel..(j + 1) * panel).as_mut_ptr()) };
            }
        });
    }

    /// # Safety
    /// The block lies inside A and C.
    unsafe fn block(&mut self, kernel: Kernel, a: &Operand, block: Block, staged: bool, c: &Target) {
        let threads = self.cpu.pool.threads();
        let threads = if block.rows * block.columns * block.depths < PARALLEL_FROM { 1 } else { threads };
        let most = MC / kernel.mr * kernel.mr;
        // About four tasks per thread balance out delays from other work on the machine.
        let (rows, columns) = if threads == 1 {
            (most, NC)
        } else {
            let wanted = 4 * threads;
            let least = 48usize.next_multiple_of(kernel.mr);
            let rows = block.rows.div_ceil(wanted).next_multiple_of(kernel.mr).clamp(least, most);
            let columns = block.columns.div_ceil(wanted.div_ceil(block.rows.div_ceil(rows)));
            (rows, columns.next_multiple_of(kernel.nr).clamp(MAX_NR.next_multiple_of(kernel.nr), NC))
        };
        let (down, right) = (block.rows.div_ceil(rows), block.columns.div_ceil(columns));
        let staged = staged.then(|| Shared::new(&mut self.staged).pointer());
        let sums = Partial { staged: Address(staged.unwrap_or(std::ptr::null_mut())), block };
        let (packed_a, packed_b) = (Shared::new(&mut self.packed_a), &self.packed_b[..]);
        let body = |task: usize, thread: usize| {
            let (row, column) = (task / right * rows, task % right * columns);
            let part = Part {
                row: block.row + row,
                rows: rows.min(block.rows - row),
                column,
                columns: columns.min(block.columns - column),
            };
            // SAFETY: no two tasks run on the same thread at a time.
            let buffer = unsafe { packed_a.piece(thread * MC * ROW..(thread + 1) * MC * ROW) };
            // SAFETY: the block lies inside A and C; every task writes its own rows and columns of
            // C.
            unsafe { multiply_part(kernel, a, part, &sums, packed_b, buffer, c) };
        };
        if threads == 1 {
            (0..down * right).for_each(|task| body(task, 0));
        } else {
            self.cpu.pool.run(down * right, &body);
        }
    }
}

const _: () = assert!(MC >= MAX_MR && NC.is_multiple_of(MAX_NR) && NC_SMALL.is_multiple_of(MAX_NR));
