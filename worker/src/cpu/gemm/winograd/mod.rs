//! Winograd convolution (minimal filtering) for 3 x 3 kernels with stride 1, F(2 x 2, 3 x 3) (Lavin
//! and Gray 2016, arXiv:1509.09308): 16 multiplications per 2 x 2 output pixels instead of 36.
//!
//! ```text
//! y  = A^T [ (G w G^T) (B^T x B) ] A      16 GEMMs [tiles] x [channels] x [outputs]
//! dx = the same for dy, with the taps reversed
//! dw = G^T [ (A dy A^T)^T (B^T x B) ] G   16 GEMMs [outputs] x [tiles] x [channels]
//! ```
//!
//! The transforms read and write the micro-kernel's layout, so a block of tiles never leaves the L2
//! cache. All sums are in f32, in an order that does not depend on threads or blocks.
#![allow(unsafe_code)]

mod gradient;
mod lanes;
mod transform;

use super::Gemm;
use super::kernel::Kernel;
use super::panel::transpose;
use super::tile::{LANES, Layout, Lines, MAX_MR, MAX_NR, ROW, Sums, Tile};
use crate::cpu::pool::Shared;
use crate::cpu::values::{Pointer, with_format};
use crate::cpu::{Cpu, Element, Format, HalfKernel};
use transform::{Kind, POSITIONS, WIDE, pixels, transform};

/// Maximum channels and outputs: each position's product has one block of depth. With more
/// channels, images are small, and transforming the weights costs as much as filtering saves.
const MAX_CHANNELS: usize = LANES;
/// A panels per block of tiles.
const PANELS: usize = 4;
/// Minimum number of tiles for which transforming the weights is_faster off.
const MIN_TILES: usize = 64;

/// Stands in for pixels outside an image.
static ZEROS: [f32; MAX_CHANNELS] = [0.0; MAX_CHANNELS];

/// A 3 x 3 convolution of stride 1.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Filter {
    pub batch: usize,
    /// Input image size.
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub outputs: usize,
    /// Zeros around the images, at most 2.
    pub padding: usize,
}

/// Images `[batch][height][width][channels]` that tiles are cut from.
#[derive(Clone, Copy)]
struct Images {
    start: Pointer,
    height: usize,
    width: usize,
    channels: usize,
}

/// First pixel of a tile.
#[derive(Clone, Copy)]
struct Corner {
    image: usize,
    y: isize,
    x: isize,
}

impl Filter {
    /// Whether Winograd filtering is faster than the plain GEMM.
    pub fn is_faster(&self) -> bool {
        let fits = |channels: usize| channels.is_multiple_of(WIDE) && (1..=MAX_CHANNELS).contains(&channels);
        self.padding <= 2
            && self.height + 2 * self.padding > 2
            && self.width + 2 * self.padding > 2
            && fits(self.channels)
            && fits(self.outputs)
            && self.tiles() >= MIN_TILES
    }

    /// Output height and width.
    fn output(&self) -> (usize, usize) {
        (self.height + 2 * self.padding - 2, self.width + 2 * self.padding - 2)
    }

    fn tiles(&self) -> usize {
        let (height, width) = self.output();
        self.batch * height.div_ceil(2) * width.div_ceil(2)
    }

    /// First output pixel of a tile.
    fn corner(&self, tile: usize) -> Corner {
        let (height, width) = self.output();
        let (down, across) = (height.div_ceil(2), width.div_ceil(2));
        let (line, x) = (tile / across, tile % across);
        Corner { image: line / down, y: 2 * (line % down) as isize, x: 2 * x as isize }
    }

    /// First input pixel that an output tile reads.
    fn window(&self, tile: usize) -> Corner {
        let Corner { image, y, x } = self.corner(tile);
        Corner { image, y: y - self.padding as isize, x: x - self.padding as isize }
    }

    fn images(&self, x: Pointer) -> Images {
        Images { start: x, height: self.height, width: self.width, channels: self.channels }
    }

    fn outputs(&self, y: Pointer) -> Images {
        let (height, width) = self.output();
        Images { start: y, height, width, channels: self.outputs }
    }

    /// Scratch floats for [`Gemm::filter`].
    pub fn scratch_len(&self, cpu: &Cpu) -> usize {
        let kernel = Kernel::of(cpu.isa);
        packed_len(kernel, self.channels, self.outputs) + cpu.pool.threads() * buffer_len(kernel)
    }
}

