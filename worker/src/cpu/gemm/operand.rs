//! GEMM operands: matrices in memory, patches of images, taps of a convolution's weights.
//!
//! An operand consists of lines (rows of A or columns of B), each with one value per step (index of
//! k).

use crate::cpu::Element;
use crate::cpu::values::Pointer;

/// One side of a product.
#[derive(Clone, Copy)]
pub(crate) enum Operand {
    /// Element (line, step) at `start + line * along + step * depth`; one of the strides is 1.
    Strided { start: Pointer, along: usize, depth: usize },
    /// For A, lines are pixels and steps are the values of their patches; for B, the reverse.
    Patches(Patches),
    /// For B: lines are channels.
    Taps(Taps),
}

// SAFETY: an operand is only read through, and lives no longer than the borrows it was made from.
#[allow(unsafe_code)]
unsafe impl Sync for Operand {}

impl Operand {
    pub fn start(&self) -> Pointer {
        match self {
            Operand::Strided { start, .. } => *start,
            Operand::Patches(patches) => patches.start,
            Operand::Taps(taps) => taps.start,
        }
    }
}

/// A contiguous run in memory: elements `from..to` exist, the others are zeros.
pub(super) struct Run<T> {
    /// Address of element 0, which need not exist.
    pub start: *const T,
    pub from: usize,
    pub to: usize,
}

impl<T> Run<T> {
    pub const EMPTY: Run<T> = Run { start: std::ptr::null(), from: 0, to: 0 };

    /// Elements `first..end` as a separate run.
    #[inline(always)]
    pub fn part(&self, first: usize, end: usize) -> Run<T> {
        let from = self.from.clamp(first, end) - first;
        Run { start: self.start.wrapping_add(first), from, to: self.to.clamp(first, end) - first }
    }
}

/// Windows of NHWC images, one per pixel of a grid. The values of a window are ordered (tap y, tap
/// x, channel); those outside the image are zeros.
#[derive(Clone, Copy)]
pub(crate) struct Patches {
    pub start: Pointer,
    /// Image size.
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// Grid size per image.
    pub rows: usize,
    pub columns: usize,
    /// Image pixels between neighbouring grid pixels.
    pub stride: usize,
    /// Image position of the first tap of the first grid pixel.
    pub top: isize,
    pub left: isize,
    /// Width of a window.
    pub taps_x: usize,
}

/// A pixel of the grid.
#[derive(Clone, Copy)]
pub(super) struct Pixel {
    image: usize,
    y: usize,
    pub x: usize,
}

impl Patches {
    /// Number of values of a window that are contiguous in memory: one row of taps.
    pub(super) fn run_length(&self) -> usize {
        self.taps_x * self.channels
    }

    pub(super) fn pixel(&self, index: usize) -> Pixel {
        let (line, x) = (index / self.columns, index % self.columns);
        Pixel { image: line / self.rows, y: line % self.rows, x }
    }

    /// The grid columns for which elements `first..first + len` of a window's row are all within
    /// the image's width.
    pub(super) fn inside(&self, first: usize, len: usize) -> std::ops::Range<usize> {
        let at = |element: usize| (element / self.channels) as isize + self.left;
        let before = (-at(first)).max(0) as usize;
        let most = self.width as isize - 1 - at(first + len - 1);
        let end = if most < 0 { 0 } else { most as usize / self.stride + 1 };
        before.div_ceil(self.stride)..end.min(self.columns)
    }

    /// Moves to the next pixel; returns whether it starts a new line of the grid.
    #[inline(always)]
    pub(super) fn advance(&self, pixel: &mut Pixel) -> bool {
        pixel.x += 1;
        if pixel.x < self.columns {
            return false;
        }
        pixel.x = 0;
        pixel.y += 1;
        if pixel.y == self.rows {
            pixel.y = 0;
            pixel.image += 1;
        }
        true
    }

    /// The image row under a row of taps, for all pixels of a grid line; `None` outside the image.
    pub(super) fn row<T: Element>(&self, pixel: Pixel, tap_y: usize) -> Option<*const T> {
        let y = (pixel.y * self.stride + tap_y) as isize + self.top;
        if y < 0 || y >= self.height as isize {
            return None;
        }
        let before = (pixel.image * self.height + y as usize) * self.width * self.channels;
        Some(self.start.cast::<T>().wrapping_add(before).cast_const())
    }

    /// The values of a pixel's window in an image row.
    #[inline(always)]
    pub(super) fn run<T: Element>(&self, row: Option<*const T>, pixel: Pixel) -> Run<T> {
        let Some(row) = row else { return Run::EMPTY };
        let x = (pixel.x * self.stride) as isize + self.left;
        let start = row.wrapping_offset(x * self.channels as isize);
        if x >= 0 && x as usize + self.taps_x <= self.width {
            return Run { start, from: 0, to: self.run_length() };
        }
        let first = (-x).max(0) as usize;
        let end = (self.width as isize - x).clamp(0, self.taps_x as isize) as usize;
        Run { start, from: first.min(end) * self.channels, to: end * self.channels }
    }
}

/// Some taps of a convolution's weights `[outputs][kernel y][kernel x][channels]`, last to first,
/// as the steps (tap y, tap x, output) of the input-gradient product.
#[derive(Clone, Copy)]
pub(crate) struct Taps {
    pub start: Pointer,
    pub outputs: usize,
    pub channels: usize,
    /// Width of the whole kernel.
    pub kernel_x: usize,
    /// Weights per output.
    pub each: usize,
    /// The taps in use: every `stride`-th one from `first` on.
    pub first_y: usize,
    pub first_x: usize,
    pub stride: usize,
    pub taps_y: usize,
    pub taps_x: usize,
}

impl Taps {
    /// Returns the addresses of channel 0 of the steps `step..`, one per call.
    pub(super) fn walk<T: Element>(&self, step: usize) -> impl FnMut() -> *const T {
        let taps = *self;
        let (mut tap, mut output) = (step / taps.outputs, step % taps.outputs);
        let start = taps.start.cast::<T>().cast_const();
        let tap_start = move |tap: usize| {
            // The walk ends one past the last tap; that address is never used.
            let y = taps.first_y + taps.stride * (taps.taps_y - 1).saturating_sub(tap / taps.taps_x);
            let x = taps.first_x + taps.stride * (taps.taps_x - 1 - tap % taps.taps_x);
            start.wrapping_add((y * taps.kernel_x + x) * taps.channels)
        };
        let mut now = tap_start(tap);
        move || {
            let here = now.wrapping_add(output * taps.each);
            output += 1;
            if output == taps.outputs {
                output = 0;
                tap += 1;
                now = tap_start(tap);
            }
            here
        }
    }
}
