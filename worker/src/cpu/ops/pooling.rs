//! Pooling over images `[batch, height, width, channels]`.

use super::pieces::{in_pieces, rows};
use super::sums::LANES;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};
use std::ops::Range;

/// Image shape, and the square window that slides over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub batch: usize,
    /// Image height.
    pub height: usize,
    /// Image width.
    pub width: usize,
    /// Channels.
    pub channels: usize,
    /// Window size in pixels, at most 16.
    pub kernel: usize,
    /// Pixels between neighbouring windows.
    pub stride: usize,
    /// Pixels by which windows can extend beyond each edge of the image, at most half of `kernel`.
    pub padding: usize,
}

impl Window {
    /// Output height and width; 0 if the window does not fit.
    pub fn output(&self) -> (usize, usize) {
        let windows =
            |size: usize| (size + 2 * self.padding).checked_sub(self.kernel).map_or(0, |room| room / self.stride + 1);
        (windows(self.height), windows(self.width))
    }

    /// Pixels of window `i` inside the image, along an axis of `size` pixels.
    fn pixels(&self, i: usize, size: usize) -> Range<usize> {
        let start = i * self.stride;
        start.saturating_sub(self.padding)..(start + self.kernel - self.padding).min(size)
    }

    /// Windows that contain pixel `i`, along an axis with `count` windows.
    fn windows(&self, i: usize, count: usize) -> Range<usize> {
        let last = i + self.padding;
        (last + 1).saturating_sub(self.kernel).div_ceil(self.stride)..(last / self.stride + 1).min(count)
    }

    /// Index of a pixel within a window.
    fn index(&self, pixel: (usize, usize), window: (usize, usize)) -> usize {
        let offset = |pixel: usize, window: usize| pixel + self.padding - window * self.stride;
        offset(pixel.0, window.0) * self.kernel + offset(pixel.1, window.1)
    }

    /// Lengths of input and output.
    fn lens(&self) -> (usize, usize) {
        assert!((1..=16).contains(&self.kernel) && 2 * self.padding <= self.kernel, "kernel and padding: {self:?}");
        let (height, width) = self.output();
        let images = self.batch * self.channels;
        (images * self.height * self.width, images * height * width)
    }
}

/// Window maximum for `y.len()` channels from `channel` on; at most [`LANES`].
#[inline(always)]
fn max_block<E: Element>(
    shape: &Window,
    image: &[E],
    window: (usize, usize),
    channel: usize,
    (y, indices): (&mut [E], &mut [u8]),
    n: usize,
) {
    let (lines, columns) = (shape.pixels(window.0, shape.height), shape.pixels(window.1, shape.width));
    let first = shape.index((lines.start, columns.start), window);
    let (mut best, mut best_index) = ([f32::NEG_INFINITY; LANES], [first as u32; LANES]);
    for line in lines {
        for column in columns.clone() {
            let index = shape.index((line, column), window) as u32;
            let x = &image[(line * shape.width + column) * shape.channels + channel..][..n];
            for i in 0..n {
                let x = x[i].get();
                let take = (x > best[i]) | x.is_nan();
                best[i] = if take { x } else { best[i] };
                best_index[i] = if take { index } else { best_index[i] };
            }
        }
    }
    for i in 0..n {
        y[i] = E::of(best[i]);
        indices[i] = best_index[i] as u8;
    }
}

#[inline(always)]
fn max_body<E: Element>(shape: Window, image: &[E], line: usize, y: &mut [E], indices: &mut [u8]) {
    let pixels = y.chunks_exact_mut(shape.channels).zip(indices.chunks_exact_mut(shape.channels));
    for (column, (y, indices)) in pixels.enumerate() {
        let window = (line, column);
        let whole = shape.channels / LANES * LANES;
        for c in (0..whole).step_by(LANES) {
            max_block(&shape, image, window, c, (&mut y[c..c + LANES], &mut indices[c..c + LANES]), LANES);
        }
        let rest = shape.channels - whole;
        max_block(&shape, image, window, whole, (&mut y[whole..], &mut indices[whole..]), rest);
    }
}

per_isa! {
    /// One line of an image.
    fn max_line<E: Element> = max_body(shape: Window, image: &[E], line: usize, y: &mut [E], indices: &mut [u8])
}

/// `y` = maximum of each window and channel, and `indices` its index in the window
/// (`line * kernel + column`): the first one in a tie; NaN counts as largest. Pixels outside the
/// image are ignored.
pub fn max_pool<E: Element>(cpu: &Cpu, shape: &Window, x: &[E], y: &mut [E], indices: &mut [u8]) {
    let (inputs, outputs) = shape.lens();
    assert_eq!((x.len(), y.len(), indices.len()), (inputs, outputs, outputs), "length of x, y and indices");
    let (height, width) = shape.output();
    let results = (rows(y, width * shape.channels), rows(indices, width * shape.channels));
    in_pieces(cpu, shape.batch * height, 1, results, |range, (y, indices)| {
        let (image, line) = (range.start / height, range.start % height);
        let image = &x[image * (inputs / shape.batch)..][..inputs / shape.batch];
        max_line(cpu.isa, *shape, image, line, y, indices);
    });
}

/// The windows that a pixel belongs to.
#[derive(Clone)]
struct PixelWindows {
    lines: Range<usize>,
    columns: Range<usize>,
    /// Windows per output line.
    width: usize,
}

