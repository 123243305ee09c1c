//! The optimizer, with all its rules.

use super::kernels::{AdamStep, SgdStep, adam, lamb_moments, lamb_step, momentum_step, sgd_step};
use super::norm::squares_with;
use super::state::{Bucket, Norms, OptimizerState};
use super::steps::Steps;
use crate::amp::HalfWeights;
use crate::cpu::{Isa, Pool};
use crate::nn::Layout;
use std::ops::Range;
use switchyard_worker_contract::config::{self, Lars, Momentum, Rule};

/// An optimizer rule with its state in the flat layout.
///
/// - **Sgd**, **Adam**, **AdamW**: like `torch.optim` (SGD with `dampening=0`), with the same order
///   of operations.
/// - **Lamb**: algorithm 2 of You et al. 2020 (arXiv 1904.00962) with phi the identity, so the
///   trust ratio ‖w‖ / ‖r + λw‖ is not clipped, and with the paper's bias correction. Other
///   implementations clip phi to 0..=10 (the paper's own BERT code) or first divide the gradients
///   by their global norm (NVIDIA's LAMB; here this is gradient clipping).
/// - **Lars**: You, Gitman and Ginsburg 2017 (arXiv 1708.03888), algorithm 1. The velocity includes
///   the learning rate, and weight decay is part of the local rate η‖w‖ / (‖g‖ + β‖w‖).
///
/// In both layer-wise rules, parameters without weight decay have no ratio of their own, as in the
/// authors' code and in NVIDIA's apex: LAMB uses ratio 1 for them, LARS a plain SGD step with
/// momentum. The same applies to layers whose weights or updates are all 0, which would otherwise
/// never change.
pub struct Optimizer {
    rule: Rule,
    weight_decay: f64,
    isa: Isa,
    state: OptimizerState,
    /// LAMB: trust ratio per parameter; LARS: local rate per parameter. Empty for the other rules.
    ratios: Vec<f64>,
    steps: Steps,
    learning_rate: f64,
    gradient_scale: f32,
}

/// Names of a rule's state arrays.
pub(crate) fn arrays(rule: &Rule) -> &'static [&'static str] {
    match rule {
        Rule::Sgd(Momentum { momentum, .. }) | Rule::Lars(Lars { momentum, .. }) if *momentum == 0.0 => &[],
        Rule::Sgd(_) | Rule::Lars(_) => &["momentum"],
        Rule::Adam(_) | Rule::AdamW(_) | Rule::Lamb(_) => &["m", "v"],
    }
}

impl Optimizer {
    /// Zeroed state for the parameters of `layout`. The kernels of every `isa` are bit-identical.
    pub fn new(layout: &Layout, config: &config::Optimizer, isa: Isa) -> Optimizer {
        let layer_wise = matches!(config.rule, Rule::Lamb(_) | Rule::Lars(_));
        let state = OptimizerState::new(layout, config.decay_exclusions, arrays(&config.rule).len(), layer_wise);
        Optimizer {
            rule: config.rule,
            weight_decay: config.weight_decay,
            isa,
            state,
            ratios: vec![1.0; if layer_wise { layout.parameters.len() } else { 0 }],
            steps: Steps::new(&config.rule),
            learning_rate: 0.0,
            gradient_scale: 1.0,
        }
    }

    /// Starts a step, which [`Optimizer::apply`] performs range by range, each range once.
    /// Gradients are multiplied by `gradient_scale`.
    pub fn begin_step(&mut self, learning_rate: f64, gradient_scale: f32) {
        (self.learning_rate, self.gradient_scale) = (learning_rate, gradient_scale);
        self.steps = self.steps.next();
    }

    /// Performs the step for one range of whole parameters. `weights` is the whole layout,
    /// `gradients` the range. `half`, also a whole layout, receives the range's new weights,
    /// rounded.
    ///
    /// # Panics
    /// If lengths differ or the range splits a parameter.
    pub fn apply(
        &mut self,
        range: Range<usize>,
        weights: &mut [f32],
        gradients: &[f32],
        half: Option<HalfWeights<'_>>,
        pool: &Pool,
    ) {
        let mut bucket = Bucket { range, weights, gradients };
        match self.rule {
            Rule::Sgd(momentum) => self.sgd(momentum, &mut bucket, half, pool),
            Rule::Adam(numbers) => self.adam(numbers, false, &mut bucket, half, pool),
            Rule::AdamW(numbers) => self.adam(numbers, true, &mut bucket, half, pool),
            Rule::Lamb(numbers) => self.lamb(numbers, &mut bucket, half, pool),
            Rule::Lars(numbers) => self.lars(numbers, &mut bucket, half, pool),
        }
    }

    fn sgd(&mut self, n: Momentum, bucket: &mut Bucket<'_>, half: Option<HalfWeights<'_>>, pool: &Pool) {
        let (isa, weight_decay) = (self.isa, self.weight_decay);
        let numbers = SgdStep {
            gradient_scale: self.gradient_scale,
            decay: 0.0,
            momentum: n.momentum as f32,
            nesterov: n.nesterov,
            rate: self.learning_rate as f32,
        };
        self.state.pass(bucket, half, isa, pool, &|piece, part, _| {
            let decay = if piece.decays { weight_decay as f32 } else { 0.0 };
            sgd(isa, part, SgdStep { decay, ..numbers });
        });
    }

