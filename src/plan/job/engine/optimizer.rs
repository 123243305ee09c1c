//! Optimizer and learning rate.

use super::Check;
use switchyard_crds as api;
use switchyard_crds::OptimizerType as Kind;
use switchyard_worker_contract::config::{
    Adam, DecayExclusions, Lars, Momentum, Optimizer, Rule, Schedule, ScheduleKind,
};

/// Default hyperparameters.
struct Defaults {
    /// `None` if it depends on the batch and must be given.
    learning_rate: Option<f64>,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
    /// 0 disables clipping.
    clip: f64,
}

/// Published ResNets are trained with SGD (He and others 2016), which also generalises better than
/// adaptive rules on images (Wilson and others 2017).
fn default_kind(model: api::ModelType) -> Kind {
    match model {
        api::ModelType::ResNet => Kind::SGD,
        api::ModelType::GPT | api::ModelType::BERT | api::ModelType::MLP | api::ModelType::Custom => Kind::AdamW,
    }
}

/// Defaults documented in `docs/engine.md`. For `AdamW` they depend on the model: GPT's are from
/// Brown and others 2020, appendix B; BERT's from Devlin and others 2019, appendix A.2; ResNet's
/// are from Liu and others 2022, table 5, for convolutional networks; the rest are PyTorch's.
/// Those for `Adam` are its authors', those for `LAMB` BERT's (You and others 2020), those for
/// `SGD` and `LARS` ResNet's (He and others 2016).
fn defaults(kind: Kind, model: api::ModelType) -> Defaults {
    let adam = Defaults { learning_rate: Some(0.001), beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, clip: 1.0 };
    match kind {
        Kind::Adam => adam,
        Kind::AdamW => match model {
            api::ModelType::GPT => Defaults { beta2: 0.95, weight_decay: 0.1, ..adam },
            api::ModelType::ResNet => Defaults { weight_decay: 0.05, clip: 0.0, ..adam },
            api::ModelType::BERT | api::ModelType::MLP | api::ModelType::Custom => {
                Defaults { weight_decay: 0.01, ..adam }
            }
        },
        Kind::LAMB => Defaults { learning_rate: None, epsilon: 1e-6, weight_decay: 0.01, ..adam },
        Kind::SGD => Defaults { learning_rate: Some(0.1), weight_decay: 1e-4, clip: 0.0, ..adam },
        Kind::LARS => Defaults { learning_rate: None, weight_decay: 1e-4, clip: 0.0, ..adam },
    }
}

pub(super) fn optimizer(optimizer: &api::Optimizer, model: api::ModelType, check: &mut Check<'_>) -> Optimizer {
    let kind = optimizer.kind.unwrap_or_else(|| default_kind(model));
    let default = defaults(kind, model);
    let adam = |check: &mut Check<'_>| Adam {
        beta1: check.decimal_or("optimizer.beta1", optimizer.beta1.as_ref(), 0.9),
        beta2: check.decimal_or("optimizer.beta2", optimizer.beta2.as_ref(), default.beta2),
        epsilon: check.decimal_or("optimizer.epsilon", optimizer.epsilon.as_ref(), default.epsilon),
    };
    let momentum = |check: &mut Check<'_>| check.decimal_or("optimizer.momentum", optimizer.momentum.as_ref(), 0.9);
    let rule = match kind {
        Kind::SGD => Rule::Sgd(Momentum { momentum: momentum(check), nesterov: optimizer.nesterov.is_on() }),
        Kind::Adam => Rule::Adam(adam(check)),
        Kind::AdamW => Rule::AdamW(adam(check)),
        Kind::LAMB => Rule::Lamb(adam(check)),
        Kind::LARS => Rule::Lars(Lars {
            momentum: momentum(check),
            trust_coefficient: check.decimal_or(
                "optimizer.trustCoefficient",
                optimizer.trust_coefficient.as_ref(),
                0.001,
            ),
        }),
    };
    if optimizer.learning_rate.is_none() && default.learning_rate.is_none() {
        check.fault("optimizer.learningRate", "nothing", format!("a number: {kind:?} has no default"));
    }
    let clip = check.decimal_or("optimizer.gradientClipNorm", optimizer.gradient_clip_norm.as_ref(), default.clip);
    Optimizer {
        rule,
        learning_rate: check.decimal_or(
            "optimizer.learningRate",
            optimizer.learning_rate.as_ref(),
            default.learning_rate.unwrap_or_default(),
        ),
        weight_decay: check.decimal_or("optimizer.weightDecay", optimizer.weight_decay.as_ref(), default.weight_decay),
        gradient_clip_norm: (clip > 0.0).then_some(clip),
        decay_exclusions: match optimizer.weight_decay_exclusions {
            api::DecayExclusions::BiasesAndNorms => DecayExclusions::Vectors,
            api::DecayExclusions::BiasesNormsAndEmbeddings => DecayExclusions::VectorsAndEmbeddings,
            api::DecayExclusions::Nothing => DecayExclusions::Nothing,
        },
    }
}

/// The schedule, by default a cosine after a warm-up.
pub(super) fn schedule(schedule: Option<&api::Schedule>, peak: f64, check: &mut Check<'_>) -> Schedule {
    let Some(schedule) = schedule else {
        // If the length of a run is given in epochs, only the worker knows the number of steps.
        return Schedule { kind: ScheduleKind::Cosine, warmup_steps: None, final_learning_rate: peak / 10.0 };
    };
    let last = check.decimal_or("schedule.finalLearningRate", schedule.final_learning_rate.as_ref(), 0.0);
    if last > peak {
        let expected = format!("at most optimizer.learningRate, {peak}");
        check.fault("schedule.finalLearningRate", last.to_string(), expected);
    }
    Schedule {
        kind: match schedule.kind {
            api::ScheduleType::Constant => ScheduleKind::Constant,
            api::ScheduleType::Cosine => ScheduleKind::Cosine,
            api::ScheduleType::Linear => ScheduleKind::Linear,
            api::ScheduleType::Step => ScheduleKind::Step {
                every: schedule.every_steps.map_or(1, i64::unsigned_abs).max(1),
                factor: check.decimal_or("schedule.factor", schedule.factor.as_ref(), 0.1),
            },
        },
        warmup_steps: Some(schedule.warmup_steps.unsigned_abs()),
        final_learning_rate: last,
    }
}
