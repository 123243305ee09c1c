//! The update of a GPU step as data: mean loss, gradient norm, loss scale, clipping, optimizer.
//!
//! ```text
//! micro-batches ─> losses ─> mean_loss ──┐
//!               └> gradients ─> sum_of_squares ─> scaler ─> Scaling: factor, skip?
//!                     └> optimizer_step ─> weights, 16-bit copies
//! ```
//!
//! The rules are those of [`crate::optimizer`] and [`crate::amp`]. The device decides whether to
//! skip a step and computes the next loss scale; the host reads the outcome from
//! [`gradients::Scaler`].

use super::contents::{Contents, Initial};
use super::launch::{Memory, Span};
use super::refused::Refused;
use super::target::Target;
use crate::amp::{LossScaler, ScalerState};
use crate::nn::Layout;
use crate::nn::layers::Loss;
use crate::optimizer::{Steps, arrays, decays};
use bytemuck::bytes_of;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::gradients::{self, On, Rules, Scaler};
use switchyard_cuda::kernels::optimizer::{Arrays, Chunk, Numbers, Optimizer, Rule, Scaling, Tables};
use switchyard_cuda::kernels::{self, Call, Element};
use switchyard_worker_contract::config::{self, HalfType, LossScaling, Precision};

/// Elements per optimizer block: enough to amortise its table, few enough to keep a device busy
/// with small networks.
const CHUNK: usize = 8192;

/// Lowers the parameter update of a layout.
pub struct Update {
    target: Target,
    config: config::Optimizer,
    kernels: Optimizer,
    chunks: Vec<Chunk>,
    parameters: usize,
    /// Length of the flat arrays.
    len: u32,
    loss_scaling: LossScaling,
}

impl Update {
    /// # Errors
    /// The parameters exceed the kernels' 32-bit counts.
    pub fn new(
        layout: &Layout,
        config: &config::Optimizer,
        precision: Precision,
        target: Target,
    ) -> Result<Update, Refused> {
        let len = u32::try_from(layout.len).map_err(|_| Refused::Parameters { parameters: layout.len })?;
        let mut chunks = Vec::new();
        for (ordinal, parameter) in layout.parameters.iter().enumerate() {
            let decays = decays(parameter.role, config.decay_exclusions);
            for begin in parameter.range().step_by(CHUNK) {
                let count = CHUNK.min(parameter.range().end - begin);
                let chunk = Chunk::new(begin as u32, count as u32, decays, ordinal as u32);
                chunks.push(chunk.map_err(Refused::Update)?);
            }
        }
        let rule = match config.rule {
            config::Rule::Sgd(_) => Rule::Sgd,
            config::Rule::Adam(_) | config::Rule::AdamW(_) => Rule::Adam,
            config::Rule::Lamb(_) => Rule::Lamb,
            config::Rule::Lars(_) => Rule::Lars,
        };
        let (copy, loss_scaling) = match precision {
            Precision::Fp32 => (Element::F32, LossScaling::Static { scale: 1.0 }),
            Precision::Amp(amp) => match amp.compute_type {
                HalfType::Bf16 => (Element::Bf16, amp.loss_scaling),
                HalfType::Fp16 => (Element::F16, amp.loss_scaling),
            },
        };
        Ok(Update {
            target,
            config: *config,
            kernels: Optimizer { rule, copy },
            chunks,
            parameters: layout.parameters.len(),
            len,
            loss_scaling,
        })
    }

