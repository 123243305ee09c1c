//! The state that training changes.

use crate::amp::HalfWeights;
use crate::cpu::{AlignedBuffer, Cpu, HalfKernel, Values, bf16, f16};
use crate::model::initialise;
use crate::nn::{Network, Weights};
use crate::optimizer::Optimizer;
use crate::train::TrainError;
use crate::train::engine::{Array, Counters};
use crate::train::scales::Scales;
use crate::train::statistics::update_running;
use std::ops::Range;
use switchyard_worker_contract::config::{EngineConfig, HalfType, Precision};

/// 16-bit working copies of the weights.
enum Half {
    None,
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

/// Weights, statistics, moments and scales; identical on all ranks.
pub(super) struct State {
    pub weights: AlignedBuffer,
    half: Half,
    /// Running statistics of batch norms.
    pub statistics: Vec<f32>,
    pub optimizer: Optimizer,
    pub scales: Scales,
}

impl State {
    /// The state before the first step.
    pub fn new(config: &EngineConfig, network: &Network, cpu: &Cpu) -> State {
        let layout = network.layout();
        let mut weights = AlignedBuffer::zeroed(layout.len);
        initialise(layout, config.seed, &mut weights);
        let half = match config.precision {
            Precision::Fp32 => Half::None,
            Precision::Amp(amp) => match amp.compute_type {
                HalfType::Bf16 => Half::Bf16(vec![bf16::ZERO; layout.len]),
                HalfType::Fp16 => Half::F16(vec![f16::ZERO; layout.len]),
            },
        };
        let mut state = State {
            weights,
            half,
            statistics: network.initial_statistics(),
            optimizer: Optimizer::new(layout, &config.optimizer, cpu.isa),
            scales: Scales::new(config),
        };
        state.round(cpu);
        state
    }

    /// Refreshes the working copies from the weights.
    pub fn round(&mut self, cpu: &Cpu) {
        let half = half_weights(&mut self.half);
        if let Some(half) = half {
            half.copy_from(&self.weights, cpu.isa, &cpu.pool);
        }
    }

    pub fn weights(&self) -> Weights<'_> {
        let half = match &self.half {
            Half::None => None,
            Half::Bf16(half) => Some(Values::Bf16(half)),
            Half::F16(half) => Some(Values::F16(half)),
        };
        Weights { master: &self.weights, half, statistics: &self.statistics }
    }

    /// Runs the optimizer on one bucket.
    pub fn apply(&mut self, range: Range<usize>, gradients: &[f32], cpu: &Cpu) {
        let half = half_weights(&mut self.half);
        self.optimizer.apply(range, &mut self.weights, gradients, half, &cpu.pool);
    }

    /// Updates the running statistics with those of the step.
    pub fn update_statistics(&mut self, statistics: &[f32]) {
        update_running(&mut self.statistics, statistics);
    }

    pub fn counters(&self, half_kernel: Option<HalfKernel>) -> Counters {
        Counters { optimizer_steps: self.optimizer.steps(), half_kernel, ..self.scales.counters() }
    }

    /// See [`super::Engine::resume`].
    pub fn resume(&mut self, counters: &Counters, precision: Precision) -> Result<Option<String>, TrainError> {
        self.optimizer.restore(counters.optimizer_steps);
        self.scales.resume(counters, precision)
    }

    pub fn array(&self, array: Array) -> &[f32] {
        match array {
            Array::Weights => &self.weights,
            Array::Statistics => &self.statistics,
            Array::Moments(index) => self.optimizer.state().nth(index).map_or(&[], |(_, numbers)| numbers),
        }
    }

    pub fn array_mut(&mut self, array: Array) -> &mut [f32] {
        match array {
            Array::Weights => &mut self.weights,
            Array::Statistics => &mut self.statistics,
            Array::Moments(index) => self.optimizer.state_mut().nth(index).map_or(&mut [], |(_, numbers)| numbers),
        }
    }
}

fn half_weights(half: &mut Half) -> Option<HalfWeights<'_>> {
    match half {
        Half::None => None,
        Half::Bf16(half) => Some(HalfWeights::Bf16(half)),
        Half::F16(half) => Some(HalfWeights::F16(half)),
    }
}
