//! AdamW (Loshchilov and Hutter 2019, algorithm 2), in PyTorch's order of operations, in one pass over memory.
#![allow(unsafe_code)]

use crate::cpu::isa::per_isa;
use crate::cpu::pool::Shared;
use crate::cpu::{AlignedBuffer, Isa, Pool};
use crate::model::Layout;
use std::ops::Range;
use switchyard_worker_contract::config;

/// Floats in one task.
const PIECE: usize = 16 * 1024;
/// Moments below this become 0. Those of weights without gradient would shrink into denormal numbers, which are slow.
const TINY: f32 = 1e-30;

/// Optimizer state in the flat layout.
pub struct AdamW {
    config: config::AdamW,
    isa: Isa,
    m: AlignedBuffer,
    v: AlignedBuffer,
    pieces: Vec<(Range<usize>, bool)>,
    steps: u64,
    /// beta1 and beta2 to the power `steps`, by repeated multiplication: `powf` may differ between machines.
    powers: (f64, f64),
}

/// One step's numbers.
#[derive(Clone, Copy)]
struct Numbers {
    gradient_scale: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// 1 - learning rate * weight decay
    keep: f32,
    /// learning rate / (1 - beta1^t)
    step_size: f32,
    /// root of (1 - beta2^t)
    root: f32,
    epsilon: f32,
}

#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.abs() < TINY { 0.0 } else { x }
}

#[inline(always)]
fn step_body(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: Numbers) {
    for (((w, &g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * n.gradient_scale;
        *m = flush(*m * n.beta1 + g * n.one_minus_beta1);
        *v = flush(*v * n.beta2 + g * g * n.one_minus_beta2);
        let denominator = v.sqrt() / n.root + n.epsilon;
        *w = *w * n.keep - n.step_size * (*m / denominator);
    }
}

per_isa! { fn step_piece = step_body(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], n: Numbers) }

impl AdamW {
    /// State of all zeros for the parameters of `layout`.
    pub fn new(layout: &Layout, config: config::AdamW) -> AdamW {
        let isa = Isa::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Portable);
        AdamW::with_isa(layout, config, isa)
    }

    /// The same with kernels of choice; they all give the same bits.
    pub fn with_isa(layout: &Layout, config: config::AdamW, isa: Isa) -> AdamW {
        let mut pieces = Vec::new();
        for (ordinal, parameter) in layout.parameters.iter().enumerate() {
            // The gap after a parameter holds zeros and stays so.
            let end = layout.parameters.get(ordinal + 1).map_or(layout.len, |next| next.offset);
            for start in (parameter.offset..end).step_by(PIECE) {
                pieces.push((start..end.min(start + PIECE), parameter.decay));
            }
        }
        let (m, v) = (AlignedBuffer::zeroed(layout.len), AlignedBuffer::zeroed(layout.len));
        AdamW { config, isa, m, v, pieces, steps: 0, powers: (1.0, 1.0) }
    }

    /// One step over all parameters: `weights` move against `gradient_scale * gradients`. Weight decay applies where the layout
    /// says so.
    pub fn step(
        &mut self,
        weights: &mut [f32],
        gradients: &[f32],
        learning_rate: f64,
        gradient_scale: f32,
        pool: &Pool,
    ) {
        self.begin_step();
        self.apply(0..self.m.len(), weights, gradients, learning_rate, gradient_scale, pool);
    }

    /// Begins a step that [`AdamW::apply`] carries out range by range, each range once.
    pub fn begin_step(&mut self) {
        self.steps += 1;
        self.powers = (self.powers.0 * self.config.beta1, self.powers.1 * self.config.beta2);
    }

    /// The part of a step for one range of the layout that begins and ends at parameters. `weights` is the whole layout,
    /// `gradients` the range.
    pub fn apply(
        &mut self,
        range: Range<usize>,
        weights: &mut [f32],
        gradients: &[f32],
        learning_rate: f64,
        gradient_scale: f32,
        pool: &Pool,
    ) {
        assert_eq!((weights.len(), gradients.len()), (self.m.len(), range.len()), "length of weights and gradients");
        let config::AdamW { beta1, beta2, epsilon, weight_decay, .. } = self.config;
        let decayed = Numbers {
            gradient_scale,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            keep: (1.0 - learning_rate * weight_decay) as f32,
            step_size: (learning_rate / (1.0 - self.powers.0)) as f32,
            root: (1.0 - self.powers.1).sqrt() as f32,
            epsilon: epsilon as f32,
        };
        let kept = Numbers { keep: 1.0, ..decayed };
        let first = self.pieces.partition_point(|(piece, _)| piece.start < range.start);
        let end = self.pieces.partition_point(|(piece, _)| piece.start < range.end);
        let (isa, pieces) = (self.isa, &self.pieces[first..end]);
        let (weights, m, v) = (Shared::new(weights), Shared::new(&mut self.m), Shared::new(&mut self.v));
        pool.run(pieces.len(), &|i, _| {
            let (piece, decay) = pieces[i].clone();
            // SAFETY: the pieces are disjoint.
            let (w, m, v) = unsafe { (weights.piece(piece.clone()), m.piece(piece.clone()), v.piece(piece.clone())) };
            let gradients = &gradients[piece.start - range.start..piece.end - range.start];
            step_piece(isa, w, gradients, m, v, if decay { decayed } else { kept });
        });
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// First and second moments in the flat layout.
    pub fn moments(&self) -> (&[f32], &[f32]) {
        (&self.m, &self.v)
    }

    /// Memory of the state.
    pub fn memory_bytes(&self) -> usize {
        4 * (self.m.len() + self.v.len())
    }
}

#[inline(always)]
fn squares_body(x: &[f32], lanes: &mut [f64; 16]) {
    let mut sums = *lanes;
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            let x = f64::from(chunk[i]);
            sums[i] += x * x;
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(x) * f64::from(x);
    }
    *lanes = sums;
}

