//! The optimizer, with all its rules.

use super::kernels::{AdamStep, SgdStep, adam, lamb_moments, lamb_step, momentum_step, sgd_step};
use super::norm::squares_with;
use super::state::{Bucket, GradientSlice, Norms, OptimizerState, Ownership};
use super::steps::Steps;
use crate::amp::HalfWeights;
use crate::cpu::{Isa, Pool};
use crate::nn::Layout;
use std::ops::Range;
use switchyard_worker_contract::config::{self, Lars, Momentum, Rule};

/// An optimizer rule with the state of this rank's parts of the flat layout.
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

/// Whether a rule needs the norms of each parameter.
pub(crate) fn is_layer_wise(rule: &Rule) -> bool {
    matches!(rule, Rule::Lamb(_) | Rule::Lars(_))
}

impl Optimizer {
    /// Zeroed state for the parameters of `layout`. The kernels of every `isa` are bit-identical.
    pub fn new(layout: &Layout, config: &config::Optimizer, isa: Isa) -> Optimizer {
        Optimizer::sharded(layout, config, isa, &Ownership::whole(layout.len))
    }

    /// As [`Optimizer::new`], with the state of this rank's own parts only.
    pub fn sharded(layout: &Layout, config: &config::Optimizer, isa: Isa, ownership: &Ownership) -> Optimizer {
        let layer_wise = is_layer_wise(&config.rule);
        let needs = (arrays(&config.rule).len(), layer_wise);
        let state = OptimizerState::new(layout, config.decay_exclusions, needs, ownership);
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
        assert_eq!(gradients.len(), range.len(), "length of the gradients");
        let gradients = GradientSlice { from: range.start, values: gradients };
        self.measure(range.clone(), weights, gradients, pool);
        self.update(range, weights, gradients, half, pool);
    }

    /// First part of [`Optimizer::apply`]: sums of squares for the layer-wise rules, which other
    /// ranks' [`Optimizer::sums`] complete; nothing for the others. `gradients`: at least those of
    /// this rank's own weights in the range.
    ///
    /// # Panics
    /// See [`Optimizer::apply`].
    pub fn measure(&mut self, range: Range<usize>, weights: &mut [f32], gradients: GradientSlice<'_>, pool: &Pool) {
        let mut bucket = Bucket { range, weights, gradients };
        match self.rule {
            Rule::Sgd(_) | Rule::Adam(_) | Rule::AdamW(_) => {}
            Rule::Lamb(numbers) => self.lamb_moments(numbers, &mut bucket, pool),
            Rule::Lars(_) => self.lars_norms(&mut bucket, pool),
        }
    }

    /// Second part of [`Optimizer::apply`]: updates this rank's own weights in the range.
    /// `gradients`: see [`Optimizer::measure`].
    ///
    /// # Panics
    /// See [`Optimizer::apply`].
    pub fn update(
        &mut self,
        range: Range<usize>,
        weights: &mut [f32],
        gradients: GradientSlice<'_>,
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

    /// Sums of squares of the layer-wise rules, in the same order on all ranks, and whether this
    /// rank computes them; the others must be set between `measure` and `update`.
    pub fn sums(&mut self) -> impl Iterator<Item = (bool, &mut [f64; 2])> {
        self.state.sums()
    }

    /// Most values of [`Optimizer::sums`] for a layout with this many values, parameters and cuts.
    pub(crate) fn most_sums(rule: &Rule, len: usize, parameters: usize, cuts: usize) -> usize {
        if is_layer_wise(rule) { OptimizerState::most_pieces(len, parameters, cuts) } else { 0 }
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

    /// Numbers for parameters without and with weight decay.
    fn lamb_numbers(&self, n: config::Adam) -> (AdamStep, AdamStep) {
        let kept = AdamStep { step_size: (1.0 / (1.0 - self.steps.powers().0)) as f32, ..self.moments(n) };
        (kept, AdamStep { decay: self.weight_decay as f32, ..kept })
    }

    fn lamb_moments(&mut self, n: config::Adam, bucket: &mut Bucket<'_>, pool: &Pool) {
        let (isa, (kept, decayed)) = (self.isa, self.lamb_numbers(n));
        self.state.pass(bucket, None, isa, pool, &|piece, part, squares| {
            let [m, v] = part.state;
            let numbers = if piece.decays { decayed } else { kept };
            lamb_moments(isa, part.weights, part.gradients, m, v, numbers, squares);
        });
    }

    fn lamb(&mut self, n: config::Adam, bucket: &mut Bucket<'_>, half: Option<HalfWeights<'_>>, pool: &Pool) {
        let (isa, (kept, decayed)) = (self.isa, self.lamb_numbers(n));
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

    fn lars_norms(&mut self, bucket: &mut Bucket<'_>, pool: &Pool) {
        let isa = self.isa;
        self.state.pass(bucket, None, isa, pool, &|_, part, squares| {
            *squares = [squares_with(isa, part.weights), squares_with(isa, part.gradients)];
        });
    }

    fn lars(&mut self, n: Lars, bucket: &mut Bucket<'_>, half: Option<HalfWeights<'_>>, pool: &Pool) {
        let (isa, weight_decay) = (self.isa, self.weight_decay);
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

    /// The named state arrays; none for a stateless rule. They hold this rank's own parts, one
    /// after the other.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        arrays(&self.rule).iter().copied().zip(self.state.arrays.iter().map(|array| &**array))
    }

    /// Copies values of a state array from index `from` of the flat layout on. Those of other ranks
    /// become 0.
    pub fn read(&self, array: usize, from: usize, into: &mut [f32]) {
        self.state.read(array, from, into);
    }

    /// Writes values of a state array from index `from` of the flat layout on, except those of
    /// other ranks. Follow with [`Optimizer::restore`].
    pub fn write(&mut self, array: usize, from: usize, numbers: &[f32]) {
        self.state.write(array, from, numbers);
    }

    /// Completed steps.
    pub fn steps(&self) -> u64 {
        self.steps.done()
    }

    /// Restores the step count. Together with the arrays this is the whole state.
    pub fn restore(&mut self, steps: u64) {
        self.steps = self.steps.restored(steps);
    }

    /// Memory of a rule's state for `len` weights, in bytes.
    pub fn memory_bytes(len: usize, rule: &Rule) -> usize {
        size_of::<f32>() * len * arrays(rule).len()
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