    fn moments(&self, n: config::Adam) -> AdamStep {
        AdamStep {
            gradient_scale: self.gradient_scale,
            beta1: n.beta1 as f32,
            one_minus_beta1: (1.0 - n.beta1) as f32,
            beta2: n.beta2 as f32,
            one_minus_beta2: (1.0 - n.beta2) as f32,
            decay: 0.0,
            decay_factor: 1.0,
            step_size: (self.learning_rate / (1.0 - self.steps.powers().0)) as f32,
            bias_correction2_sqrt: (1.0 - self.steps.powers().1).sqrt() as f32,
            epsilon: n.epsilon as f32,
        }
    }

    fn adam(
        &mut self,
        n: config::Adam,
        decoupled: bool,
        bucket: &mut Bucket<'_>,
        half: Option<HalfWeights<'_>>,
        pool: &Pool,
    ) {
        let (isa, kept) = (self.isa, self.moments(n));
        let decayed = if decoupled {
            AdamStep { decay_factor: (1.0 - self.learning_rate * self.weight_decay) as f32, ..kept }
        } else {
            AdamStep { decay: self.weight_decay as f32, ..kept }
        };
        self.state.pass(bucket, half, isa, pool, &|piece, part, _| {
            let [m, v] = part.state;
            adam(isa, part.weights, part.gradients, m, v, if piece.decays { decayed } else { kept });
        });
    }

    fn lamb(&mut self, n: config::Adam, bucket: &mut Bucket<'_>, half: Option<HalfWeights<'_>>, pool: &Pool) {
        let isa = self.isa;
        let kept = AdamStep { step_size: (1.0 / (1.0 - self.steps.powers().0)) as f32, ..self.moments(n) };
        let decayed = AdamStep { decay: self.weight_decay as f32, ..kept };
        self.state.pass(bucket, None, isa, pool, &|piece, part, squares| {
            let [m, v] = part.state;
            let numbers = if piece.decays { decayed } else { kept };
            lamb_moments(isa, part.weights, part.gradients, m, v, numbers, squares);
        });
        for Norms { parameter, decays, norms: [weights, direction] } in self.state.norms(&bucket.range) {
            let adapts = decays && weights > 0.0 && direction > 0.0;
            self.ratios[parameter] = if adapts { weights / direction } else { 1.0 };
        }
        let (learning_rate, ratios) = (self.learning_rate, &self.ratios);
        self.state.pass(bucket, half, isa, pool, &|piece, part, _| {
            let [m, v] = part.state;
            let numbers = if piece.decays { decayed } else { kept };
            lamb_step(isa, part.weights, m, v, numbers, (learning_rate * ratios[piece.parameter]) as f32);
        });
    }

    fn lars(&mut self, n: Lars, bucket: &mut Bucket<'_>, half: Option<HalfWeights<'_>>, pool: &Pool) {
        let (isa, weight_decay) = (self.isa, self.weight_decay);
        self.state.pass(bucket, None, isa, pool, &|_, part, squares| {
            *squares = [squares_with(isa, part.weights), squares_with(isa, part.gradients)];
        });
        let gradient_scale = f64::from(self.gradient_scale);
        for Norms { parameter, decays, norms: [weights, gradients] } in self.state.norms(&bucket.range) {
            let gradients = gradients * gradient_scale;
            let adapts = decays && weights > 0.0 && gradients > 0.0;
            let local = n.trust_coefficient * weights / (gradients + weight_decay * weights);
            self.ratios[parameter] = if adapts { local } else { 1.0 };
        }
        let (learning_rate, ratios) = (self.learning_rate, &self.ratios);
        self.state.pass(bucket, half, isa, pool, &|piece, part, _| {
            let rate = learning_rate * ratios[piece.parameter];
            let numbers = SgdStep {
                gradient_scale: (gradient_scale * rate) as f32,
                decay: if piece.decays { (weight_decay * rate) as f32 } else { 0.0 },
                momentum: n.momentum as f32,
                nesterov: false,
                rate: 1.0,
            };
            sgd(isa, part, numbers);
        });
    }

    /// The named state arrays, in the flat layout; none for a stateless rule.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        arrays(&self.rule).iter().copied().zip(self.state.arrays.iter().map(|array| &**array))
    }

    /// The state arrays for restoring; follow with [`Optimizer::restore`].
    pub fn state_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut [f32])> {
        arrays(&self.rule).iter().copied().zip(self.state.arrays.iter_mut().map(|array| &mut **array))
    }

    /// Completed steps.
    pub fn steps(&self) -> u64 {
        self.steps.done()
    }

    /// Restores the step count. Together with the arrays this is the whole state.
    pub fn restore(&mut self, steps: u64) {
        self.steps = self.steps.restored(steps);
    }

    /// Memory of a rule's state in bytes.
    pub fn memory_bytes(layout: &Layout, rule: &Rule) -> usize {
        size_of::<f32>() * layout.len * arrays(rule).len()
    }
}

/// An SGD step, with momentum if the rule has a momentum array.
fn sgd(isa: Isa, part: super::state::Part<'_>, numbers: SgdStep) {
    let [momentum, _] = part.state;
    if momentum.is_empty() {
        sgd_step(isa, part.weights, part.gradients, numbers);
    } else {
        momentum_step(isa, part.weights, part.gradients, momentum, numbers);
    }
}