    /// Names of the [`Memory::Moments`] arrays, by index.
    pub fn moments(&self) -> &'static [&'static str] {
        arrays(&self.config.rule)
    }

    fn is_layer_wise(&self) -> bool {
        matches!(self.kernels.rule, Rule::Lamb | Rule::Lars)
    }

    fn has_copy(&self) -> bool {
        self.kernels.copy != Element::F32
    }

    /// The memories that the launches use besides [`Memory::Losses`] and [`Memory::Shares`].
    pub fn memory(&self) -> Vec<Contents> {
        let mut all = vec![Memory::Weights, Memory::Gradients, Memory::Loss, Memory::Squares, Memory::Rules];
        all.extend([Memory::Scaler, Memory::Scaling, Memory::Chunks, Memory::Candidates, Memory::Numbers]);
        all.extend((0..self.moments().len()).map(Memory::Moments));
        all.extend(self.has_copy().then_some(Memory::Half));
        all.extend([Memory::Norms, Memory::Ratios].into_iter().filter(|_| self.is_layer_wise()));
        let contents = |memory| Contents { memory, bytes: self.bytes(memory), initial: self.initial(memory) };
        all.into_iter().map(contents).collect()
    }

    fn bytes(&self, memory: Memory) -> usize {
        let len = self.len as usize;
        match memory {
            Memory::Weights | Memory::Gradients | Memory::Moments(_) => 4 * len,
            Memory::Half => self.kernels.copy.bytes() * len,
            Memory::Loss => 4,
            Memory::Squares => gradients::partial_bytes(self.len),
            Memory::Rules => size_of::<Rules>(),
            Memory::Scaler => size_of::<Scaler>(),
            Memory::Scaling => size_of::<Scaling>(),
            Memory::Chunks => size_of_val(&self.chunks[..]),
            Memory::Candidates => 2 * size_of::<Numbers>(),
            Memory::Numbers => size_of::<Numbers>(),
            Memory::Norms => 16 * self.chunks.len(),
            Memory::Ratios => 8 * self.parameters,
            _ => 0,
        }
    }

    fn initial(&self, memory: Memory) -> Initial {
        match memory {
            Memory::Rules => Initial::Bytes(bytes_of(&self.rules()).to_vec()),
            Memory::Scaler => {
                Initial::Bytes(bytes_of(&Update::scaler(&LossScaler::new(self.loss_scaling).state())).to_vec())
            }
            Memory::Chunks => Initial::Bytes(bytemuck::cast_slice(&self.chunks).to_vec()),
            // The gaps between parameters stay zero, because the device sums over them.
            Memory::Weights | Memory::Gradients | Memory::Moments(_) | Memory::Half => Initial::Zeros,
            _ => Initial::Unwritten,
        }
    }

    fn rules(&self) -> Rules {
        let most = self.config.gradient_clip_norm.unwrap_or(f64::INFINITY);
        match self.loss_scaling {
            LossScaling::Static { .. } => {
                Rules { most, growth: 1.0, backoff: 1.0, growth_interval: 0, is_dynamic: 0, unused: 0 }
            }
            LossScaling::Dynamic { growth_factor, backoff_factor, growth_interval_steps, .. } => Rules {
                most,
                growth: growth_factor as f32,
                backoff: backoff_factor as f32,
                growth_interval: growth_interval_steps,
                is_dynamic: 1,
                unused: 0,
            },
        }
    }

    /// The device representation of a loss-scale state.
    pub fn scaler(state: &ScalerState) -> Scaler {
        let ScalerState { scale, good_steps, skipped_steps, skipped_in_a_row } = *state;
        Scaler { norm: 0.0, good_steps, skipped_steps, skipped_in_a_row, scale, unused: 0 }
    }

    /// The optimizer parameters of a step. `steps` includes this step.
    pub fn numbers(&self, learning_rate: f64, steps: &Steps) -> Numbers {
        let (rate, decay) = (learning_rate, self.config.weight_decay);
        let (beta1, beta2) = steps.powers();
        let adam = |n: config::Adam| Numbers {
            learning_rate: rate,
            beta1: n.beta1 as f32,
            one_minus_beta1: (1.0 - n.beta1) as f32,
            beta2: n.beta2 as f32,
            one_minus_beta2: (1.0 - n.beta2) as f32,
            step_size: (rate / (1.0 - beta1)) as f32,
            root: (1.0 - beta2).sqrt() as f32,
            epsilon: n.epsilon as f32,
            keep: 1.0,
            decay: decay as f32,
            ..Numbers::default()
        };
        match self.config.rule {
            config::Rule::Sgd(n) => Numbers {
                momentum: n.momentum as f32,
                nesterov: n.nesterov.into(),
                decay: decay as f32,
                rate: rate as f32,
                ..Numbers::default()
            },
            config::Rule::Adam(n) => adam(n),
            config::Rule::AdamW(n) => Numbers { keep: (1.0 - rate * decay) as f32, decay: 0.0, ..adam(n) },
            config::Rule::Lamb(n) => Numbers { step_size: (1.0 / (1.0 - beta1)) as f32, ..adam(n) },
            config::Rule::Lars(n) => Numbers {
                learning_rate: rate,
                weight_decay: decay,
                trust: n.trust_coefficient,
                momentum: n.momentum as f32,
                rate: 1.0,
                ..Numbers::default()
            },
        }
    }

    /// Computes a micro-batch's share of [`Memory::Loss`]; `adds`: whether to add to earlier
    /// micro-batches.
    ///
    /// # Errors
    /// See [`Update::launches`].
    pub fn losses<M: kernels::Memory>(
        &self,
        losses: &[Loss],
        adds: bool,
        place: impl Fn(Span) -> M,
    ) -> Result<Vec<Call<M>>, Refused> {
        let mut row = 0;
        let mut call = |(index, loss): (usize, &Loss)| {
            let rows = Span { memory: Memory::Losses, at: 4 * row, bytes: 4 * loss.rows };
            row += loss.rows;
            let mean = place(Span { memory: Memory::Loss, at: 0, bytes: 4 });
            let share = place(Span { memory: Memory::Shares, at: 4 * index, bytes: 4 });
            gradients::mean_loss(loss.rows as u32, place(rows), share, mean, adds || index > 0)
        };
        losses.iter().enumerate().map(&mut call).collect::<Result<_, _>>().map_err(Refused::Update)
    }

    /// The launches after the last micro-batch, in order. `place` maps spans to device memory.
    ///
    /// # Errors
    /// The memory returned by `place` is too small.
    pub fn launches<M: kernels::Memory>(&self, place: impl Fn(Span) -> M) -> Result<Vec<Call<M>>, Refused> {
        self.calls(&place).map_err(Refused::Update)
    }

    fn calls<M: kernels::Memory>(&self, place: &dyn Fn(Span) -> M) -> Result<Vec<Call<M>>, switchyard_cuda::Error> {
        let whole = |memory: Memory| place(Span { memory, at: 0, bytes: self.bytes(memory) });
        let (partial, scaling) = (whole(Memory::Squares), whole(Memory::Scaling));
        let on = On {
            partial,
            loss: whole(Memory::Loss),
            rules: whole(Memory::Rules),
            state: whole(Memory::Scaler),
            scaling,
            candidates: whole(Memory::Candidates),
            numbers: whole(Memory::Numbers),
        };
        let moment = |index: usize| (index < self.moments().len()).then(|| whole(Memory::Moments(index)));
        let arrays = Arrays {
            weight: whole(Memory::Weights),
            first: moment(0),
            second: moment(1),
            gradient: whole(Memory::Gradients),
            copy: self.has_copy().then(|| whole(Memory::Half)),
        };
        let of_layers = |memory: Memory| self.is_layer_wise().then(|| whole(memory));
        let tables = Tables {
            chunks: whole(Memory::Chunks),
            numbers: whole(Memory::Numbers),
            scaling,
            squares: of_layers(Memory::Norms),
            ratios: of_layers(Memory::Ratios),
        };
        let mut calls =
            vec![gradients::sum_of_squares(self.len, arrays.gradient, partial)?, gradients::scaler(self.len, on)?];
        calls.extend(self.kernels.step(self.target.blocks, &self.chunks, arrays, tables)?);
        Ok(calls)
    }

    /// Rounds the weights to 16 bits after the host has written them; `None` in f32.
    ///
    /// # Errors
    /// See [`Update::launches`].
    pub fn round<M: kernels::Memory>(&self, place: impl Fn(Span) -> M) -> Result<Option<Call<M>>, Refused> {
        if !self.has_copy() {
            return Ok(None);
        }
        let [weights, copy] =
            [Memory::Weights, Memory::Half].map(|memory| place(Span { memory, at: 0, bytes: self.bytes(memory) }));
        let rounding = Elementwise { from: Element::F32, to: self.kernels.copy };
        let call = rounding.convert(self.target.blocks, self.len, weights, 1.0, copy, false);
        call.map(Some).map_err(Refused::Update)
    }
}
