//! Layer normalisation (Ba, Kiros and Hinton 2016), biased variance, epsilon 1e-5 as in PyTorch.

use super::sums::{add_pieces, sum, sum_of_products};
use super::{ROWS, partials_len};
use crate::cpu::Cpu;
use crate::cpu::isa::per_isa;
use crate::cpu::pool::Shared;

const EPSILON: f32 = 1e-5;

/// What backward needs of forward: `[mean, 1 / standard deviation]` of each row.
pub type LayerNormSaved = [f32; 2];

#[inline(always)]
fn forward_body(x: &[f32], gamma: &[f32], beta: &[f32], y: &mut [f32], saved: &mut [f32]) {
    let width = gamma.len();
    let n = width as f32;
    for ((x, y), saved) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(saved.as_chunks_mut::<2>().0) {
        let mean = sum(x) / n;
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x - mean;
        }
        let inverse = 1.0 / (sum_of_products(y, y) / n + EPSILON).sqrt();
        for ((y, &g), &b) in y.iter_mut().zip(gamma).zip(beta) {
            *y = *y * inverse * g + b;
        }
        *saved = [mean, inverse];
    }
}

per_isa! { fn forward_piece = forward_body(x: &[f32], gamma: &[f32], beta: &[f32], y: &mut [f32], saved: &mut [f32]) }

/// `y` = normalised rows of `x` times `gamma` plus `beta`. `saved` gets [`LayerNormSaved`] of each row.
pub fn layer_norm(cpu: &Cpu, x: &[f32], gamma: &[f32], beta: &[f32], y: &mut [f32], saved: &mut [f32]) {
    let width = gamma.len();
    let rows = x.len() / width;
    assert_eq!((y.len(), beta.len(), saved.len()), (x.len(), width, 2 * rows), "length of y, beta and saved");
    let (y, saved) = (Shared::new(y), Shared::new(saved));
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        let (from, to) = (i * ROWS, rows.min((i + 1) * ROWS));
        // SAFETY: each task has its own rows.
        let (y, saved) = unsafe { (y.piece(from * width..to * width), saved.piece(2 * from..2 * to)) };
        forward_piece(cpu.isa, &x[from * width..to * width], gamma, beta, y, saved);
    });
}

#[inline(always)]
fn backward_body(dy: &mut [f32], x: &[f32], gamma: &[f32], saved: &[f32], dx: &mut [f32], sums: &mut [f32], add: bool) {
    let width = gamma.len();
    let n = width as f32;
    let (d_gamma, d_beta) = sums.split_at_mut(width);
    d_gamma.fill(0.0);
    d_beta.fill(0.0);
    let rows = dy.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
    for (((dy, x), dx), &[mean, inverse]) in rows.zip(saved.as_chunks::<2>().0) {
        for i in 0..width {
            d_gamma[i] += dy[i] * ((x[i] - mean) * inverse);
            d_beta[i] += dy[i];
            dy[i] *= gamma[i];
        }
        let m1 = sum(dy) / n;
        // sum of dy * (x - mean), by lanes of its own
        let mut lanes = [0.0f32; 16];
        let (dys, dy_rest) = dy.as_chunks::<16>();
        let (xs, x_rest) = x.as_chunks::<16>();
        for (dy, x) in dys.iter().zip(xs) {
            for i in 0..16 {
                lanes[i] += dy[i] * (x[i] - mean);
            }
        }
        for (lane, (&dy, &x)) in lanes.iter_mut().zip(dy_rest.iter().zip(x_rest)) {
            *lane += dy * (x - mean);
        }
        let m2 = sum(&lanes) * inverse / n;
        if add {
            for i in 0..width {
                dx[i] += inverse * (dy[i] - m1 - (x[i] - mean) * inverse * m2);
            }
        } else {
            for i in 0..width {
                dx[i] = inverse * (dy[i] - m1 - (x[i] - mean) * inverse * m2);
            }
        }
    }
}

per_isa! {
    fn backward_piece = backward_body(
        dy: &mut [f32], x: &[f32], gamma: &[f32], saved: &[f32], dx: &mut [f32], sums: &mut [f32], add: bool,
    )
}

/// Gradients of [`layer_norm`]: `dx` = (if `add`: +=) that of `x`, `d_gamma` and `d_beta` = (if `accumulate`: +=) those of
/// the parameters. `dy` is used up. `partials` has at least [`partials_len`]`(rows, 2 * width)` floats.
#[allow(clippy::too_many_arguments)]
pub fn layer_norm_backward(
    cpu: &Cpu,
    dy: &mut [f32],
    x: &[f32],
    gamma: &[f32],
    saved: &[f32],
    dx: &mut [f32],
    add: bool,
    partials: &mut [f32],
    (d_gamma, d_beta): (&mut [f32], &mut [f32]),
    accumulate: bool,
) {
    let width = gamma.len();
    let rows = x.len() / width;
    assert_eq!((dy.len(), dx.len(), saved.len()), (x.len(), x.len(), 2 * rows), "length of dy, dx and saved");
    let partials = &mut partials[..partials_len(rows, 2 * width)];
    let (dy, dx, pieces) = (Shared::new(dy), Shared::new(dx), Shared::new(partials));
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        let (from, to) = (i * ROWS, rows.min((i + 1) * ROWS));
        let range = from * width..to * width;
        // SAFETY: each task has its own rows and its own piece.
        let (dy, dx, sums) = unsafe {
            (dy.piece(range.clone()), dx.piece(range.clone()), pieces.piece(2 * i * width..2 * (i + 1) * width))
        };
        backward_piece(cpu.isa, dy, &x[range], gamma, &saved[2 * from..2 * to], dx, sums, add);
    });
    add_pieces(cpu.isa, partials, 2 * width, 0, d_gamma, accumulate);
    add_pieces(cpu.isa, partials, 2 * width, width, d_beta, accumulate);
}
