//! Everything that training changes, and how it is written to and read from checkpoints.

use super::TrainError;
use super::blueprint::Blueprint;
use crate::amp::{HalfWeights, LossScaler, ScalerState, WireScale};
use crate::cpu::{AlignedBuffer, HalfKernel, Values, bf16, f16};
use crate::data::Facts;
use crate::model::initialise;
use crate::nn::{Layout, Weights};
use crate::optimizer::Optimizer;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use switchyard_checkpoint::{Role, TensorSpec};
use switchyard_worker_contract::config::{HalfType, LossScaling, Precision, Rule, WireType};

/// Weight of a batch's statistics in the running ones; PyTorch's default.
const MOMENTUM: f32 = 0.1;

/// Working copies of the weights.
enum Half {
    None,
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

/// The training state of a rank; the same bits on every rank.
pub(super) struct TrainingState {
    /// Optimizer steps done, including skipped ones.
    pub step: u64,
    pub weights: AlignedBuffer,
    half: Half,
    /// Running statistics of batch norms.
    pub statistics: Vec<f32>,
    pub optimizer: Optimizer,
    pub scaler: Option<LossScaler>,
    /// If gradients travel in f16.
    pub wire: Option<WireScale>,
}

/// What tells one data set from another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Fingerprint {
    /// A sample in words, such as `128 tokens`.
    pub sample: String,
    pub train_samples: u64,
    pub validation_samples: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Digest of both parts.
    pub digest: String,
}

/// A field of a [`Fingerprint`] that is not as expected.
pub(super) struct Difference {
    pub field: &'static str,
    pub got: String,
    pub expected: String,
}

impl Fingerprint {
    pub fn of(facts: &Facts) -> Fingerprint {
        let Facts { train_samples, validation_samples, bytes, .. } = *facts;
        let (sample, digest) = (facts.sample.clone(), facts.digest.clone());
        Fingerprint { sample, train_samples, validation_samples, bytes, digest }
    }

    /// The first field that differs from the expected data.
    pub fn difference(&self, expected: &Fingerprint) -> Option<Difference> {
        let number = |number: u64| number.to_string();
        let fields = [
            ("sample", self.sample.clone(), expected.sample.clone()),
            ("training samples", number(self.train_samples), number(expected.train_samples)),
            ("validation samples", number(self.validation_samples), number(expected.validation_samples)),
            ("bytes", number(self.bytes), number(expected.bytes)),
            ("digest", self.digest.clone(), expected.digest.clone()),
        ];
        let differs = fields.into_iter().find(|(_, got, expected)| got != expected);
        differs.map(|(field, got, expected)| Difference { field, got, expected })
    }
}

/// What a checkpoint holds besides tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Progress {
    pub step: u64,
    /// Optimizer steps, without skipped ones.
    pub optimizer_steps: u64,
    pub scaler: Option<ScalerState>,
    /// What the scale started from; absent in checkpoints of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaling: Option<LossScaling>,
    /// Norm that the scale of gradients in f16 follows from; absent if they travel in another format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire_norm: Option<f32>,
    /// Samples of a step on all ranks.
    pub samples_per_step: u64,
    /// Position of the reader: epoch, and samples of it that are done.
    pub epoch: u64,
    pub position: u64,
    pub seed: u64,
    /// The optimizer's rule: arrays of the same name mean different things under different rules.
    pub rule: Rule,
    /// The kernel for products of bf16, which others add in another order; absent if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half_kernel: Option<HalfKernel>,
    /// The data set; absent in checkpoints of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Fingerprint>,
}

impl TrainingState {
    /// The state before the first step.
    pub fn new(blueprint: &Blueprint) -> TrainingState {
        let layout = blueprint.network.layout();
        let mut weights = AlignedBuffer::zeroed(layout.len);
        initialise(layout, blueprint.config.seed, &mut weights);
        let half = match blueprint.half_type() {
            None => Half::None,
            Some(HalfType::Bf16) => Half::Bf16(vec![bf16::ZERO; layout.len]),
            Some(HalfType::Fp16) => Half::F16(vec![f16::ZERO; layout.len]),
        };
        let scaler = match blueprint.config.precision {
            Precision::Fp32 => None,
            Precision::Amp(amp) => Some(LossScaler::new(amp.loss_scaling)),
        };
        let mut state = TrainingState {
            step: 0,
            weights,
            half,
            statistics: blueprint.network.initial_statistics(),
            optimizer: Optimizer::new(layout, &blueprint.config.optimizer, blueprint.cpu.isa),
            scaler,
            wire: (blueprint.config.overlap.wire_type == WireType::Fp16).then(|| WireScale::new(None)),
        };
        state.round(blueprint);
        state
    }