impl Images {
    /// Addresses of the pixels of a square, row after row; null outside the image.
    fn square<E: Element, const N: usize>(&self, corner: Corner, side: usize) -> [*mut E; N] {
        std::array::from_fn(|i| {
            let (y, x) = (corner.y + (i / side) as isize, corner.x + (i % side) as isize);
            let is_inside = (0..self.height as isize).contains(&y) && (0..self.width as isize).contains(&x);
            if !is_inside {
                return std::ptr::null_mut();
            }
            let pixel = (corner.image * self.height + y as usize) * self.width + x as usize;
            self.start.at(pixel * self.channels).cast()
        })
    }

    /// Read-only addresses; pixels outside the image point to zeros.
    fn read<E: Element, const N: usize>(&self, corner: Corner, side: usize) -> [*const E; N] {
        let square = self.square::<E, N>(corner, side);
        square.map(|pixel| if pixel.is_null() { ZEROS.as_ptr().cast::<E>() } else { pixel.cast_const() })
    }
}

/// Length of the transformed weights: for each panel of outputs and each position, `channels` rows
/// of `nr`.
fn packed_len(kernel: Kernel, channels: usize, outputs: usize) -> usize {
    outputs.div_ceil(kernel.nr) * POSITIONS * panel_len(kernel, channels)
}

/// Floats between the panels of neighbouring positions.
fn panel_len(kernel: Kernel, channels: usize) -> usize {
    channels * kernel.nr + GAP
}

/// Tiles per block.
fn block(kernel: Kernel) -> usize {
    PANELS * kernel.mr
}

/// A cache line between positions, so that the positions of a tile do not share cache sets.
const GAP: usize = 16;

/// Floats between neighbouring positions of a block of transformed tiles.
fn position_len(kernel: Kernel) -> usize {
    block(kernel) * ROW + GAP
}

/// Floats between neighbouring positions of the products with a panel.
fn product_len(kernel: Kernel) -> usize {
    block(kernel) * kernel.nr + GAP
}

/// Floats per thread: a block of tiles and of products.
fn buffer_len(kernel: Kernel) -> usize {
    POSITIONS * (position_len(kernel) + product_len(kernel))
}

impl Gemm {
    /// `y` = (or +=) the convolution of `x` with `w`, `[outputs][3][3][channels]`. If `reversed`,
    /// `w` is `[channels][3][3][outputs]` and its taps run from last to first.
    ///
    /// # Safety
    /// Images and weights are valid for the filter, and [`Filter::is_faster`]; nothing else uses
    /// `y`.
    ///
    /// # Panics
    /// If the scratch memory is too short.
    pub(in crate::cpu) unsafe fn filter(
        &self,
        filter: &Filter,
        x: Pointer,
        (w, reversed): (Pointer, bool),
        (y, accumulate): (Pointer, bool),
        scratch: &mut [f32],
    ) {
        let (kernel, pool) = (self.kernel, &self.cpu.pool);
        let (packed, rest) = scratch.split_at_mut(packed_len(kernel, filter.channels, filter.outputs));
        let buffers = Shared::new(&mut rest[..pool.threads() * buffer_len(kernel)]);
        // SAFETY: a task has its thread's buffer.
        let buffer =
            |thread: usize| unsafe { buffers.piece(thread * buffer_len(kernel)..(thread + 1) * buffer_len(kernel)) };
        let weights = Shared::new(packed);
        if reversed {
            let each = filter.channels.div_ceil(4 * pool.threads());
            pool.run(filter.channels.div_ceil(each), &|task, thread| {
                let rows = task * each..filter.channels.min((task + 1) * each);
                // SAFETY: as promised by the caller; each task writes its own rows.
                with_format!(w.format, T => unsafe {
                    pack_reversed::<T>(kernel, filter, w.cast(), rows, buffer(thread), weights.pointer());
                });
            });
        } else {
            pool.run(filter.outputs.div_ceil(kernel.nr), &|panel, thread| {
                // SAFETY: as promised by the caller; each task writes its own panel.
                with_format!(w.format, T => unsafe {
                    pack_panel::<T>(kernel, filter, w.cast(), panel, buffer(thread), weights.pointer());
                });
            });
        }
        let packed: &[f32] = packed;
        let each = block(kernel);
        pool.run(filter.tiles().div_ceil(each), &|task, thread| {
            let tiles = task * each..filter.tiles().min((task + 1) * each);
            let (rows, products) = buffer(thread).split_at_mut(POSITIONS * position_len(kernel));
            with_format!(x.format, T => {
                for (row, tile) in tiles.clone().enumerate() {
                    let from: [*const T; POSITIONS] = filter.images(x).read(filter.window(tile), 4);
                    let to = rows[row * ROW..].as_mut_ptr();
                    // SAFETY: the images are promised by the caller; the buffer has the rows.
                    unsafe { transform(kernel.isa, Kind::Input, &from, filter.channels, to, position_len(kernel)) };
                }
            });
            zero_unused(kernel, tiles.len(), rows);
            for panel in 0..filter.outputs.div_ceil(kernel.nr) {
                // SAFETY: all slices have the lengths that the kernel reads; `y` is promised by the
                // caller, and each task has its own tiles.
                unsafe {
                    multiply(kernel, filter, panel, tiles.len(), rows, packed, products);
                    with_format!(y.format, T => finish::<T>(kernel, filter, panel, tiles.clone(), products, y, accumulate));
                }
            }
        });
    }
}

