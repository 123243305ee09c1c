//! Optimizer and learning rate schedule.

use super::{DECIMAL, Switch, disabled};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Kind of optimizer. Default: `SGD` with a ResNet, `AdamW` otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum OptimizerType {
    /// Stochastic gradient descent with momentum.
    SGD,
    /// Adam; weight decay is added to the gradient.
    Adam,
    /// Adam with decoupled weight decay.
    AdamW,
    /// Layer-wise adaptive Adam, for large batches.
    LAMB,
    /// Layer-wise adaptive SGD, for large batches.
    LARS,
}

/// Parameters without weight decay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DecayExclusions {
    /// Biases and normalisation parameters.
    #[default]
    BiasesAndNorms,
    /// Biases, normalisation parameters and embeddings.
    BiasesNormsAndEmbeddings,
    /// None: all parameters decay.
    Nothing,
}

/// The optimizer. All numbers are decimal strings.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.learningRate) || double(self.learningRate) > 0.0")
    .message("learningRate must be greater than 0").field_path(".learningRate"))]
#[x_kube(validation = Rule::new("has(self.learningRate) || !has(self.type) || !(self.type in ['LAMB', 'LARS'])")
    .message("learningRate must be set with LAMB and LARS: a good value depends on the batch size").field_path(".learningRate"))]
#[x_kube(validation = Rule::new("!has(self.momentum) || (has(self.type) && self.type in ['SGD', 'LARS'])")
    .message("momentum is for type SGD and LARS; the others have beta1").field_path(".momentum"))]
#[x_kube(validation = Rule::new("!has(self.momentum) || double(self.momentum) < 1.0")
    .message("momentum must be less than 1").field_path(".momentum"))]
#[x_kube(validation = Rule::new("self.nesterov == 'Disabled' || (has(self.type) && self.type == 'SGD')")
    .message("nesterov is for type SGD").field_path(".nesterov"))]
#[x_kube(validation = Rule::new("self.nesterov == 'Disabled' || !has(self.momentum) || double(self.momentum) > 0.0")
    .message("nesterov needs a momentum greater than 0").field_path(".momentum"))]
#[x_kube(validation = Rule::new("!has(self.type) || self.type in ['Adam', 'AdamW', 'LAMB'] || (!has(self.beta1) && !has(self.beta2) && !has(self.epsilon))")
    .message("beta1, beta2 and epsilon are for Adam, AdamW and LAMB").field_path(".type"))]
#[x_kube(validation = Rule::new("!has(self.beta1) || double(self.beta1) < 1.0")
    .message("beta1 must be less than 1").field_path(".beta1"))]
#[x_kube(validation = Rule::new("!has(self.beta2) || double(self.beta2) < 1.0")
    .message("beta2 must be less than 1").field_path(".beta2"))]
#[x_kube(validation = Rule::new("!has(self.epsilon) || double(self.epsilon) > 0.0")
    .message("epsilon must be greater than 0").field_path(".epsilon"))]
#[x_kube(validation = Rule::new("!has(self.trustCoefficient) || (has(self.type) && self.type == 'LARS' && double(self.trustCoefficient) > 0.0)")
    .message("trustCoefficient must be greater than 0, and is for LARS").field_path(".trustCoefficient"))]
pub struct Optimizer {
    /// Kind of optimizer. Default: `SGD` with a ResNet, `AdamW` otherwise.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<OptimizerType>,

    /// Peak learning rate, a decimal string. Default: "0.001" for `Adam` and `AdamW`, "0.1" for
    /// `SGD`; required with `LAMB` and `LARS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub learning_rate: Option<String>,

    /// Momentum of `SGD` and `LARS`, a decimal string below 1; "0" disables it. Default "0.9".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub momentum: Option<String>,

    /// Nesterov momentum for `SGD`. Default `Disabled`.
    #[serde(default = "disabled")]
    pub nesterov: Switch,

    /// Decay of the first moment of `Adam`, `AdamW` and `LAMB`, a decimal string below 1. Default
    /// "0.9".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub beta1: Option<String>,

    /// Decay of the second moment of `Adam`, `AdamW` and `LAMB`, a decimal string below 1. Default:
    /// "0.95" for `AdamW` with a GPT, "0.999" otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub beta2: Option<String>,

    /// Added to the square root of the second moment by `Adam`, `AdamW` and `LAMB`, a decimal
    /// string. Default: "1e-6" for `LAMB`, "1e-8" for the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub epsilon: Option<String>,

    /// Weight decay, a decimal string: decoupled for `AdamW` and `LAMB`, added to the gradient for
    /// the others. Default: for `AdamW` "0.1" with a GPT, "0.05" with a ResNet, "0.01" otherwise;
    /// "0.01" for `LAMB`, "0" for `Adam`, "0.0001" for `SGD` and `LARS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub weight_decay: Option<String>,

    /// Parameters without weight decay. Default `BiasesAndNorms`.
    #[serde(default)]
    pub weight_decay_exclusions: DecayExclusions,

    /// Trust coefficient of `LARS`: a layer's step relative to the norm of its weights, a decimal
    /// string. Default "0.001".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub trust_coefficient: Option<String>,

    /// Maximum global norm of the gradient, a decimal string; a larger gradient is scaled down to
    /// it. "0" disables clipping. Default: "0" for `SGD`, `LARS` and a ResNet with `AdamW`, "1.0"
    /// otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub gradient_clip_norm: Option<String>,
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer {
            kind: None,
            learning_rate: None,
            momentum: None,
            nesterov: Switch::Disabled,
            beta1: None,
            beta2: None,
            epsilon: None,
            weight_decay: None,
            weight_decay_exclusions: DecayExclusions::BiasesAndNorms,
            trust_coefficient: None,
            gradient_clip_norm: None,
        }
    }
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ScheduleType {
    /// Stays at the peak.
    Constant,
    /// Multiplies by `factor` every `everySteps` steps.
    Step,
    /// Cosine decay to `finalLearningRate`.
    #[default]
    Cosine,
    /// Linear decay to `finalLearningRate`.
    Linear,
}

/// Learning rate schedule.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.type == 'Step') == has(self.everySteps)")
    .message("everySteps must be set with type Step, and with no other").field_path(".everySteps"))]
#[x_kube(validation = Rule::new("!has(self.factor) || (self.type == 'Step' && double(self.factor) > 0.0 && double(self.factor) < 1.0)")
    .message("factor must be greater than 0 and less than 1, and is for type Step").field_path(".factor"))]
#[x_kube(validation = Rule::new("self.type != 'Constant' || !has(self.finalLearningRate)")
    .message("finalLearningRate is for the types Step, Cosine and Linear").field_path(".finalLearningRate"))]
pub struct Schedule {
    /// Shape after the warm-up. Default `Cosine`.
    #[serde(default, rename = "type")]
    pub kind: ScheduleType,

    /// Steps of linear warm-up from 0 to the peak. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: i64,

    /// Learning rate at the last step of `Cosine` and `Linear`, and the lower limit of `Step`, a
    /// decimal string. Default "0".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub final_learning_rate: Option<String>,

    /// Steps between two changes of type `Step`, counted after the warm-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_steps: Option<i64>,

    /// Multiplier of type `Step`, a decimal string between "0" and "1". Default "0.1".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub factor: Option<String>,
}
