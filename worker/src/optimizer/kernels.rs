//! Optimizer kernels for one piece of memory.
//!
//! Compiled for each instruction set without fused multiply-add, so all are bit-identical.

use super::norm::squares_body;
use crate::cpu::isa::per_isa;

/// Floats per block of an elementwise loop whose results are then summed; a block stays in the L1
/// cache.
const BLOCK: usize = 1024;

/// Flush smaller state to 0. Otherwise, the state of weights without gradients would decay to
/// denormals, which are slow.
const TINY: f32 = 1e-30;

#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.abs() < TINY { 0.0 } else { x }
}

/// Parameters of an SGD step.
#[derive(Clone, Copy)]
pub(super) struct SgdStep {
    pub gradient_scale: f32,
    /// Share of the weight added to the scaled gradient.
    pub decay: f32,
    pub momentum: f32,
    pub nesterov: bool,
    pub rate: f32,
}

#[inline(always)]
fn sgd_step_body(w: &mut [f32], g: &[f32], n: SgdStep) {
    for (w, &g) in w.iter_mut().zip(g) {
        *w -= n.rate * (g * n.gradient_scale + *w * n.decay);
    }
}

per_isa! {
    /// SGD without momentum.
    pub(super) fn sgd_step = sgd_step_body(w: &mut [f32], g: &[f32], n: SgdStep)
}

#[inline(always)]
fn momentum_step_body(w: &mut [f32], g: &[f32], momentum: &mut [f32], n: SgdStep) {
    for ((w, &g), momentum) in w.iter_mut().zip(g).zip(momentum) {
        let g = g * n.gradient_scale + *w * n.decay;
        *momentum = flush(*momentum * n.momentum + g);
        let step = if n.nesterov { g + *momentum * n.momentum } else { *momentum };
        *w -= n.rate * step;
    }
}

per_isa! {
    /// SGD with momentum.
    pub(super) fn momentum_step = momentum_step_body(w: &mut [f32], g: &[f32], momentum: &mut [f32], n: SgdStep)
}

/// Parameters of an Adam, AdamW or LAMB step.
#[derive(Clone, Copy)]
pub(super) struct AdamStep {
    pub gradient_scale: f32,
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    /// Share of the weight added to the scaled gradient (Adam) or to the direction (LAMB).
    pub decay: f32,
    /// AdamW: 1 - learning rate * weight decay.
    pub decay_factor: f32,
    /// Adam, AdamW: learning rate / (1 - beta1^t). LAMB: 1 / (1 - beta1^t).
    pub step_size: f32,
    /// sqrt(1 - beta2^t).
    pub bias_correction2_sqrt: f32,
    pub epsilon: f32,
}

impl AdamStep {
    #[inline(always)]
    fn update(&self, g: f32, m: &mut f32, v: &mut f32) {
        *m = flush(*m * self.beta1 + g * self.one_minus_beta1);
        *v = flush(*v * self.beta2 + g * g * self.one_minus_beta2);
    }

    #[inline(always)]
    fn normalised(&self, m: f32, v: f32) -> f32 {
        m / (v.sqrt() / self.bias_correction2_sqrt + self.epsilon)
    }

    /// LAMB's update before the trust ratio.
    #[inline(always)]
    fn direction(&self, w: f32, m: f32, v: f32) -> f32 {
        self.step_size * self.normalised(m, v) + w * self.decay
    }
}

#[inline(always)]
fn adam_body(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: AdamStep) {
    for (((w, &g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        n.update(g * n.gradient_scale + *w * n.decay, m, v);
        *w = *w * n.decay_factor - n.step_size * n.normalised(*m, *v);
    }
}

per_isa! {
    /// Adam and AdamW, with PyTorch's order of operations.
    pub(super) fn adam = adam_body(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: AdamStep)
}

#[inline(always)]
fn lamb_moments_body(w: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: AdamStep, squares: &mut [f64; 2]) {
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
    /// LAMB's first pass: updates the moments, and sums the squares of the weights and of the
    /// direction.
    pub(super) fn lamb_moments = lamb_moments_body(
        w: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: AdamStep, squares: &mut [f64; 2],
    )
}

#[inline(always)]
fn lamb_step_body(w: &mut [f32], m: &[f32], v: &[f32], n: AdamStep, rate: f32) {
    for ((w, &m), &v) in w.iter_mut().zip(m).zip(v) {
        *w -= rate * n.direction(*w, m, v);
    }
}

per_isa! {
    /// LAMB's second pass. Recomputing the direction is cheaper than storing it.
    pub(super) fn lamb_step = lamb_step_body(w: &mut [f32], m: &[f32], v: &[f32], n: AdamStep, rate: f32)
}