    /// Refreshes the working copies from the weights.
    pub fn round(&mut self, blueprint: &Blueprint) {
        let half = half_weights(&mut self.half);
        if let Some(half) = half {
            half.copy_from(&self.weights, blueprint.cpu.isa, &blueprint.cpu.pool);
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

    pub fn loss_scale(&self) -> f32 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Runs the optimizer on one bucket.
    pub fn apply(&mut self, range: Range<usize>, gradients: &[f32], blueprint: &Blueprint) {
        let half = half_weights(&mut self.half);
        self.optimizer.apply(range, &mut self.weights, gradients, half, &blueprint.cpu.pool);
    }

    /// Moves the running statistics towards those of the step.
    pub fn observe(&mut self, statistics: &[f32]) {
        for (running, batch) in self.statistics.iter_mut().zip(statistics) {
            *running = (1.0 - MOMENTUM) * *running + MOMENTUM * batch;
        }
    }

    /// What a checkpoint holds besides tensors.
    pub fn progress(&self, blueprint: &Blueprint) -> Progress {
        let (epoch, position) = blueprint.order.position(self.step);
        Progress {
            step: self.step,
            optimizer_steps: self.optimizer.steps(),
            scaler: self.scaler.as_ref().map(LossScaler::state),
            loss_scaling: self.scaler.as_ref().map(LossScaler::config),
            wire_norm: self.wire.as_ref().and_then(WireScale::norm),
            samples_per_step: blueprint.order.samples_per_step(),
            epoch,
            position,
            seed: blueprint.config.seed,
            rule: blueprint.config.optimizer.rule,
            half_kernel: blueprint.half_kernel(),
            data: Some(Fingerprint::of(blueprint.dataset.facts())),
        }
    }

    /// Applies what a checkpoint holds besides tensors; called after the tensors are restored. Returns what the
    /// configuration has changed since, for the log.
    ///
    /// # Errors
    /// It does not match the configuration.
    pub fn resume(&mut self, progress: &Progress, blueprint: &Blueprint) -> Result<Option<String>, TrainError> {
        self.step = progress.step;
        self.optimizer.restore(progress.optimizer_steps);
        self.wire = self.wire.take().map(|_| WireScale::new(progress.wire_norm));
        let mut changed = None;
        if let (Precision::Amp(amp), Some(state)) = (blueprint.config.precision, progress.scaler) {
            let scaler = LossScaler::restore(amp.loss_scaling, state, progress.loss_scaling);
            let scaler = scaler.map_err(|error| TrainError::Resume(error.to_string()))?;
            let (scale, saved) = (scaler.scale(), state.scale);
            changed = (scale != saved).then(|| {
                format!("spec.engine.precision.lossScaling: the loss scale is {scale}; the checkpoint has {saved}")
            });
            self.scaler = Some(scaler);
        }
        self.round(blueprint);
        Ok(changed)
    }

    /// The tensors of a checkpoint, in the order of [`TrainingState::tensor`].
    pub fn tensors(&self, blueprint: &Blueprint) -> Vec<TensorSpec> {
        let layout = blueprint.network.layout();
        let of_weights = |name: String, role, export: bool| {
            layout.parameters.iter().map(move |parameter| TensorSpec {
                name: format!("{name}{}", parameter.name),
                shape: parameter.shape.clone(),
                role,
                export_axes: parameter.export_axes.clone().filter(|_| export),
            })
        };
        let mut tensors: Vec<TensorSpec> = of_weights(String::new(), Role::Weight, true).collect();
        for (array, _) in self.optimizer.state() {
            tensors.extend(of_weights(prefix(array), Role::Optimizer, false));
        }
        tensors.extend(blueprint.network.statistics().map(|(name, len)| TensorSpec {
            name: name.to_owned(),
            shape: vec![len],
            role: Role::Statistic,
            export_axes: None,
        }));
        tensors
    }

    /// The numbers of a tensor, by name. `places`: where parameters and statistics are.
    pub fn tensor(&self, places: &Names, name: &str) -> Option<&[f32]> {
        let (array, range) = places.find(name)?;
        Some(match array {
            Array::Weights => &self.weights[range],
            Array::Statistics => &self.statistics[range],
            Array::Optimizer(index) => &self.optimizer.state().nth(index)?.1[range],
        })
    }

    /// The same for writing.
    pub fn tensor_mut(&mut self, places: &Names, name: &str) -> Option<&mut [f32]> {
        let (array, range) = places.find(name)?;
        Some(match array {
            Array::Weights => &mut self.weights[range],
            Array::Statistics => &mut self.statistics[range],
            Array::Optimizer(index) => &mut self.optimizer.state_mut().nth(index)?.1[range],
        })
    }
}

fn half_weights(half: &mut Half) -> Option<HalfWeights<'_>> {
    match half {
        Half::None => None,
        Half::Bf16(half) => Some(HalfWeights::Bf16(half)),
        Half::F16(half) => Some(HalfWeights::F16(half)),
    }
}

/// Prefix of a parameter's name for an array of the optimizer.
fn prefix(array: &str) -> String {
    format!("optimizer.{array}.")
}

#[derive(Debug, Clone, Copy)]
enum Array {
    Weights,
    Statistics,
    /// By index.
    Optimizer(usize),
}

/// Where each tensor of a checkpoint lies.
pub(super) struct Names {
    places: std::collections::HashMap<String, (Array, Range<usize>)>,
}

impl Names {
    pub fn new(state: &TrainingState, blueprint: &Blueprint) -> Names {
        let layout: &Layout = blueprint.network.layout();
        let mut places = std::collections::HashMap::new();
        let arrays: Vec<&str> = state.optimizer.state().map(|(name, _)| name).collect();
        for parameter in &layout.parameters {
            places.insert(parameter.name.clone(), (Array::Weights, parameter.range()));
            for (index, array) in arrays.iter().enumerate() {
                places.insert(prefix(array) + &parameter.name, (Array::Optimizer(index), parameter.range()));
            }
        }
        let mut at = 0;
        for (name, len) in blueprint.network.statistics() {
            places.insert(name.to_owned(), (Array::Statistics, at..at + len));
            at += len;
        }
        Names { places }
    }

    fn find(&self, name: &str) -> Option<(Array, Range<usize>)> {
        self.places.get(name).cloned()
    }
}