per_isa! { fn squares = squares_body(x: &[f32], lanes: &mut [f64; 16]) }

/// Sum of the squares of gradients, in 16 lanes of double precision.
pub fn sum_of_squares(gradients: &[f32]) -> f64 {
    let isa = Isa::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Portable);
    squares_with(isa, gradients)
}

/// Euclidean norm of all gradients.
pub fn gradient_norm(gradients: &[f32]) -> f64 {
    sum_of_squares(gradients).sqrt()
}

fn squares_with(isa: Isa, gradients: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 16];
    squares(isa, gradients, &mut lanes);
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let mut layout = Layout::default();
        for (len, decay) in [(50_000, true), (77, false), (5_003, true)] {
            layout.push(format!("p{len}"), &[len], decay, crate::model::Initial::Constant(0.0));
        }
        layout
    }

    fn noise(len: usize, salt: u32) -> Vec<f32> {
        (0..len as u32).map(|i| ((i ^ salt).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0).collect()
    }

    #[test]
    fn same_bits_on_every_isa_and_thread_count() {
        let layout = layout();
        let config = config::AdamW {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            gradient_clip_norm: None,
        };
        let mut results = Vec::new();
        let mut norms = Vec::new();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let mut optimizer = AdamW::with_isa(&layout, config, isa);
                let mut weights = noise(layout.len, 1);
                for step in 0..3 {
                    optimizer.step(&mut weights, &noise(layout.len, 2 + step), 1e-3, 0.7, &pool);
                }
                results.push(weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>());
                norms.push(squares_with(isa, &weights).to_bits());
            }
        }
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
        assert!(norms.windows(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn decay_only_where_asked() {
        let layout = layout();
        let config = config::AdamW {
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.5,
            gradient_clip_norm: None,
        };
        let mut weights = vec![1.0; layout.len];
        AdamW::new(&layout, config).step(&mut weights, &vec![0.0; layout.len], 0.1, 1.0, &Pool::new(1));
        for parameter in &layout.parameters {
            let want = if parameter.decay { 0.95 } else { 1.0 };
            assert!(weights[parameter.range()].iter().all(|&w| w == want), "{}", parameter.name);
        }
    }
}
