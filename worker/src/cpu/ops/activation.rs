//! Activation functions. Backward works in place on the gradient, and in the same pass sums the gradient of the bias
//! before the function.

use super::pieces::{in_pieces, per_task, rows};
use super::sums::add_pieces;
use super::{ELEMENTS, ROWS, partials_len};
use crate::cpu::isa::per_isa;
use crate::cpu::math::{self, exp};
use crate::cpu::{Cpu, Element};

trait Activation: Copy + Sync {
    /// The function.
    fn value(self, x: f32) -> f32;
    /// Gradient of the input, from that of the output and what forward kept: the input (GELU) or the output.
    fn gradient(self, kept: f32, dy: f32) -> f32;
}

/// GELU in the tanh form (Hendrycks and Gimpel 2016; the one that GPT-2 uses).
///
/// `0.5 x (1 + tanh u) = x sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: one exponential and no cancellation.
#[derive(Clone, Copy)]
struct Gelu;

impl Gelu {
    /// Twice the root of 2 / pi.
    const TWICE: f32 = 1.595_769_2;
    const CUBIC: f32 = 0.044_715;

    #[inline(always)]
    fn sigmoid_of_2u(x: f32) -> f32 {
        let u = x * (Self::TWICE + (Self::TWICE * Self::CUBIC) * (x * x));
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
        let slope = Self::TWICE + (3.0 * Self::TWICE * Self::CUBIC) * (x * x);
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

    /// A choice rather than a product: an infinite gradient of an inactive unit is 0, not NaN.
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

/// `y` = GELU of `x` (tanh form), element by element.
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

/// Rectifier in place: the larger of `x` and 0; NaN stays NaN.
pub fn relu<E: Element>(cpu: &Cpu, x: &mut [E]) {
    in_place(cpu, Relu, x);
}

/// Hyperbolic tangent in place.
pub fn tanh<E: Element>(cpu: &Cpu, x: &mut [E]) {
    in_place(cpu, Tanh, x);
}

#[inline(always)]
fn backward_body<A: Activation, E: Element>(function: A, kept: &[E], dy: &mut [E], sums: &mut [f32]) {
    sums.fill(0.0);
    let width = sums.len();
    for (kept, dy) in kept.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
        for ((&kept, dy), sum) in kept.iter().zip(dy).zip(sums.iter_mut()) {
            let dx = function.gradient(kept.get(), dy.get());
            *dy = E::of(dx);
            *sum += dx;
        }
    }
}

per_isa! {
    fn backward_piece<A: Activation, E: Element> = backward_body(
        function: A, kept: &[E], dy: &mut [E], sums: &mut [f32],
    )
}

fn backward<A: Activation, E: Element>(
    cpu: &Cpu,
    function: A,
    kept: &[E],
    dy: &mut [E],
    partials: &mut [f32],
    bias: &mut [f32],
    accumulate: bool,
) {
    let width = bias.len();
    let count = dy.len() / width;
    assert_eq!(kept.len(), dy.len(), "length of dy and what forward kept");
    let partials = &mut partials[..partials_len(count, width)];
    in_pieces(cpu, count, ROWS, (rows(dy, width), per_task(partials, width)), |range, (dy, sums)| {
        backward_piece(cpu.isa, function, &kept[range.start * width..range.end * width], dy, sums);
    });
    add_pieces(cpu.isa, partials, width, 0, bias, accumulate);
}

/// In place `dy` = gradient with respect to the input `x` of [`gelu`] (rows of `bias.len()`), and `bias` = (or +=) its
/// column sums. `partials` has at least [`partials_len`]`(rows, bias.len())` floats.
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
