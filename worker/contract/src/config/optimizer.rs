//! Optimizer, learning-rate schedule and precision.

use serde::{Deserialize, Serialize};

/// Optimizer settings of a job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Optimizer {
    /// Update rule.
    pub rule: Rule,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Weight decay; its meaning depends on the [`Rule`]. Never applied to biases, norms and the
    /// parameters in `decay_exclusions`.
    pub weight_decay: f64,
    /// Global gradient norm above which gradients are scaled down. `None`: no clipping.
    pub gradient_clip_norm: Option<f64>,
    /// Parameters exempt from weight decay.
    pub decay_exclusions: DecayExclusions,
}

/// Parameters exempt from weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DecayExclusions {
    /// Biases and norms.
    Vectors,
    /// Biases, norms and embeddings.
    VectorsAndEmbeddings,
    /// No exemptions: all parameters decay.
    Nothing,
}

/// Update rule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Rule {
    /// SGD with momentum; weight decay is added to the gradient, as in PyTorch.
    Sgd(Momentum),
    /// Adam (Kingma and Ba 2015); weight decay is added to the gradient.
    Adam(Adam),
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
    AdamW(Adam),
    /// Layer-wise adaptive Adam for large batches (You et al. 2020, algorithm 2).
    Lamb(Adam),
    /// Layer-wise adaptive SGD for large batches (You, Gitman and Ginsburg 2017).
    Lars(Lars),
}

/// Settings of SGD.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Momentum {
    /// Decay of the momentum buffer, below 1; 0: no momentum.
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
    /// Added to the square root of the second moment.
    pub epsilon: f64,
}

/// Settings of LARS.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Lars {
    /// Decay of the momentum buffer, below 1.
    pub momentum: f64,
    /// Largest update of a layer relative to the norm of its weights, for example 0.001.
    pub trust_coefficient: f64,
}

/// Learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Steps of linear warm-up from 0 to the peak. `None`: a tenth of all steps, at most 100.
    pub warmup_steps: Option<u64>,
    /// Final learning rate of `Cosine` and `Linear`; lower bound of `Step`.
    pub final_learning_rate: f64,
}

/// Shape of the schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum ScheduleKind {
    /// Stays at the peak.
    Constant,
    /// Half a cosine from the peak to the final learning rate at the last step.
    Cosine,
    /// Linear decay from the peak to the final learning rate at the last step.
    Linear,
    /// Multiplied by `factor` every `every` steps.
    #[serde(rename_all = "camelCase")]
    Step {
        /// Steps between changes.
        every: u64,
        /// Above 0 and below 1.
        factor: f64,
    },
}

/// Numeric formats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Precision {
    /// f32 everywhere.
    Fp32,
    /// 16-bit activations and matrix products; f32 weights and weight gradients.
    Amp(Amp),
}

/// Automatic mixed precision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Amp {
    /// Format of activations and matrix products.
    pub compute_type: HalfType,
    /// How the loss is scaled to keep small gradients from underflowing.
    pub loss_scaling: LossScaling,
}

/// A 16-bit float format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HalfType {
    /// 8-bit exponent, 7-bit fraction.
    Bf16,
    /// 5-bit exponent, 10-bit fraction.
    Fp16,
}

/// Loss scaling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum LossScaling {
    /// A constant factor; 1: no scaling. Steps whose gradients overflow are skipped.
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
        /// Steps without overflow before the scale grows.
        growth_interval_steps: u64,
    },
}