/// Zeroes unused rows: stale values could be denormals, which some CPUs multiply slowly.
fn zero_unused(kernel: Kernel, tiles: usize, rows: &mut [f32]) {
    for position in 0..POSITIONS {
        let position = &mut rows[position * position_len(kernel)..];
        position[tiles * ROW..tiles.next_multiple_of(kernel.mr) * ROW].fill(0.0);
    }
}

/// Multiplies a block of tiles by a panel of outputs, for all positions.
///
/// # Safety
/// The kernel is an f32 kernel; `rows` and `packed` have the panels.
unsafe fn multiply(
    kernel: Kernel,
    filter: &Filter,
    panel: usize,
    tiles: usize,
    rows: &[f32],
    packed: &[f32],
    products: &mut [f32],
) {
    let (Kernel { mr, nr, .. }, depth) = (kernel, filter.channels);
    let mut sums = Sums([0.0; MAX_MR * MAX_NR]);
    for position in 0..POSITIONS {
        let b = &packed[(panel * POSITIONS + position) * panel_len(kernel, depth)..][..depth * nr];
        let c =
            Pointer::new(products[position * product_len(kernel)..][..product_len(kernel)].as_mut_ptr().cast_const());
        for row in (0..tiles).step_by(mr) {
            let a = &rows[position * position_len(kernel) + row * ROW..][..mr * ROW];
            let tile = Tile {
                c,
                lines: Lines::Even(nr),
                row,
                rows: mr.min(tiles - row),
                columns: nr,
                bias: std::ptr::null(),
                partial: std::ptr::null(),
                partial_stride: 0,
                addend: None,
            };
            // SAFETY: the panels have the lengths that the kernel reads; the tile is in `products`.
            unsafe { kernel.run(Layout::Rows, depth, a.as_ptr(), b.as_ptr(), &tile, &mut sums) };
        }
    }
}

/// Computes the output pixels of a block of tiles for a panel of outputs.
///
/// # Safety
/// `y` is valid for the filter's output, and nothing else writes these tiles.
unsafe fn finish<E: Element>(
    kernel: Kernel,
    filter: &Filter,
    panel: usize,
    tiles: std::ops::Range<usize>,
    products: &[f32],
    y: Pointer,
    accumulate: bool,
) {
    let nr = kernel.nr;
    let columns = nr.min(filter.outputs - panel * nr);
    for (row, tile) in tiles.enumerate() {
        let to = filter.outputs(y).square::<E, 4>(filter.corner(tile), 2);
        let to = to.map(|to| if to.is_null() { to } else { to.wrapping_add(panel * nr) });
        // SAFETY: as promised by the caller; the products have the rows.
        unsafe { pixels(kernel.isa, products[row * nr..].as_ptr(), product_len(kernel), columns, &to, accumulate) };
    }
}

