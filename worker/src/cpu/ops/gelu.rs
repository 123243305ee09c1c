//! GELU in the tanh form (Hendrycks and Gimpel 2016; the one GPT-2 uses).
//!
//! `0.5 x (1 + tanh u) = x sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: one exponential and no cancellation.

use super::sums::add_pieces;
use super::{ELEMENTS, ROWS, partials_len};
use crate::cpu::Cpu;
use crate::cpu::isa::per_isa;
use crate::cpu::math::exp;
use crate::cpu::pool::Shared;

/// Twice the root of 2 / pi.
const TWICE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

#[inline(always)]
fn sigmoid_of_2u(x: f32) -> f32 {
    let u = x * (TWICE + (TWICE * CUBIC) * (x * x));
    1.0 / (1.0 + exp(-u))
}

#[inline(always)]
fn gelu_body(x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = x * sigmoid_of_2u(x);
    }
}

per_isa! { fn gelu_piece = gelu_body(x: &[f32], y: &mut [f32]) }

/// `y` = GELU of `x`, element by element.
pub fn gelu(cpu: &Cpu, x: &[f32], y: &mut [f32]) {
    let len = y.len();
    assert_eq!(x.len(), len, "length of x and y");
    let y = Shared::new(y);
    cpu.pool.run(len.div_ceil(ELEMENTS), &|i, _| {
        let range = i * ELEMENTS..len.min((i + 1) * ELEMENTS);
        // SAFETY: each task has its own range.
        gelu_piece(cpu.isa, &x[range.clone()], unsafe { y.piece(range) });
    });
}

#[inline(always)]
fn gelu_backward_body(x: &[f32], dy: &mut [f32], sums: &mut [f32]) {
    sums.fill(0.0);
    let width = sums.len();
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
        for ((&x, dy), sum) in x.iter().zip(dy).zip(sums.iter_mut()) {
            let s = sigmoid_of_2u(x);
            let slope = TWICE + (3.0 * TWICE * CUBIC) * (x * x);
            let derivative = s + x * s * (1.0 - s) * slope;
            *dy *= derivative;
            *sum += *dy;
        }
    }
}

per_isa! { fn gelu_backward_piece = gelu_backward_body(x: &[f32], dy: &mut [f32], sums: &mut [f32]) }

/// In place `dy` = gradient with respect to `x` (rows of `bias.len()`), and `bias` = (or +=) its column sums.
/// `partials` has at least [`partials_len`]`(rows, bias.len())` floats.
pub fn gelu_backward(cpu: &Cpu, x: &[f32], dy: &mut [f32], partials: &mut [f32], bias: &mut [f32], accumulate: bool) {
    let width = bias.len();
    let rows = dy.len() / width;
    assert_eq!(x.len(), dy.len(), "length of x and dy");
    let partials = &mut partials[..partials_len(rows, width)];
    let (dy, pieces) = (Shared::new(dy), Shared::new(partials));
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        let range = i * ROWS * width..rows.min((i + 1) * ROWS) * width;
        // SAFETY: each task has its own rows and its own piece.
        let (dy, sums) = unsafe { (dy.piece(range.clone()), pieces.piece(i * width..(i + 1) * width)) };
        gelu_backward_piece(cpu.isa, &x[range], dy, sums);
    });
    add_pieces(cpu.isa, partials, width, 0, bias, accumulate);
}
