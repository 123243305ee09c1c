//! The arithmetic of the rules on one piece of memory.
//!
//! Compiled for each instruction set without fused multiply-add: all give the same bits.

use super::norm::squares_body;
use crate::cpu::isa::per_isa;

/// Floats between an elementwise loop and the sum over its results; they stay in the L1 cache.
const BLOCK: usize = 1024;

/// State below this becomes 0. The state of weights without gradient would otherwise shrink to denormals, which are
/// slow.
const TINY: f32 = 1e-30;

#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.abs() < TINY { 0.0 } else { x }
}

/// Settings of a step of gradient descent.
#[derive(Clone, Copy)]
pub(super) struct Descent {
    pub gradient_scale: f32,
    /// Share of the weight that is added to the scaled gradient.
    pub decay: f32,
    pub momentum: f32,
    pub nesterov: bool,
    pub rate: f32,
}

#[inline(always)]
fn descend_body(w: &mut [f32], g: &[f32], n: Descent) {
    for (w, &g) in w.iter_mut().zip(g) {
        *w -= n.rate * (g * n.gradient_scale + *w * n.decay);
    }
}

per_isa! {
    /// Gradient descent without momentum.
    pub(super) fn descend = descend_body(w: &mut [f32], g: &[f32], n: Descent)
}

#[inline(always)]
fn roll_body(w: &mut [f32], g: &[f32], momentum: &mut [f32], n: Descent) {
    for ((w, &g), momentum) in w.iter_mut().zip(g).zip(momentum) {
        let g = g * n.gradient_scale + *w * n.decay;
        *momentum = flush(*momentum * n.momentum + g);
        let step = if n.nesterov { g + *momentum * n.momentum } else { *momentum };
        *w -= n.rate * step;
    }
}

per_isa! {
    /// Gradient descent with momentum.
    pub(super) fn roll = roll_body(w: &mut [f32], g: &[f32], momentum: &mut [f32], n: Descent)
}

/// Settings of a step of the Adam family.
#[derive(Clone, Copy)]
pub(super) struct Moments {
    pub gradient_scale: f32,
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    /// Adam: share of the weight that is added to the scaled gradient. LAMB: to the direction.
    pub decay: f32,
    /// AdamW: 1 - learning rate * weight decay.
    pub keep: f32,
    /// Adam, AdamW: learning rate / (1 - beta1^t). LAMB: 1 / (1 - beta1^t).
    pub step_size: f32,
    /// Root of (1 - beta2^t).
    pub root: f32,
    pub epsilon: f32,
}

impl Moments {
    #[inline(always)]
    fn update(&self, g: f32, m: &mut f32, v: &mut f32) {
        *m = flush(*m * self.beta1 + g * self.one_minus_beta1);
        *v = flush(*v * self.beta2 + g * g * self.one_minus_beta2);
    }

    #[inline(always)]
    fn quotient(&self, m: f32, v: f32) -> f32 {
        m / (v.sqrt() / self.root + self.epsilon)
    }

    /// LAMB's step before the trust ratio.
    #[inline(always)]
    fn direction(&self, w: f32, m: f32, v: f32) -> f32 {
        self.step_size * self.quotient(m, v) + w * self.decay
    }
}

#[inline(always)]
fn adam_body(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: Moments) {
    for (((w, &g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        n.update(g * n.gradient_scale + *w * n.decay, m, v);
        *w = *w * n.keep - n.step_size * n.quotient(*m, *v);
    }
}

per_isa! {
    /// Adam and AdamW, in PyTorch's order of operations.
    pub(super) fn adam = adam_body(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: Moments)
}

#[inline(always)]
fn lamb_moments_body(w: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: Moments, squares: &mut [f64; 2]) {
    let mut sums = [[0.0; 16]; 2];
    let mut directions = [0.0; BLOCK];
    let blocks = w.chunks(BLOCK).zip(g.chunks(BLOCK)).zip(m.chunks_mut(BLOCK)).zip(v.chunks_mut(BLOCK));
    for (((w, g), m), v) in blocks {
        let directions = &mut directions[..w.len()];
        for ((((direction, &w), &g), m), v) in directions.iter_mut().zip(w).zip(g).zip(m).zip(v) {
            n.update(g * n.gradient_scale, m, v);
            *direction = n.direction(w, *m, *v);
        }
        squares_body(w, &mut sums[0]);
        squares_body(directions, &mut sums[1]);
    }
    *squares = sums.map(|lanes| lanes.iter().sum());
}

per_isa! {
    /// LAMB's first pass: moments, and the sums of the squares of the weights and of the direction.
    pub(super) fn lamb_moments = lamb_moments_body(
        w: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: Moments, squares: &mut [f64; 2],
    )
}

#[inline(always)]
fn lamb_step_body(w: &mut [f32], m: &[f32], v: &[f32], n: Moments, rate: f32) {
    for ((w, &m), &v) in w.iter_mut().zip(m).zip(v) {
        *w -= rate * n.direction(*w, m, v);
    }
}

per_isa! {
    /// LAMB's second pass. It computes the direction again, which costs less than the memory to keep it.
    pub(super) fn lamb_step = lamb_step_body(w: &mut [f32], m: &[f32], v: &[f32], n: Moments, rate: f32)
}
