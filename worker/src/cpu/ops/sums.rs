//! Sums, softmax and what they are made of.

use super::{ROWS, partials_len};
use crate::cpu::isa::per_isa;
use crate::cpu::math::exp;
use crate::cpu::pool::Shared;
use crate::cpu::{Cpu, Isa};

const LANES: usize = 16;

#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of all elements: 16 lanes, then pairwise.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += chunk[i];
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    fold(lanes, |a, b| a + b)
}

/// Inner product: 16 lanes, then pairwise. The slices have the same length.
#[inline(always)]
pub(crate) fn sum_of_products(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i];
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += x * y;
    }
    fold(lanes, |a, b| a + b)
}

/// Largest element; minus infinity if there is none. (One that is not a number may be passed over.)
#[inline(always)]
pub(crate) fn largest(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, x);
    }
    fold(lanes, larger)
}

/// In place `x = exp(scale (x - max))`; returns (max, 1 / sum). Multiply by the latter for the softmax.
#[inline(always)]
pub(crate) fn softmax_row(x: &mut [f32], scale: f32) -> (f32, f32) {
    let max = largest(x);
    for x in x.iter_mut() {
        *x = exp((*x - max) * scale);
    }
    (max, 1.0 / sum(x))
}

#[inline(always)]
fn softmax_piece_body(x: &mut [f32], width: usize) {
    for row in x.chunks_exact_mut(width) {
        let (_, inverse) = softmax_row(row, 1.0);
        for x in row {
            *x *= inverse;
        }
    }
}

per_isa! { fn softmax_piece = softmax_piece_body(x: &mut [f32], width: usize) }

/// Softmax of each row of `x` (`width` columns), in place.
pub fn softmax_rows(cpu: &Cpu, x: &mut [f32], width: usize) {
    let rows = x.len() / width;
    let shared = Shared::new(x);
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        let range = i * ROWS * width..rows.min((i + 1) * ROWS) * width;
        // SAFETY: each task has its own rows.
        softmax_piece(cpu.isa, unsafe { shared.piece(range) }, width);
    });
}

#[inline(always)]
fn add_rows_body(x: &[f32], to: &mut [f32]) {
    for row in x.chunks_exact(to.len()) {
        for (to, &x) in to.iter_mut().zip(row) {
            *to += x;
        }
    }
}

per_isa! {
    /// Adds each row of `x` to `to`.
    fn add_rows = add_rows_body(x: &[f32], to: &mut [f32])
}

/// `to` = (or +=) sum of the pieces' sums in their order; `to` has the width of a piece, or is shorter and starts at
/// column `skip` of it.
pub(super) fn add_pieces(isa: Isa, partials: &[f32], width: usize, skip: usize, to: &mut [f32], accumulate: bool) {
    if !accumulate {
        to.fill(0.0);
    }
    for piece in partials.chunks_exact(width) {
        add_rows(isa, &piece[skip..skip + to.len()], to);
    }
}

/// `to[j]` = (or +=) sum over rows of `x[.., j]`: the gradient of a bias.
/// `partials` has at least [`partials_len`]`(rows, to.len())` floats.
pub fn column_sums(cpu: &Cpu, x: &[f32], partials: &mut [f32], to: &mut [f32], accumulate: bool) {
    let width = to.len();
    let rows = x.len() / width;
    let partials = &mut partials[..partials_len(rows, width)];
    let shared = Shared::new(partials);
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        // SAFETY: each task has its own piece.
        let piece = unsafe { shared.piece(i * width..(i + 1) * width) };
        piece.fill(0.0);
        add_rows(cpu.isa, &x[i * ROWS * width..rows.min((i + 1) * ROWS) * width], piece);
    });
    add_pieces(cpu.isa, partials, width, 0, to, accumulate);
}
