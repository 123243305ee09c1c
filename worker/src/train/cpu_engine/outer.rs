//! The outer optimizer of local steps: what ranks learned apart becomes one model again.
//!
//! ```text
//! change := mean over all ranks of (anchor - weights)
//! Average:   anchor := anchor - change
//! Nesterov:  momentum := mu * momentum + change
//!            anchor := anchor - rate * (change + mu * momentum)
//! weights := anchor
//! ```
//!
//! Averaging is local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little"); the
//! outer Nesterov step is DiLoCo's (Douillard et al. 2023, arXiv:2311.08105). Changes are sent
//! instead of weights, because they can be rounded to 16 bits.

use crate::cpu::AlignedBuffer;
use std::ops::Range;
use switchyard_worker_contract::config::{LocalSteps, OuterOptimizer};

pub(super) struct Outer {
    optimizer: OuterOptimizer,
    /// The weights after the last average.
    anchor: AlignedBuffer,
    /// Empty without momentum.
    pub momentum: AlignedBuffer,
}

impl Outer {
    /// For this number of weights.
    pub fn new(LocalSteps { outer_optimizer, .. }: LocalSteps, len: usize) -> Outer {
        let has_momentum = matches!(outer_optimizer, OuterOptimizer::Nesterov(_));
        let momentum = AlignedBuffer::zeroed(if has_momentum { len } else { 0 });
        Outer { optimizer: outer_optimizer, anchor: AlignedBuffer::zeroed(len), momentum }
    }

    /// Memory in bytes.
    pub fn memory_bytes(LocalSteps { outer_optimizer, .. }: LocalSteps, len: usize) -> u64 {
        let arrays = match outer_optimizer {
            OuterOptimizer::Average => 1,
            OuterOptimizer::Nesterov(_) => 2,
        };
        arrays * 4 * len as u64
    }

    /// Begins local steps from these weights.
    pub fn begin(&mut self, weights: &[f32]) {
        self.anchor.copy_from_slice(weights);
    }

    /// Writes this rank's `share` of the mean change of a range of weights.
    pub fn write_change(&self, range: Range<usize>, weights: &[f32], share: f32, into: &mut [f32]) {
        for ((into, anchor), weight) in into.iter_mut().zip(&self.anchor[range.clone()]).zip(&weights[range]) {
            *into = (anchor - weight) * share;
        }
    }

    /// Applies the mean change of a range of weights.
    pub fn apply(&mut self, range: Range<usize>, change: &[f32], weights: &mut [f32]) {
        let anchor = &mut self.anchor[range.clone()];
        match self.optimizer {
            OuterOptimizer::Average => {
                for (anchor, change) in anchor.iter_mut().zip(change) {
                    *anchor -= change;
                }
            }
            OuterOptimizer::Nesterov(nesterov) => {
                let (rate, mu) = (nesterov.learning_rate as f32, nesterov.momentum as f32);
                let momentum = &mut self.momentum[range.clone()];
                for ((anchor, change), momentum) in anchor.iter_mut().zip(change).zip(momentum) {
                    *momentum = mu * *momentum + change;
                    *anchor -= rate * (change + mu * *momentum);
                }
            }
        }
        weights[range].copy_from_slice(anchor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::config::Nesterov;

    fn outer(outer_optimizer: OuterOptimizer) -> Outer {
        Outer::new(LocalSteps { every_steps: 2, outer_optimizer }, 2)
    }

    /// Averages the weights of two ranks, which begin from `weights` and end at `ends`.
    fn average(outer: &mut Outer, weights: &mut [f32; 2], ends: [[f32; 2]; 2]) {
        outer.begin(weights);
        let mut sum = [0.0; 2];
        for end in ends {
            let mut part = [0.0; 2];
            outer.write_change(0..2, &end, 0.5, &mut part);
            (0..2).for_each(|at| sum[at] += part[at]);
        }
        outer.apply(0..2, &sum, weights);
    }

    #[test]
    fn the_average_is_the_mean_of_all_ranks() {
        let (mut outer, mut weights) = (outer(OuterOptimizer::Average), [1.0, -2.0]);
        average(&mut outer, &mut weights, [[2.0, -2.0], [4.0, -1.0]]);
        assert_eq!(weights, [3.0, -1.5]);
    }

    /// As torch.optim.SGD(lr=0.5, momentum=0.5, nesterov=True) with the gradients 1 and 1.
    #[test]
    fn nesterov_takes_the_change_as_its_gradient() {
        let nesterov = Nesterov { learning_rate: 0.5, momentum: 0.5 };
        let (mut outer, mut weights) = (outer(OuterOptimizer::Nesterov(nesterov)), [8.0, 0.0]);
        average(&mut outer, &mut weights, [[7.5, 0.0], [6.5, 0.0]]);
        assert_eq!(weights, [7.25, 0.0]);
        average(&mut outer, &mut weights, [[6.25, 0.0], [6.25, 0.0]]);
        assert_eq!(weights, [6.375, 0.0]);
    }
}
