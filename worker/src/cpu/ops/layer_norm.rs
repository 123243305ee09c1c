//! Layer normalisation (Ba, Kiros and Hinton 2016), biased variance, epsilon 1e-5 as in PyTorch.

use super::pieces::{in_pieces, per_task, rows};
use super::sums::{LANES, add_pieces, sum, sum_by};
use super::{ROWS, partials_len};
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

const EPSILON: f32 = 1e-5;

/// Saved for backward: `[mean, 1 / standard deviation]` of each row.
pub type LayerNormSaved = [f32; 2];

#[inline(always)]
fn forward_body<E: Element>(x: &[E], gamma: &[f32], beta: &[f32], y: &mut [E], saved: &mut [f32]) {
    let width = gamma.len();
    let n = width as f32;
    for ((x, y), saved) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(saved.as_chunks_mut::<2>().0) {
        let mean = sum(x) / n;
        let inverse = 1.0 / (sum_by(x, |x| (x - mean) * (x - mean)) / n + EPSILON).sqrt();
        for (((y, &x), &g), &b) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
            *y = E::of((x.get() - mean) * inverse * g + b);
        }
        *saved = [mean, inverse];
    }
}

per_isa! {
    fn forward_piece<E: Element> = forward_body(
        x: &[E], gamma: &[f32], beta: &[f32], y: &mut [E], saved: &mut [f32],
    )
}

/// `y` = normalised rows of `x` times `gamma` plus `beta`. `saved` receives [`LayerNormSaved`] of
/// each row.
pub fn layer_norm<E: Element>(cpu: &Cpu, x: &[E], gamma: &[f32], beta: &[f32], y: &mut [E], saved: &mut [f32]) {
    let width = gamma.len();
    let count = x.len() / width;
    assert_eq!((y.len(), beta.len(), saved.len()), (x.len(), width, 2 * count), "length of y, beta and saved");
    in_pieces(cpu, count, ROWS, (rows(y, width), rows(saved, 2)), |range, (y, saved)| {
        forward_piece(cpu.isa, &x[range.start * width..range.end * width], gamma, beta, y, saved);
    });
}

/// One row of the first backward pass.
struct Row<'a, E> {
    dy: &'a [E],
    x: &'a [E],
    gamma: &'a [f32],
    mean: f32,
    inverse: f32,
}

impl<E: Element> Row<'_, E> {
    /// Adds to the parameter gradients; returns the sums of `dy * gamma` and of
    /// `dy * gamma * (x - mean)`.
    #[inline(always)]
    fn sums(&self, d_gamma: &mut [f32], d_beta: &mut [f32]) -> (f32, f32) {
        let Row { mean, inverse, .. } = *self;
        let (mut plain, mut weighted) = ([0.0f32; LANES], [0.0f32; LANES]);
        let (dys, dy_rest) = self.dy.as_chunks::<LANES>();
        let (xs, x_rest) = self.x.as_chunks::<LANES>();
        let (gammas, gamma_rest) = self.gamma.as_chunks::<LANES>();
        let (d_gammas, d_gamma_rest) = d_gamma.as_chunks_mut::<LANES>();
        let (d_betas, d_beta_rest) = d_beta.as_chunks_mut::<LANES>();
        let whole = dys.iter().zip(xs).zip(gammas).zip(d_gammas).zip(d_betas);
        for ((((dy, x), gamma), d_gamma), d_beta) in whole {
            for i in 0..LANES {
                let (dy, x) = (dy[i].get(), x[i].get() - mean);
                d_gamma[i] += dy * (x * inverse);
                d_beta[i] += dy;
                plain[i] += dy * gamma[i];
                weighted[i] += dy * gamma[i] * x;
            }
        }
        for i in 0..dy_rest.len() {
            let (dy, x) = (dy_rest[i].get(), x_rest[i].get() - mean);
            d_gamma_rest[i] += dy * (x * inverse);
            d_beta_rest[i] += dy;
            plain[i] += dy * gamma_rest[i];
            weighted[i] += dy * gamma_rest[i] * x;
        }
        (sum(&plain), sum(&weighted))
    }
}

#[inline(always)]
fn backward_body<E: Element>(
    dy: &[E],
    x: &[E],
    gamma: &[f32],
    saved: &[f32],
    dx: &mut [E],
    sums: &mut [f32],
    add: bool,
) {
    let width = gamma.len();
    let n = width as f32;
    let (d_gamma, d_beta) = sums.split_at_mut(width);
    d_gamma.fill(0.0);
    d_beta.fill(0.0);
    let rows = dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
    for (((dy, x), dx), &[mean, inverse]) in rows.zip(saved.as_chunks::<2>().0) {
        let (plain, weighted) = Row { dy, x, gamma, mean, inverse }.sums(d_gamma, d_beta);
        let (m1, m2) = (plain / n, weighted * inverse / n);
        let gradients = dy.iter().zip(x).zip(gamma);
        let gradients = gradients.map(|((dy, x), g)| inverse * (dy.get() * g - m1 - (x.get() - mean) * inverse * m2));
        if add {
            dx.iter_mut().zip(gradients).for_each(|(dx, gradient)| *dx = E::of(dx.get() + gradient));
        } else {
            dx.iter_mut().zip(gradients).for_each(|(dx, gradient)| *dx = E::of(gradient));
        }
    }
}

per_isa! {
    fn backward_piece<E: Element> = backward_body(
        dy: &[E], x: &[E], gamma: &[f32], saved: &[f32], dx: &mut [E], sums: &mut [f32], add: bool,
    )
}

/// Gradients of [`layer_norm`]: `dx` = (if `add`: +=) the gradient of `x`, `d_gamma` and `d_beta` =
/// (if `accumulate`: +=) the gradients of the parameters. `partials` has at least
/// [`partials_len`]`(rows, 2 * width)` floats.
#[allow(clippy::too_many_arguments)]
pub fn layer_norm_backward<E: Element>(
    cpu: &Cpu,
    dy: &[E],
    x: &[E],
    gamma: &[f32],
    saved: &[f32],
    dx: &mut [E],
    add: bool,
    partials: &mut [f32],
    (d_gamma, d_beta): (&mut [f32], &mut [f32]),
    accumulate: bool,
) {
    let width = gamma.len();
    let count = x.len() / width;
    assert_eq!((dy.len(), dx.len(), saved.len()), (x.len(), x.len(), 2 * count), "length of dy, dx and saved");
    let partials = &mut partials[..partials_len(count, 2 * width)];
    in_pieces(cpu, count, ROWS, (rows(dx, width), per_task(partials, 2 * width)), |range, (dx, sums)| {
        let saved = &saved[2 * range.start..2 * range.end];
        let range = range.start * width..range.end * width;
        backward_piece(cpu.isa, &dy[range.clone()], &x[range], gamma, saved, dx, sums, add);
    });
    add_pieces(cpu.isa, partials, 2 * width, 0, d_gamma, accumulate);
    add_pieces(cpu.isa, partials, 2 * width, width, d_beta, accumulate);
}