/// Gradient of a pixel for `dx.len()` channels from `channel` on; at most [`LANES`].
#[inline(always)]
fn max_backward_block<E: Element>(
    shape: &Window,
    (dy, indices): (&[E], &[u8]),
    pixel: (usize, usize),
    windows: PixelWindows,
    channel: usize,
    dx: &mut [E],
    n: usize,
) {
    let mut sums = [0.0f32; LANES];
    for line in windows.lines {
        for column in windows.columns.clone() {
            let index = shape.index(pixel, (line, column)) as u8;
            let start = (line * windows.width + column) * shape.channels + channel;
            let (dy, indices) = (&dy[start..][..n], &indices[start..][..n]);
            for i in 0..n {
                // Mask the bits: a select between floats would stay scalar code here.
                let mask = u32::from(indices[i] == index).wrapping_neg();
                sums[i] += f32::from_bits(dy[i].get().to_bits() & mask);
            }
        }
    }
    for i in 0..n {
        dx[i] = E::of(sums[i]);
    }
}

#[inline(always)]
fn max_backward_body<E: Element>(shape: Window, dy: &[E], indices: &[u8], line: usize, dx: &mut [E]) {
    let (height, width) = shape.output();
    let lines = shape.windows(line, height);
    let whole = shape.channels / LANES * LANES;
    for (column, dx) in dx.chunks_exact_mut(shape.channels).enumerate() {
        // Divisions cost more than the sums, so divide once per pixel, not per block.
        let windows = PixelWindows { lines: lines.clone(), columns: shape.windows(column, width), width };
        for c in (0..whole).step_by(LANES) {
            let to = &mut dx[c..c + LANES];
            max_backward_block(&shape, (dy, indices), (line, column), windows.clone(), c, to, LANES);
        }
        let to = &mut dx[whole..];
        max_backward_block(&shape, (dy, indices), (line, column), windows, whole, to, shape.channels - whole);
    }
}

per_isa! {
    /// One line of an image.
    fn max_backward_line<E: Element> = max_backward_body(
        shape: Window, dy: &[E], indices: &[u8], line: usize, dx: &mut [E],
    )
}

/// `dx` = gradient of [`max_pool`]'s input, from the gradient of its output and `indices`.
pub fn max_pool_backward<E: Element>(cpu: &Cpu, shape: &Window, dy: &[E], indices: &[u8], dx: &mut [E]) {
    let (inputs, outputs) = shape.lens();
    assert_eq!((dx.len(), dy.len(), indices.len()), (inputs, outputs, outputs), "length of dx, dy and indices");
    let each = outputs / shape.batch;
    in_pieces(cpu, shape.batch * shape.height, 1, rows(dx, shape.width * shape.channels), |range, dx| {
        let (image, line) = (range.start / shape.height, range.start % shape.height);
        let (dy, indices) = (&dy[image * each..][..each], &indices[image * each..][..each]);
        max_backward_line(cpu.isa, *shape, dy, indices, line, dx);
    });
}

/// Mean over the pixels of `y.len()` channels from `channel` on; at most [`LANES`].
#[inline(always)]
fn average_block<E: Element>(image: &[E], channels: usize, channel: usize, y: &mut [E], n: usize) {
    let mut sums = [0.0f32; LANES];
    for pixel in image.chunks_exact(channels) {
        let pixel = &pixel[channel..][..n];
        for i in 0..n {
            sums[i] += pixel[i].get();
        }
    }
    let count = (image.len() / channels) as f32;
    for i in 0..n {
        y[i] = E::of(sums[i] / count);
    }
}

#[inline(always)]
fn average_body<E: Element>(image: &[E], y: &mut [E]) {
    let channels = y.len();
    let whole = channels / LANES * LANES;
    for c in (0..whole).step_by(LANES) {
        average_block(image, channels, c, &mut y[c..c + LANES], LANES);
    }
    average_block(image, channels, whole, &mut y[whole..], channels - whole);
}

per_isa! { fn average_image<E: Element> = average_body(image: &[E], y: &mut [E]) }

/// `y` (`[batch, channels]`) = mean over the pixels of each image of `x`.
pub fn average_pool<E: Element>(cpu: &Cpu, x: &[E], channels: usize, y: &mut [E]) {
    let batch = y.len() / channels;
    let each = x.len() / batch.max(1);
    assert_eq!((y.len(), x.len(), each % channels), (batch * channels, batch * each, 0), "length of y and x");
    in_pieces(cpu, batch, 1, rows(y, channels), |range, y| {
        average_image(cpu.isa, &x[range.start * each..range.end * each], y);
    });
}

#[inline(always)]
fn average_backward_body<E: Element>(dy: &[E], dx: &mut [E]) {
    let count = (dx.len() / dy.len()) as f32;
    for pixel in dx.chunks_exact_mut(dy.len()) {
        for (dx, dy) in pixel.iter_mut().zip(dy) {
            *dx = E::of(dy.get() / count);
        }
    }
}

per_isa! { fn average_backward_image<E: Element> = average_backward_body(dy: &[E], dx: &mut [E]) }

/// `dx` = gradient of [`average_pool`]'s input, from the gradient of its output.
pub fn average_pool_backward<E: Element>(cpu: &Cpu, dy: &[E], channels: usize, dx: &mut [E]) {
    let batch = dy.len() / channels;
    let each = dx.len() / batch.max(1);
    assert_eq!((dy.len(), dx.len(), each % channels), (batch * channels, batch * each, 0), "length of dy and dx");
    in_pieces(cpu, batch, 1, rows(dx, each), |range, dx| {
        average_backward_image(cpu.isa, &dy[range.start * channels..range.end * channels], dx);
    });
}
