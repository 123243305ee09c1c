//! Single-precision matrix products.
//!
//! ```text
//! for each block of N, for each KC of K:  pack B once, shared by all threads
//!     for each block of M (in parallel):  pack A (own buffer), micro-kernel tiles
//! ```
//!
//! The order in which k is summed is fixed (KC blocks ascending, k ascending inside), and only M and N are split between
//! threads: the result has the same bits for any number of threads.
#![allow(unsafe_code)]

mod kernel;
mod pack;

use super::pool::Shared;
use super::{AlignedBuffer, Cpu};
use kernel::{Kernel, MAX_MR, MAX_NR, Tile};
use pack::{Source, pack};

/// Depth of a packed panel: 256 x 32 floats of B fill 32 KiB, about one L1 cache.
const KC: usize = 256;
/// Width of the packed part of B: 256 x 512 floats, 512 KiB, a part of the L2 cache.
const NC: usize = 512;
/// Most rows of A packed at once: 240 x 256 floats, a part of the L2 cache. A multiple of every kernel's height.
const MC: usize = 240;
/// Width of B packed at once by a product that runs on one thread inside a task.
const NC_SMALL: usize = 256;
/// Products with fewer multiplications run on the calling thread.
const PARALLEL_FROM: usize = 200_000;

/// Floats of scratch memory that [`small`] needs.
pub(crate) const SMALL_SCRATCH: usize = MC * KC + NC_SMALL * KC;

/// A matrix in memory: row-major with a row stride, or the transpose of one.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    stride: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// `rows` x `columns`, row after row.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        Matrix::strided(data, rows, columns, columns)
    }

    /// `rows` x `columns` with `stride` floats from one row to the next.
    ///
    /// # Panics
    /// If the slice is too short or the stride less than the number of columns.
    pub fn strided(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Matrix<'a> {
        assert!(stride >= columns, "row stride {stride} below {columns} columns");
        assert!(data.len() >= extent(rows, columns, stride), "{rows}x{columns} matrix in {} floats", data.len());
        Matrix { data, rows, columns, stride, transposed: false }
    }

    /// The transpose; nothing is copied.
    pub fn t(self) -> Matrix<'a> {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    fn view(&self) -> View {
        let (down, right) = if self.transposed { (1, self.stride) } else { (self.stride, 1) };
        View { start: self.data.as_ptr(), down, right }
    }
}

fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}

/// A matrix by address: element (i, j) at `start + i * down + j * right`; one stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct View {
    pub start: *const f32,
    pub down: usize,
    pub right: usize,
}

impl View {
    /// Columns from (`row`, `column`) on, as panels of B.
    fn columns_from(&self, row: usize, column: usize) -> Source {
        let start = self.start.wrapping_add(row * self.down + column * self.right);
        Source { start, along: self.right, depth: self.down }
    }

    /// Rows from (`row`, `column`) on, as panels of A.
    fn rows_from(&self, row: usize, column: usize) -> Source {
        let start = self.start.wrapping_add(row * self.down + column * self.right);
        Source { start, along: self.down, depth: self.right }
    }
}

// SAFETY: a view is only read through, and lives no longer than the borrow it was made from.
unsafe impl Sync for View {}

/// What is stored: the product alone or a sum with it.
#[derive(Clone, Copy)]
pub enum Epilogue<'a> {
    /// C = AB
    Overwrite,
    /// C += AB
    Accumulate,
    /// C = AB + a row added to each row
    Bias(&'a [f32]),
    /// C = AB + bias row + a matrix of C's shape, row after row without gaps
    BiasAndMatrix(&'a [f32], &'a [f32]),
}

/// The product of matrices, with its packing buffers.
pub struct Gemm {
    cpu: Cpu,
    kernel: Kernel,
    packed_b: AlignedBuffer,
    /// One part per thread.
    packed_a: AlignedBuffer,
}

impl Gemm {
    /// Buffers for products of any shape: 512 KiB, and 240 KiB per thread.
    pub fn new(cpu: Cpu) -> Gemm {
        let packed_a = AlignedBuffer::zeroed(cpu.pool.threads() * MC * KC);
        Gemm { kernel: Kernel::of(cpu.isa), packed_b: AlignedBuffer::zeroed(KC * NC), packed_a, cpu }
    }

    /// Memory of the packing buffers.
    pub fn memory_bytes(&self) -> usize {
        4 * (self.packed_a.len() + self.packed_b.len())
    }

