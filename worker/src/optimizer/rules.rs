//! One type for all optimizer rules.

use super::kernels::{Descent, Moments, adam, descend, lamb_moments, lamb_step, roll};
use super::norm::squares_with;
use super::state::{Bucket, Norms, OptimizerState};
use super::steps::Steps;
use crate::amp::HalfWeights;
use crate::cpu::{Isa, Pool};
use crate::nn::Layout;
use std::ops::Range;
use switchyard_worker_contract::config::{self, Lars, Momentum, Rule};

/// A rule with its state in the flat layout.
///
/// - **Sgd**, **Adam**, **AdamW**: like `torch.optim` (SGD with `dampening=0`), in the same order of operations.
/// - **Lamb**: algorithm 2 of You and others 2020 (arXiv 1904.00962) with phi the identity, so that the trust ratio
///   ‖w‖ / ‖r + λw‖ is not clipped, and with the bias correction of the paper. Variants elsewhere: phi clipped to 0..=10
///   (the paper's own code for BERT), gradients divided by their global norm first (NVIDIA's LAMB, which is clipping here).
/// - **Lars**: You, Gitman and Ginsburg 2017 (arXiv 1708.03888), algorithm 1. The velocity includes the learning rate,
///   and the weight decay is part of the local rate η‖w‖ / (‖g‖ + β‖w‖).
///
/// In both layer-wise rules, parameters without weight decay have no ratio of their own, as in the authors' code and in
/// NVIDIA's apex: LAMB uses the ratio 1 for them, LARS the plain step of SGD with momentum. The same holds for layers
/// whose weights or steps are all 0, which would otherwise never move.
pub struct Optimizer {
    rule: Rule,
    weight_decay: f64,
    isa: Isa,
    state: OptimizerState,
    /// LAMB: trust ratio of each parameter; LARS: its local rate. Empty for the other rules.
    ratios: Vec<f64>,
    steps: Steps,
    learning_rate: f64,
    gradient_scale: f32,
}

/// Names of a rule's arrays.
pub(crate) fn arrays(rule: &Rule) -> &'static [&'static str] {
    match rule {
        Rule::Sgd(Momentum { momentum, .. }) | Rule::Lars(Lars { momentum, .. }) if *momentum == 0.0 => &[],
        Rule::Sgd(_) | Rule::Lars(_) => &["momentum"],
        Rule::Adam(_) | Rule::AdamW(_) | Rule::Lamb(_) => &["m", "v"],
    }
}

impl Optimizer {
    /// State of zeros for the parameters of `layout`. The kernels of every `isa` give the same bits.
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

    /// Starts a step, which [`Optimizer::apply`] carries out range by range, each range once. The weights move against
    /// `gradient_scale` times the gradients.
    pub fn begin_step(&mut self, learning_rate: f64, gradient_scale: f32) {
        (self.learning_rate, self.gradient_scale) = (learning_rate, gradient_scale);
        self.steps = self.steps.next();
    }

    /// The part of a step for one range of whole parameters. `weights` is the whole layout, `gradients` the range.
    /// `half`, a whole layout too, gets the new weights of the range, rounded.
    ///
    /// # Panics
    /// If lengths differ or the range cuts a parameter.
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
        let numbers = Descent {
            gradient_scale: self.gradient_scale,
            decay: 0.0,
            momentum: n.momentum as f32,
            nesterov: n.nesterov,
            rate: self.learning_rate as f32,
        };
        self.state.pass(bucket, half, isa, pool, &|piece, part, _| {
            let decay = if piece.decays { weight_decay as f32 } else { 0.0 };
            descent(isa, part, Descent { decay, ..numbers });
        });
    }

    fn moments(&self, n: config::Adam) -> Moments {
        Moments {
            gradient_scale: self.gradient_scale,
            beta1: n.beta1 as f32,
            one_minus_beta1: (1.0 - n.beta1) as f32,
            beta2: n.beta2 as f32,
            one_minus_beta2: (1.0 - n.beta2) as f32,
            decay: 0.0,
            keep: 1.0,
            step_size: (self.learning_rate / (1.0 - self.steps.powers().0)) as f32,
            root: (1.0 - self.steps.powers().1).sqrt() as f32,
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
            Moments { keep: (1.0 - self.learning_rate * self.weight_decay) as f32, ..kept }
        } else {
            Moments { decay: self.weight_decay as f32, ..kept }
        };
        self.state.pass(bucket, half, isa, pool, &|piece, part, _| {
            let [m, v] = part.state;
            adam(isa, part.weights, part.gradients, m, v, if piece.decays { decayed } else { kept });
        });
    }

    fn lamb(&mut self, n: config::Adam, bucket: &mut Bucket<'_>, half: Option<HalfWeights<'_>>, pool: &Pool) {
        let isa = self.isa;
        let kept = Moments { step_size: (1.0 / (1.0 - self.steps.powers().0)) as f32, ..self.moments(n) };
        let decayed = Moments { decay: self.weight_decay as f32, ..kept };
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
            let numbers = Descent {
                gradient_scale: (gradient_scale * rate) as f32,
                decay: if piece.decays { (weight_decay * rate) as f32 } else { 0.0 },
                momentum: n.momentum as f32,
                nesterov: false,
                rate: 1.0,
            };
            descent(isa, part, numbers);
        });
    }

    /// The arrays of the state with their names, in the flat layout; none for a rule without state.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        arrays(&self.rule).iter().copied().zip(self.state.arrays.iter().map(|array| &**array))
    }

    /// The same for restoring; followed by [`Optimizer::restore`].
    pub fn state_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut [f32])> {
        arrays(&self.rule).iter().copied().zip(self.state.arrays.iter_mut().map(|array| &mut **array))
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.steps.done()
    }

    /// Continues as after `steps` steps. With the arrays this is the whole state.
    pub fn restore(&mut self, steps: u64) {
        self.steps = self.steps.restored(steps);
    }

    /// Memory of a rule's state.
    pub fn memory_bytes(layout: &Layout, rule: &Rule) -> usize {
        size_of::<f32>() * layout.len * arrays(rule).len()
    }
}

/// A step of gradient descent, with momentum if the rule has memory for it.
fn descent(isa: Isa, part: super::state::Part<'_>, numbers: Descent) {
    let [momentum, _] = part.state;
    if momentum.is_empty() {
        descend(isa, part.weights, part.gradients, numbers);
    } else {
        roll(isa, part.weights, part.gradients, momentum, numbers);
    }
}
