//! The state that training changes.

use super::outer::Outer;
use crate::amp::HalfWeights;
use crate::cpu::{AlignedBuffer, Cpu, HalfKernel, Values, bf16, f16};
use crate::model::initialise;
use crate::nn::{Layout, Network, Weights};
use crate::optimizer::Optimizer;
use crate::train::TrainError;
use crate::train::engine::{Array, Counters, Moment};
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

/// Weights, statistics, moments and scales; identical on all ranks, except for what a
/// [`Moment`] says is a rank's own, and with local steps between two averages.
pub(super) struct State {
    pub weights: AlignedBuffer,
    half: Half,
    /// Running statistics of batch norms.
    pub statistics: Vec<f32>,
    pub optimizer: Optimizer,
    /// With local steps.
    pub outer: Option<Outer>,
    /// Gradients that this rank has not sent yet, with top-k.
    pub residual: Option<AlignedBuffer>,
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
            outer: config.sync.local().map(|local| Outer::new(local, layout.len)),
            residual: config.compression.map(|_| AlignedBuffer::zeroed(layout.len)),
            scales: Scales::new(config),
        };
        state.begin(cpu);
        state
    }

    /// Memory of the optimizer and of what ranks exchange instead of all gradients, in bytes.
    pub fn optimizer_bytes(config: &EngineConfig, layout: &Layout) -> u64 {
        let outer = config.sync.local().map_or(0, |local| Outer::memory_bytes(local, layout.len));
        let residual = config.compression.map_or(0, |_| 4 * layout.len as u64);
        Optimizer::memory_bytes(layout, &config.optimizer.rule) as u64 + outer + residual
    }

    /// Derives everything that follows from the weights after they were set.
    pub fn begin(&mut self, cpu: &Cpu) {
        if let Some(outer) = &mut self.outer {
            outer.begin(&self.weights);
        }
        self.round(cpu);
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

    /// The optimizer's arrays, in the order of [`Array::Moments`].
    pub fn moments(&self) -> impl Iterator<Item = (Moment, &[f32])> {
        let is_local = self.outer.is_some();
        let inner = self.optimizer.state().map(move |(name, numbers)| (Moment { name, per_rank: is_local }, numbers));
        let momentum = self.outer.as_ref().map(|outer| &outer.momentum[..]).filter(|momentum| !momentum.is_empty());
        let momentum = momentum.map(|numbers| (Moment { name: "outer", per_rank: false }, numbers));
        let residual = self.residual.as_deref().map(|numbers| (Moment { name: "residual", per_rank: true }, numbers));
        inner.chain(momentum).chain(residual)
    }

    pub fn array(&self, array: Array) -> &[f32] {
        match array {
            Array::Weights => &self.weights,
            Array::Statistics => &self.statistics,
            Array::Moments(index) => self.moments().nth(index).map_or(&[], |(_, numbers)| numbers),
        }
    }

    pub fn array_mut(&mut self, array: Array) -> &mut [f32] {
        match array {
            Array::Weights => &mut self.weights,
            Array::Statistics => &mut self.statistics,
            Array::Moments(index) => {
                let inner = self.optimizer.state_mut().map(|(_, numbers)| numbers);
                let momentum = self.outer.as_mut().map(|outer| &mut outer.momentum[..]);
                let momentum = momentum.filter(|momentum| !momentum.is_empty());
                inner.chain(momentum).chain(self.residual.as_deref_mut()).nth(index).unwrap_or(&mut [])
            }
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
