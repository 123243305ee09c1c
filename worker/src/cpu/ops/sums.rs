//! Sums, softmax and their building blocks.

use super::pieces::{in_pieces, per_task, rows};
use super::{ROWS, partials_len};
use crate::cpu::isa::per_isa;
use crate::cpu::math::exp;
use crate::cpu::{Cpu, Element, Isa};

pub(super) const LANES: usize = 16;

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

/// Sum of `f` over all elements: 16 lanes, then pairwise.
#[inline(always)]
pub(crate) fn sum_by<E: Element>(x: &[E], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += f(chunk[i].get());
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f(x.get());
    }
    fold(lanes, |a, b| a + b)
}

/// Sum of all elements: 16 lanes, then pairwise.
#[inline(always)]
pub(crate) fn sum<E: Element>(x: &[E]) -> f32 {
    sum_by(x, |x| x)
}

/// Inner product: 16 lanes, then pairwise. The slices have equal lengths.
#[inline(always)]
pub(crate) fn sum_of_products<A: Element, B: Element>(x: &[A], y: &[B]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] += x[i].get() * y[i].get();
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += x.get() * y.get();
    }
    fold(lanes, |a, b| a + b)
}

/// Largest element; minus infinity for an empty slice. (NaNs can be ignored.)
#[inline(always)]
pub(crate) fn largest<E: Element>(x: &[E]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i].get());
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, x.get());
    }
    fold(lanes, larger)
}

/// Computes `x = exp(scale (x - max))` in place; returns (max, 1 / sum). Multiplying by the latter
/// gives the softmax.
#[inline(always)]
pub(crate) fn softmax_row(x: &mut [f32], scale: f32) -> (f32, f32) {
    let max = largest(x);
    for x in x.iter_mut() {
        *x = exp((*x - max) * scale);
    }
    (max, 1.0 / sum(x))
}

#[inline(always)]
fn softmax_piece_body<E: Element>(x: &mut [E], width: usize) {
    for row in x.chunks_exact_mut(width) {
        let max = largest(row);
        // Compute the exponentials twice: storing them in a 16-bit format would round them twice.
        let inverse = 1.0 / sum_by(row, |x| exp(x - max));
        for x in row {
            *x = E::of(exp(x.get() - max) * inverse);
        }
    }
}

per_isa! { fn softmax_piece<E: Element> = softmax_piece_body(x: &mut [E], width: usize) }

/// Softmax of each row of `x` (`width` columns), in place.
pub fn softmax_rows<E: Element>(cpu: &Cpu, x: &mut [E], width: usize) {
    in_pieces(cpu, x.len() / width, ROWS, rows(x, width), |_, x| softmax_piece(cpu.isa, x, width));
}

#[inline(always)]
fn add_rows_body<E: Element, T: Element>(x: &[E], to: &mut [T]) {
    for row in x.chunks_exact(to.len()) {
        for (to, &x) in to.iter_mut().zip(row) {
            *to = T::of(to.get() + x.get());
        }
    }
}

per_isa! { fn add_rows_piece<E: Element, T: Element> = add_rows_body(x: &[E], to: &mut [T]) }

/// Adds each row of `x` to `to`.
pub(super) fn add_rows<E: Element, T: Element>(isa: Isa, x: &[E], to: &mut [T]) {
    add_rows_piece(isa, x, to);
}

/// `to` = (or +=) the pieces' sums, added in order; `to` is as wide as a piece, or shorter and
/// starts at its column `skip`.
pub(super) fn add_pieces(isa: Isa, partials: &[f32], width: usize, skip: usize, to: &mut [f32], accumulate: bool) {
    if !accumulate {
        to.fill(0.0);
    }
    for piece in partials.chunks_exact(width) {
        add_rows(isa, &piece[skip..skip + to.len()], to);
    }
}

/// `to[j]` = (or +=) sum over rows of `x[.., j]`: the bias gradient.
/// `partials` has at least [`partials_len`]`(rows, to.len())` floats.
pub fn column_sums<E: Element>(cpu: &Cpu, x: &[E], partials: &mut [f32], to: &mut [f32], accumulate: bool) {
    let width = to.len();
    let count = x.len() / width;
    let partials = &mut partials[..partials_len(count, width)];
    in_pieces(cpu, count, ROWS, per_task(partials, width), |range, sums| {
        sums.fill(0.0);
        add_rows(cpu.isa, &x[range.start * width..range.end * width], sums);
    });
    add_pieces(cpu.isa, partials, width, 0, to, accumulate);
}
