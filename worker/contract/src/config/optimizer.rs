//! Optimizer, learning rate, number formats.

use serde::{Deserialize, Serialize};

/// Optimizer settings of a job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Optimizer {
    /// How weights follow from gradients.
    pub rule: Rule,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Weight decay; its meaning depends on the [`Rule`]. Not applied to biases, norms and the parameters in
    /// `decay_exclusions`.
    pub weight_decay: f64,
    /// Largest global gradient norm; gradients above it are scaled down. `None`: no clipping.
    pub gradient_clip_norm: Option<f64>,
    /// Parameters without weight decay, in addition to biases and norms.
    pub decay_exclusions: DecayExclusions,
}

/// Which parameters have no weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DecayExclusions {
    /// Only biases and norms.
    Vectors,
    /// Biases, norms and embeddings.
    VectorsAndEmbeddings,
    /// None: all parameters decay.
    Nothing,
}

/// How weights follow from gradients.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Rule {
    /// Stochastic gradient descent with momentum; weight decay is added to the gradient (PyTorch's form).
    Sgd(Momentum),
    /// Adam (Kingma and Ba 2015); weight decay is added to the gradient.
    Adam(Adam),
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
    AdamW(Adam),
    /// Layer-wise adaptive Adam for large batches (You and others 2020, algorithm 2).
    Lamb(Adam),
    /// Layer-wise adaptive SGD for large batches (You, Gitman and Ginsburg 2017).
    Lars(Lars),
}

/// Settings of SGD.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Momentum {
    /// Decay of the sum of gradients, below 1; 0: no momentum.
    pub momentum: f64,
    /// Use Nesterov momentum.
    pub nesterov: bool,
}

/// Settings of the Adam family.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

/// Settings of LARS.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Lars {
    /// Decay of the sum of steps, below 1.
    pub momentum: f64,
    /// Largest step of a layer as a share of the norm of its weights, such as 0.001.
    pub trust_coefficient: f64,
}

/// Learning rate over the steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Steps of linear growth from 0 to the peak. `None`: a tenth of all steps, at most 100.
    pub warmup_steps: Option<u64>,
    /// Learning rate at the end of `Cosine` and `Linear`; the lowest that `Step` reaches.
    pub final_learning_rate: f64,
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum ScheduleKind {
    /// Stays at the peak.
    Constant,
    /// Half a cosine from the peak to the final learning rate at the last step.
    Cosine,
    /// A straight line from the peak to the final learning rate at the last step.
    Linear,
    /// Multiplied by `factor` after every `every` steps.
    #[serde(rename_all = "camelCase")]
    Step {
        /// Steps between two changes.
        every: u64,
        /// Factor of each change, above 0 and below 1.
        factor: f64,
    },
}

/// Number formats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Precision {
    /// 32-bit floats everywhere.
    Fp32,
    /// Activations and products in 16 bits, weights and their gradients in 32.
    Amp(Amp),
}

/// Automatic mixed precision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Amp {
    /// Format of activations and products.
    pub compute_type: HalfType,
    /// Factor of the loss that keeps small gradients from vanishing.
    pub loss_scaling: LossScaling,
}

/// A 16-bit number format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HalfType {
    /// 8 bits of exponent, 7 of fraction.
    Bf16,
    /// 5 bits of exponent, 10 of fraction.
    Fp16,
}

/// Loss scaling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum LossScaling {
    /// A constant factor; 1: no scaling. A step whose gradients overflow is skipped.
    #[serde(rename_all = "camelCase")]
    Static {
        /// The constant factor.
        scale: f64,
    },
    /// Reduced after an overflow, increased after many steps without one.
    #[serde(rename_all = "camelCase")]
    Dynamic {
        /// The first factor.
        initial_scale: f64,
        /// Factor of an increase, above 1.
        growth_factor: f64,
        /// Factor of a reduction, above 0 and below 1.
        backoff_factor: f64,
        /// Steps without overflow before the factor grows.
        growth_interval_steps: u64,
    },
}