    /// `c` (rows of A x columns of B, row after row) = A B, with the epilogue.
    ///
    /// # Panics
    /// If the shapes do not fit together.
    pub fn multiply(&mut self, a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], epilogue: Epilogue<'_>) {
        let (m, n, k) = (a.rows, b.columns, a.columns);
        assert_eq!(k, b.rows, "columns of A and rows of B");
        assert_eq!(c.len(), m * n, "size of C");
        let null = std::ptr::null();
        let (bias, addend) = match epilogue {
            Epilogue::Overwrite | Epilogue::Accumulate => (null, null),
            Epilogue::Bias(bias) => {
                assert_eq!(bias.len(), n, "length of the bias");
                (bias.as_ptr(), null)
            }
            Epilogue::BiasAndMatrix(bias, matrix) => {
                assert_eq!((bias.len(), matrix.len()), (n, m * n), "length of bias and added matrix");
                (bias.as_ptr(), matrix.as_ptr())
            }
        };
        let accumulate = matches!(epilogue, Epilogue::Accumulate);
        let c = Target { start: c.as_mut_ptr(), stride: n, bias, addend, accumulate };
        if k == 0 {
            // SAFETY: one tile per element inside C; with k = 0 no panel is read.
            (0..m * n).for_each(|i| unsafe { self.kernel.run(0, null, null, &c.tile(i / n, i % n, 1, 1, true)) });
            return;
        }
        for column in (0..n).step_by(NC) {
            for depth in (0..k).step_by(KC) {
                let block = Block { column, columns: NC.min(n - column), depth, depths: KC.min(k - depth) };
                self.pack_b(b.view(), block);
                self.block(a.view(), m, block, &c);
            }
        }
    }

    /// Packs a part of B: panels of `nr` columns, each for the whole depth of the block.
    fn pack_b(&mut self, b: View, block: Block) {
        let Kernel { isa, nr, .. } = self.kernel;
        let panel = nr * block.depths;
        let packed = Shared::new(&mut self.packed_b);
        let each = if block.columns * block.depths * 8 < PARALLEL_FROM { usize::MAX } else { 8 };
        let panels = block.columns.div_ceil(nr);
        self.cpu.pool.run(panels.div_ceil(each), &|task, _| {
            for j in task * each..panels.min((task + 1).saturating_mul(each)) {
                let columns = nr.min(block.columns - j * nr);
                let source = b.columns_from(block.depth, block.column + j * nr);
                // SAFETY: panel `j` belongs to this task; the source lies inside B, whose size was checked.
                unsafe {
                    let to = packed.piece(j * panel..(j + 1) * panel);
                    pack(isa, nr, source, columns, block.depths, to.as_mut_ptr());
                }
            }
        });
    }

    fn block(&mut self, a: View, m: usize, block: Block, c: &Target) {
        let kernel = self.kernel;
        let threads = if m * block.columns * block.depths < PARALLEL_FROM { 1 } else { self.cpu.pool.threads() };
        // About four tasks a thread even out what other work on the machine takes away.
        let (rows, columns) = if threads == 1 {
            (MC, NC)
        } else {
            let wanted = 4 * threads;
            let rows = m.div_ceil(wanted).next_multiple_of(kernel.mr).clamp(48usize.next_multiple_of(kernel.mr), MC);
            let columns = block.columns.div_ceil(wanted.div_ceil(m.div_ceil(rows)));
            (rows, columns.next_multiple_of(kernel.nr).clamp(MAX_NR.next_multiple_of(kernel.nr), NC))
        };
        let rows = rows / kernel.mr * kernel.mr;
        let (down, right) = (m.div_ceil(rows), block.columns.div_ceil(columns));
        let (packed_a, packed_b) = (Shared::new(&mut self.packed_a), &self.packed_b[..]);
        let body = |task: usize, thread: usize| {
            let (row, column) = (task / right * rows, task % right * columns);
            let part = Part { row, rows: rows.min(m - row), column, columns: columns.min(block.columns - column) };
            // SAFETY: no two tasks run on the same thread at a time.
            let buffer = unsafe { packed_a.piece(thread * MC * KC..(thread + 1) * MC * KC) };
            // SAFETY: A's size was checked; every task writes its own rows and columns of C.
            unsafe { multiply_part(kernel, a, part, block, packed_b, buffer, c) };
        };
        if threads == 1 {
            (0..down * right).for_each(|task| body(task, 0));
        } else {
            self.cpu.pool.run(down * right, &body);
        }
    }
}

/// The part of B that is packed.
#[derive(Clone, Copy)]
struct Block {
    column: usize,
    columns: usize,
    depth: usize,
    depths: usize,
}

