//! Activation functions. Backward works in place on the gradient and computes the gradient of the
//! preceding bias in the same pass.

use super::pieces::{in_pieces, per_task, rows};
use super::sums::add_pieces;
use super::{ELEMENTS, ROWS, partials_len};
use crate::cpu::isa::per_isa;
use crate::cpu::math::{self, exp};
use crate::cpu::{Cpu, Element};

trait Activation: Copy + Sync {
    fn value(self, x: f32) -> f32;
    /// Gradient of the input, from the gradient of the output and the saved tensor: the input
    /// (GELU) or the output.
    fn gradient(self, saved: f32, dy: f32) -> f32;
}

/// GELU, tanh approximation (Hendrycks and Gimpel 2016; used by GPT-2).
///
/// `0.5 x (1 + tanh u) = x sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: one
/// exponential and no cancellation.
#[derive(Clone, Copy)]
struct Gelu;

impl Gelu {
    /// 2 sqrt(2 / pi).
    const DOUBLE_SCALE: f32 = 1.595_769_2;
    const CUBIC: f32 = 0.044_715;

    #[inline(always)]
    fn sigmoid_of_2u(x: f32) -> f32 {
        let u = x * (Self::DOUBLE_SCALE + (Self::DOUBLE_SCALE * Self::CUBIC) * (x * x));
        1.0 / (1.0 + exp(-u))
    }
}

impl Activation for Gelu {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        x * Self::sigmoid_of_2u(x)
    }

    #[inline(always)]
    fn gradient(self, x: f32, dy: f32) -> f32 {
        let s = Self::sigmoid_of_2u(x);
        let slope = Self::DOUBLE_SCALE + (3.0 * Self::DOUBLE_SCALE * Self::CUBIC) * (x * x);
        dy * (s + x * s * (1.0 - s) * slope)
    }
}

#[derive(Clone, Copy)]
struct Relu;

impl Activation for Relu {
    /// NaN stays NaN.
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        if x < 0.0 { 0.0 } else { x }
    }

    /// A select rather than a product: an infinite gradient of an inactive unit becomes 0, not NaN.
    #[inline(always)]
    fn gradient(self, y: f32, dy: f32) -> f32 {
        if y <= 0.0 { 0.0 } else { dy }
    }
}

#[derive(Clone, Copy)]
struct Tanh;

impl Activation for Tanh {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        math::tanh(x)
    }

    #[inline(always)]
    fn gradient(self, y: f32, dy: f32) -> f32 {
        dy * (1.0 - y * y)
    }
}

#[inline(always)]
fn gelu_body<E: Element>(x: &[E], y: &mut [E]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = E::of(Gelu.value(x.get()));
    }
}

per_isa! { fn gelu_piece<E: Element> = gelu_body(x: &[E], y: &mut [E]) }

/// `y` = GELU of `x` (tanh approximation), elementwise.
pub fn gelu<E: Element>(cpu: &Cpu, x: &[E], y: &mut [E]) {
    let len = y.len();
    assert_eq!(x.len(), len, "length of x and y");
    in_pieces(cpu, len, ELEMENTS, rows(y, 1), |range, y| gelu_piece(cpu.isa, &x[range], y));
}

#[inline(always)]
fn in_place_body<A: Activation, E: Element>(function: A, x: &mut [E]) {
    for x in x {
        *x = E::of(function.value(x.get()));
    }
}

per_isa! { fn in_place_piece<A: Activation, E: Element> = in_place_body(function: A, x: &mut [E]) }

fn in_place<A: Activation, E: Element>(cpu: &Cpu, function: A, x: &mut [E]) {
    in_pieces(cpu, x.len(), ELEMENTS, rows(x, 1), |_, x| in_place_piece(cpu.isa, function, x));
}

/// ReLU in place; NaN stays NaN.
pub fn relu<E: Element>(cpu: &Cpu, x: &mut [E]) {
    in_place(cpu, Relu, x);
}

/// Hyperbolic tangent in place.
pub fn tanh<E: Element>(cpu: &Cpu, x: &mut [E]) {
    in_place(cpu, Tanh, x);
}

#[inline(always)]
fn backward_body<A: Activation, E: Element>(function: A, saved: &[E], dy: &mut [E], sums: &mut [f32]) {
    sums.fill(0.0);
    let width = sums.len();
    for (saved, dy) in saved.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
        for ((&saved, dy), sum) in saved.iter().zip(dy).zip(sums.iter_mut()) {
            let dx = function.gradient(saved.get(), dy.get());
            *dy = E::of(dx);
            *sum += dx;
        }
    }
}

per_isa! {
    fn backward_piece<A: Activation, E: Element> = backward_body(
        function: A, saved: &[E], dy: &mut [E], sums: &mut [f32],
    )
}

fn backward<A: Activation, E: Element>(
    cpu: &Cpu,
    function: A,
    saved: &[E],
    dy: &mut [E],
    partials: &mut [f32],
    bias: &mut [f32],
    accumulate: bool,
) {
    let width = bias.len();
    let count = dy.len() / width;
    assert_eq!(saved.len(), dy.len(), "length of dy and what forward saved");
    let partials = &mut partials[..partials_len(count, width)];
    in_pieces(cpu, count, ROWS, (rows(dy, width), per_task(partials, width)), |range, (dy, sums)| {
        backward_piece(cpu.isa, function, &saved[range.start * width..range.end * width], dy, sums);
    });
    add_pieces(cpu.isa, partials, width, 0, bias, accumulate);
}

/// Turns `dy` in place into the gradient of the input `x` of [`gelu`] (rows of `bias.len()`), and
/// sets `bias` = (or +=) its column sums. `partials` has at least
/// [`partials_len`]`(rows, bias.len())` floats.
pub fn gelu_backward<E: Element>(
    cpu: &Cpu,
    x: &[E],
    dy: &mut [E],
    partials: &mut [f32],
    bias: &mut [f32],
    accumulate: bool,
) {
    backward(cpu, Gelu, x, dy, partials, bias, accumulate);
}

/// See [`gelu_backward`]; from the output `y` of [`relu`].
pub fn relu_backward<E: Element>(
    cpu: &Cpu,
    y: &[E],
    dy: &mut [E],
    partials: &mut [f32],
    bias: &mut [f32],
    accumulate: bool,
) {
    backward(cpu, Relu, y, dy, partials, bias, accumulate);
}

/// See [`gelu_backward`]; from the output `y` of [`tanh`].
pub fn tanh_backward<E: Element>(
    cpu: &Cpu,
    y: &[E],
    dy: &mut [E],
    partials: &mut [f32],
    bias: &mut [f32],
    accumulate: bool,
) {
    backward(cpu, Tanh, y, dy, partials, bias, accumulate);
}
