//! Gradients in one flat array, for single-rank tests and benchmarks.
#![allow(dead_code)]

use std::ops::Range;
use switchyard_worker::nn::{GradientSink, Layout};

/// Gradients whose ranges are looked up once, as in the step loop.
pub struct FlatGradients {
    ranges: Vec<Range<usize>>,
    pub gradients: Vec<f32>,
    pub accumulate: bool,
}

impl FlatGradients {
    pub fn new(layout: &Layout) -> FlatGradients {
        let ranges = layout.parameters.iter().map(|parameter| parameter.range()).collect();
        FlatGradients { ranges, gradients: vec![0.0; layout.len], accumulate: false }
    }
}

impl GradientSink for FlatGradients {
    fn accumulate(&self) -> bool {
        self.accumulate
    }
    fn gradient(&mut self, ordinal: usize) -> &mut [f32] {
        &mut self.gradients[self.ranges[ordinal].clone()]
    }
    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]) {
        let ranges = [self.ranges[a].clone(), self.ranges[b].clone()];
        self.gradients.get_disjoint_mut(ranges).expect("invariant: parameters do not overlap").into()
    }
    fn finished(&mut self, _ordinal: usize) {}
}