/// Rows of C, and columns of it relative to the block.
#[derive(Clone, Copy)]
struct Part {
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
}

/// C and what is added to the product. The matrix at `addend` has C's stride.
struct Target {
    start: *mut f32,
    stride: usize,
    bias: *const f32,
    addend: *const f32,
    accumulate: bool,
}

// SAFETY: bias and addend are only read; of C each task touches its own tiles.
unsafe impl Sync for Target {}

impl Target {
    /// The tile at (`row`, `column`); bias and addend belong to the `first` depth, later ones add to C.
    fn tile(&self, row: usize, column: usize, rows: usize, columns: usize, first: bool) -> Tile {
        let stride = self.stride;
        let c = self.start.wrapping_add(row * stride + column);
        let at = |p: *const f32, offset| if p.is_null() { p } else { p.wrapping_add(offset) };
        let (bias, addend) = if first && !self.accumulate {
            (at(self.bias, column), at(self.addend, row * stride + column))
        } else {
            (std::ptr::null(), c.cast_const())
        };
        Tile { c, stride, rows, columns, bias, addend }
    }
}

/// One task: some rows of A times some panels of the packed B.
///
/// # Safety
/// `a` is valid for the rows and depths named; nobody else writes this part of C.
unsafe fn multiply_part(
    kernel: Kernel,
    a: View,
    part: Part,
    block: Block,
    packed_b: &[f32],
    buffer: &mut [f32],
    c: &Target,
) {
    let Kernel { isa, mr, nr } = kernel;
    let depths = block.depths;
    for i in (0..part.rows).step_by(mr) {
        let source = a.rows_from(part.row + i, block.depth);
        let panel = &mut buffer[i * depths..][..mr * depths];
        // SAFETY: the rows and depths exist in A; the panel is a slice of the right length.
        unsafe { pack(isa, mr, source, mr.min(part.rows - i), depths, panel.as_mut_ptr()) };
    }
    for j in (0..part.columns).step_by(nr) {
        let b = &packed_b[(part.column + j) * depths..][..depths * nr];
        for i in (0..part.rows).step_by(mr) {
            let panel = &buffer[i * depths..][..mr * depths];
            let (row, column) = (part.row + i, block.column + part.column + j);
            let tile = c.tile(row, column, mr.min(part.rows - i), nr.min(part.columns - j), block.depth == 0);
            // SAFETY: panels have the lengths the kernel reads; the tile lies in this task's part of C.
            unsafe { kernel.run(depths, panel.as_ptr(), b.as_ptr(), &tile) };
        }
    }
}

/// A product on the calling thread, for use inside tasks: C (`m` x `n`, row stride `c_stride`) = or += A B.
///
/// # Safety
/// `a` (m x k), `b` (k x n) and `c` are valid for their shapes and strides, and nobody else touches `c` meanwhile.
/// `scratch` has [`SMALL_SCRATCH`] floats.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn small(
    isa: super::Isa,
    (m, n, k): (usize, usize, usize),
    a: View,
    b: View,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let kernel = Kernel::of(isa);
    let (packed_a, packed_b) = scratch.split_at_mut(MC * KC);
    let null = std::ptr::null();
    let c = Target { start: c, stride: c_stride, bias: null, addend: null, accumulate };
    let rows = MC / kernel.mr * kernel.mr;
    for column in (0..n).step_by(NC_SMALL) {
        for depth in (0..k).step_by(KC) {
            let block = Block { column, columns: NC_SMALL.min(n - column), depth, depths: KC.min(k - depth) };
            for j in (0..block.columns).step_by(kernel.nr) {
                let source = b.columns_from(depth, column + j);
                let panel = &mut packed_b[j * block.depths..][..kernel.nr * block.depths];
                let columns = kernel.nr.min(block.columns - j);
                // SAFETY: the columns and depths exist in B; the panel is a slice of the right length.
                unsafe { pack(kernel.isa, kernel.nr, source, columns, block.depths, panel.as_mut_ptr()) };
            }
            for row in (0..m).step_by(rows) {
                let part = Part { row, rows: rows.min(m - row), column: 0, columns: block.columns };
                // SAFETY: the caller's promise.
                unsafe { multiply_part(kernel, a, part, block, packed_b, packed_a, &c) };
            }
        }
    }
}

const _: () = assert!(MC.is_multiple_of(MAX_MR) && NC.is_multiple_of(MAX_NR) && NC_SMALL.is_multiple_of(MAX_NR));
