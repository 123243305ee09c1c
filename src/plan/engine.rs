//! The `engine` block to the engine's configuration: defaults that depend on other fields, decimals to numbers.

use super::validate::Invalid;
use switchyard_crds as api;
use switchyard_worker_contract::config::{
    AdamW, Data, EngineConfig, Evaluation, Gpt, Length, Model, Optimizer, Overlap, Schedule, ScheduleKind, TextData,
};

/// Steps of the warm-up that is taken when the manifest names no schedule, at most.
const DEFAULT_WARMUP_STEPS: u64 = 100;

/// Translates the block; faults are added to `faults`, and then there may be no configuration.
pub(super) fn config(engine: &api::Engine, faults: &mut Vec<Invalid>) -> Option<EngineConfig> {
    let length = match (engine.steps, engine.epochs) {
        (Some(steps), None) => Length::Steps(steps.unsigned_abs()),
        (None, Some(epochs)) => Length::Epochs(epochs.unsigned_abs()),
        _ => {
            faults.push(Invalid {
                field: "spec.engine".into(),
                got: "both or none of steps and epochs".into(),
                expected: "exactly one of them".into(),
            });
            return None;
        }
    };
    let Some(gpt) = &engine.model.gpt else {
        faults.push(Invalid {
            field: "spec.engine.model.gpt".into(),
            got: "nothing".into(),
            expected: "the shape of the GPT".into(),
        });
        return None;
    };
    let mut decimal = |field: &str, text: &str| {
        let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
        if value.is_none() {
            faults.push(Invalid {
                field: format!("spec.engine.{field}"),
                got: format!("`{text}`"),
                expected: "a decimal number that is not negative".into(),
            });
        }
        value.unwrap_or_default()
    };
    let optimizer = &engine.optimizer;
    let clip = decimal("optimizer.gradientClipNorm", &optimizer.gradient_clip_norm);
    let adam_w = AdamW {
        learning_rate: decimal("optimizer.learningRate", &optimizer.learning_rate),
        beta1: decimal("optimizer.beta1", &optimizer.beta1),
        beta2: decimal("optimizer.beta2", &optimizer.beta2),
        epsilon: decimal("optimizer.epsilon", &optimizer.epsilon),
        weight_decay: decimal("optimizer.weightDecay", &optimizer.weight_decay),
        gradient_clip_norm: (clip > 0.0).then_some(clip),
    };
    let schedule = match &engine.schedule {
        Some(schedule) => Schedule {
            kind: match schedule.kind {
                api::ScheduleType::Constant => ScheduleKind::Constant,
                api::ScheduleType::Cosine => ScheduleKind::Cosine,
            },
            warmup_steps: schedule.warmup_steps.unsigned_abs(),
            final_learning_rate: decimal("schedule.finalLearningRate", &schedule.final_learning_rate),
        },
        None => Schedule {
            kind: ScheduleKind::Cosine,
            warmup_steps: match length {
                Length::Steps(steps) => (steps / 10).min(DEFAULT_WARMUP_STEPS),
                // The number of steps is known only once the data is read.
                Length::Epochs(_) => DEFAULT_WARMUP_STEPS,
            },
            final_learning_rate: adam_w.learning_rate / 10.0,
        },
    };
    let validation_fraction = decimal("data.validationFraction", &engine.data.validation_fraction);
    Some(EngineConfig {
        model: Model::Gpt(Gpt {
            layers: gpt.layers.unsigned_abs(),
            hidden_size: gpt.hidden_size.unsigned_abs(),
            heads: gpt.heads.unsigned_abs(),
            context_length: gpt.context_length.unsigned_abs(),
            vocabulary_size: match gpt.vocabulary {
                api::Vocabulary::Bytes => 256,
            },
            tied_head: gpt.head == api::Head::Tied,
        }),
        data: match engine.data.format {
            api::DataFormat::Text => Data::Text(TextData {
                path: engine.data.path.clone(),
                include: engine.data.include.clone(),
                exclude: engine.data.exclude.clone(),
                validation_fraction,
            }),
        },
        batch_size_per_process: engine.batch_size_per_process.unsigned_abs(),
        batch_merge: engine.batch_merge.unsigned_abs(),
        length,
        seed: engine.seed.unsigned_abs(),
        optimizer: match optimizer.kind {
            api::OptimizerType::AdamW => Optimizer::AdamW(adam_w),
        },
        schedule,
        overlap: Overlap {
            enabled: engine.overlap.mode == api::Switch::Enabled,
            bucket_size_mib: engine.overlap.bucket_size_mib.unsigned_abs(),
        },
        evaluation: Evaluation {
            every_steps: engine.evaluation.every_steps.unsigned_abs(),
            batches: engine.evaluation.batches.unsigned_abs(),
        },
        fetch_every_steps: engine.fetch_every_steps.unsigned_abs(),
        cpu_threads: 1,
    })
}
