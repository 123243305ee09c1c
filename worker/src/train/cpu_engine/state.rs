//! The state that training changes.

use super::outer::Outer;
use crate::amp::HalfWeights;
use crate::comm::Packing;
use crate::cpu::{AlignedBuffer, Cpu, HalfKernel, Values, bf16, f16};
use crate::model::initialise;
use crate::nn::{Layout, Network, Weights};
use crate::optimizer::{GradientSlice, Optimizer, Ownership};
use crate::train::TrainError;
use crate::train::engine::{Array, Counters, Held, Moment};
use crate::train::exchange::{most_hosted, server_bytes};
use crate::train::scales::Scales;
use crate::train::statistics::update_running;
use crate::train::training::Training;
use std::ops::Range;
use switchyard_worker_contract::config::{EngineConfig, HalfType, Precision, Sharding};

/// 16-bit working copies of the weights.
pub(super) enum Half {
    None,
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

/// Weights, statistics, moments and scales; identical on all ranks, except for what a
/// [`Moment`] says is a rank's own, and with local steps between two averages.
pub(super) struct State {
    /// With sharding, those that other ranks update can be old where layers read `half`.
    pub weights: AlignedBuffer,
    pub half: Half,
    /// Running statistics of batch norms.
    pub statistics: Vec<f32>,
    pub optimizer: Optimizer,
    /// The optimizer's state is only this rank's part.
    is_sharded: bool,
    /// With local steps.
    pub outer: Option<Outer>,
    /// The weights after the last exchange, with geo updates.
    pub geo: Option<Outer>,
    /// Gradients that this rank has not sent yet, with top-k.
    pub residual: Option<AlignedBuffer>,
    pub scales: Scales,
}

impl State {
    /// The state before the first step.
    pub fn new(config: &EngineConfig, network: &Network, cpu: &Cpu, ownership: &Ownership) -> State {
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
            optimizer: Optimizer::sharded(layout, &config.optimizer, cpu.isa, ownership),
            is_sharded: config.sharding != Sharding::None
                || config.parameter_server.is_some_and(|servers| servers.has_state()),
            geo: config
                .parameter_server
                .and_then(|servers| servers.updates.geo())
                .map(|geo| Outer::new(geo, layout.len)),
            outer: config.sync.local().map(|local| Outer::new(local, layout.len)),
            residual: config.compression.map(|_| AlignedBuffer::zeroed(layout.len)),
            scales: Scales::new(config),
        };
        state.begin(cpu);
        state
    }

    /// Memory of the optimizer and of what ranks exchange instead of all gradients, in bytes.
    pub fn optimizer_bytes(training: &Training, layout: &Layout) -> u64 {
        let config = &training.config;
        let outer = config.sync.local().map_or(0, |local| Outer::memory_bytes(local, layout.len));
        let residual = config.compression.map_or(0, |_| 4 * layout.len as u64);
        if let Some(servers) = config.parameter_server {
            let hosted = server_bytes(training, servers, most_hosted(training, servers));
            let own = match servers.has_state() {
                true => 0,
                false => Optimizer::memory_bytes(layout.len, &config.optimizer.rule) as u64 + 4 * layout.len as u64,
            };
            // A rank has copies of the gradients that it pushes and the weights that it receives.
            return hosted + own + 8 * layout.len as u64;
        }
        let own = match config.sharding {
            Sharding::None => layout.len,
            Sharding::Optimizer | Sharding::Gradients => training.most_owned(),
        };
        Optimizer::memory_bytes(own, &config.optimizer.rule) as u64 + outer + residual
    }

    /// Derives everything that follows from the weights after they were set.
    pub fn begin(&mut self, cpu: &Cpu) {
        for outer in self.outer.iter_mut().chain(&mut self.geo) {
            outer.begin(&self.weights);
        }
        self.round(cpu);
    }

    /// Refreshes the working copies from the weights.
    pub fn round(&mut self, cpu: &Cpu) {
        self.round_range(0..self.weights.len(), cpu);
    }

    fn round_range(&mut self, range: Range<usize>, cpu: &Cpu) {
        let half = half_weights(&mut self.half);
        if let Some(half) = half {
            half.copy_from(range, &self.weights, cpu.isa, &cpu.pool);
        }
    }

    /// Takes over the weights of a range that other ranks updated.
    pub fn receive(&mut self, range: Range<usize>, weights: &[f32], cpu: &Cpu) {
        self.weights[range.clone()].copy_from_slice(weights);
        self.round_range(range, cpu);
    }