/// Transforms the weights of a panel of outputs.
///
/// # Safety
/// `w` is valid for the filter, `packed` for its packed weights; nothing else writes this panel.
unsafe fn pack_panel<E: Element>(
    kernel: Kernel,
    filter: &Filter,
    w: *mut E,
    panel: usize,
    buffer: &mut [f32],
    packed: *mut f32,
) {
    let (nr, depth) = (kernel.nr, filter.channels);
    let outputs = panel * nr..filter.outputs.min((panel + 1) * nr);
    let rows = &mut buffer[..POSITIONS * nr * depth];
    for (row, output) in outputs.clone().enumerate() {
        let taps: [*const E; 9] = std::array::from_fn(|tap| w.wrapping_add((output * 9 + tap) * depth).cast_const());
        // SAFETY: as promised by the caller; `rows` has the lines.
        unsafe { transform(kernel.isa, Kind::Weights, &taps, depth, rows[row * depth..].as_mut_ptr(), nr * depth) };
    }
    for position in 0..POSITIONS {
        let from = rows[position * nr * depth..].as_ptr();
        // SAFETY: as promised by the caller; `rows` has the lines.
        unsafe {
            let to = packed.add((panel * POSITIONS + position) * panel_len(kernel, depth));
            transpose::<f32, false>(kernel.isa, nr, outputs.len(), depth, from, depth, to);
        }
    }
}

/// Transforms rows of the weights with reversed taps.
///
/// # Safety
/// `w` is valid for the filter, `packed` for its packed weights; nothing else writes these rows.
unsafe fn pack_reversed<E: Element>(
    kernel: Kernel,
    filter: &Filter,
    w: *mut E,
    rows: std::ops::Range<usize>,
    buffer: &mut [f32],
    packed: *mut f32,
) {
    let (depth, outputs) = (filter.channels, filter.outputs);
    for row in rows {
        let taps: [*const E; 9] = std::array::from_fn(|tap| w.wrapping_add((row * 9 + 8 - tap) * outputs).cast_const());
        // SAFETY: as promised by the caller; the buffer has all positions of a row.
        unsafe {
            transform(kernel.isa, Kind::Weights, &taps, outputs, buffer.as_mut_ptr(), outputs);
            let position = panel_len(kernel, depth);
            scatter(kernel.nr, buffer, outputs, packed, POSITIONS * position, position, row);
        }
    }
}

/// Writes step `step` of `len` values per position into panels of `width`; the last panel is
/// zero-padded.
///
/// # Safety
/// `to` is valid for the panels, which are `panel` floats apart, and the positions of one, which
/// are `position` apart.
unsafe fn scatter(width: usize, from: &[f32], len: usize, to: *mut f32, panel: usize, position: usize, step: usize) {
    // SAFETY: as promised by the caller. Copies of constant length compile to a few instructions.
    unsafe {
        match width {
            32 => scatter_by::<32>(from, len, to, panel, position, step),
            16 => scatter_by::<16>(from, len, to, panel, position, step),
            12 => scatter_by::<12>(from, len, to, panel, position, step),
            8 => scatter_by::<8>(from, len, to, panel, position, step),
            6 => scatter_by::<6>(from, len, to, panel, position, step),
            _ => unreachable!("invariant: the tiles of the kernels of f32"),
        }
    }
}

/// # Safety
/// See [`scatter`].
unsafe fn scatter_by<const WIDTH: usize>(
    from: &[f32],
    len: usize,
    to: *mut f32,
    panel: usize,
    position: usize,
    step: usize,
) {
    for (number, from) in from[..POSITIONS * len].chunks_exact(len).enumerate() {
        let (whole, rest) = from.as_chunks::<WIDTH>();
        // SAFETY: as promised by the caller.
        unsafe {
            let to = to.add(number * position + step * WIDTH);
            for (index, part) in whole.iter().enumerate() {
                *to.add(index * panel).cast::<[f32; WIDTH]>() = *part;
            }
            if !rest.is_empty() {
                let mut part = [0.0; WIDTH];
                part[..rest.len()].copy_from_slice(rest);
                *to.add(whole.len() * panel).cast::<[f32; WIDTH]>() = part;
            }
        }
    }
}

impl Gemm {
    /// Whether Winograd filtering, which multiplies in f32, is at least as fast as GEMM in this
    /// format. `vdpbf16ps` has twice the f32 throughput, and filtering needs 2.25 times fewer
    /// multiplications: on Zen 5 filtering is equally fast forward and up to 1.45 times faster
    /// backward (`cargo xtask bench kernels`). AMX has 16 times the throughput.
    pub(in crate::cpu) fn filters(&self, format: Format) -> bool {
        format != Format::Bf16 || self.cpu.half != HalfKernel::Amx
    }
}