    /// Copies weights of a bucket to their packed form. `start`: of the bucket; `part`: in it.
    pub fn pack(&self, packing: &Packing, (start, part): (usize, Range<usize>), into: &mut [f32]) {
        let mut rest = into;
        for segment in packing.segments(part) {
            let (into, later) = rest.split_at_mut(segment.packed_len());
            let range = start + segment.elements.start..start + segment.elements.end;
            match &self.half {
                Half::Bf16(half) if segment.is_half => bytemuck::cast_slice_mut(into).copy_from_slice(&half[range]),
                Half::F16(half) if segment.is_half => bytemuck::cast_slice_mut(into).copy_from_slice(&half[range]),
                _ => into.copy_from_slice(&self.weights[range]),
            }
            rest = later;
        }
    }

    /// Takes over the weights of a bucket, which the ranks updated, from their packed form. Those
    /// that arrive in 16 bits do not change `weights`.
    pub fn unpack(&mut self, packing: &Packing, Range { start, end }: Range<usize>, from: &[f32], cpu: &Cpu) {
        let mut rest = from;
        for segment in packing.segments(0..end - start) {
            let (from, later) = rest.split_at(segment.packed_len());
            let range = start + segment.elements.start..start + segment.elements.end;
            match &mut self.half {
                Half::Bf16(half) if segment.is_half => half[range].copy_from_slice(bytemuck::cast_slice(from)),
                Half::F16(half) if segment.is_half => half[range].copy_from_slice(bytemuck::cast_slice(from)),
                _ => self.receive(range, from, cpu),
            }
            rest = later;
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
    pub fn apply(&mut self, range: Range<usize>, gradients: GradientSlice<'_>, cpu: &Cpu) {
        self.measure(range.clone(), gradients, cpu);
        self.update(range, gradients, cpu);
    }

    /// See [`Optimizer::measure`].
    pub fn measure(&mut self, range: Range<usize>, gradients: GradientSlice<'_>, cpu: &Cpu) {
        self.optimizer.measure(range, &mut self.weights, gradients, &cpu.pool);
    }

    /// See [`Optimizer::update`].
    pub fn update(&mut self, range: Range<usize>, gradients: GradientSlice<'_>, cpu: &Cpu) {
        let half = half_weights(&mut self.half);
        self.optimizer.update(range, &mut self.weights, gradients, half, &cpu.pool);
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
    pub fn moments(&self) -> impl Iterator<Item = Moment> {
        let held = match (self.outer.is_some() || self.geo.is_some(), self.is_sharded) {
            (true, _) => Held::ByEach,
            (false, true) => Held::InParts,
            (false, false) => Held::ByAll,
        };
        let inner = self.optimizer.state().map(move |(name, _)| Moment { name, held });
        let momentum = self.outer.as_ref().filter(|outer| !outer.momentum.is_empty());
        let momentum = momentum.map(|_| Moment { name: "outer", held: Held::ByAll });
        let residual = self.residual.as_ref().map(|_| Moment { name: "residual", held: Held::ByEach });
        inner.chain(momentum).chain(residual)
    }

    /// See [`super::Engine::read`].
    pub fn read(&self, array: Array, from: usize, into: &mut [f32]) {
        let numbers = match array {
            Array::Weights => &self.weights[..],
            Array::Statistics => &self.statistics[..],
            Array::Moments(index) => match index.checked_sub(self.optimizer.state().count()) {
                None => return self.optimizer.read(index, from, into),
                Some(other) => self.others().nth(other).unwrap_or(&[]),
            },
        };
        into.copy_from_slice(&numbers[from..][..into.len()]);
    }

    /// See [`super::Engine::write`].
    pub fn write(&mut self, array: Array, from: usize, numbers: &[f32]) {
        let into = match array {
            Array::Weights => &mut self.weights[..],
            Array::Statistics => &mut self.statistics[..],
            Array::Moments(index) => match index.checked_sub(self.optimizer.state().count()) {
                None => return self.optimizer.write(index, from, numbers),
                Some(other) => {
                    let momentum = self.outer.as_mut().map(|outer| &mut outer.momentum[..]);
                    let momentum = momentum.filter(|momentum| !momentum.is_empty());
                    momentum.into_iter().chain(self.residual.as_deref_mut()).nth(other).unwrap_or(&mut [])
                }
            },
        };
        into[from..][..numbers.len()].copy_from_slice(numbers);
    }

    /// The arrays that follow the optimizer's.
    fn others(&self) -> impl Iterator<Item = &[f32]> {
        let momentum = self.outer.as_ref().map(|outer| &outer.momentum[..]).filter(|momentum| !momentum.is_empty());
        momentum.into_iter().chain(self.residual.as_deref())
    }
}

pub(super) fn half_weights(half: &mut Half) -> Option<HalfWeights<'_>> {
    match half {
        Half::None => None,
        Half::Bf16(half) => Some(HalfWeights::Bf16(half)),
        Half::F16(half) => Some(HalfWeights::F16(half)),
    }
}
