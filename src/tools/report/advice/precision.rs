//! Number formats: do shapes suit the hardware, would 16-bit formats pay off, and do values stay in
//! range?

use super::{Advice, Basis, Change, Chart, Field, Finding, LOSS_MAY_CHANGE, Rule, ms};
use crate::report::sample::Part;
use serde_json::json;
use switchyard_core::units::{grouped, three_digits};
use switchyard_worker_contract::config::{EngineConfig, HalfType, LossScaling, Model, Precision};

/// Acceptable share of steps skipped because of overflows.
const SKIPPED: f64 = 0.01;
/// Number of steps needed for a meaningful share.
const ENOUGH: u64 = 50;
/// Expected saving of 16-bit formats in forward and backward on hardware that supports them (the
/// goal is bf16 in at most 0.75 of the time).
const HALF_SAVES: f64 = 0.25;
/// 16-bit products need dimensions that are multiples of this.
const MULTIPLE: u32 = 8;
/// Upper bound of `hiddenSize` and similar fields.
const MAX_WIDTH: u32 = 32_768;
/// Upper bound of `growthIntervalSteps`.
const MAX_STEPS: u64 = 1_000_000_000;

const PRODUCTS: &[Part] = &[Part::Forward, Part::Backward];

pub(super) const LOST_LOSS: Rule = Rule {
    id: "loss-not-a-number",
    question: 1,
    threshold: "The loss of a step is not a number.",
    gain: "None: the result is in doubt, which comes before speed.",
    source: "ours",
    check: |facts| match facts.lost_at {
        None => Finding::Fine("the loss is a number in every step".into()),
        Some(step) => Finding::Advice(Advice {
            evidence: format!("The loss is not a number at step {}.", grouped(step)),
            changes: facts.engine.as_ref().map_or_else(Vec::new, smaller_gradients),
            urgent: true,
            parts: &[],
            chart: Chart::Loss,
        }),
    },
};

pub(super) const SHAPES: Rule = Rule {
    id: "shapes",
    question: 6,
    threshold: "A dimension of the large products (hidden size, head size, channels) is no multiple of 8. On CPUs a note only.",
    gain: "Not known.",
    source: "TensorFlow's GPU guide; NVIDIA, Matrix Multiplication Background",
    check: |facts| {
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let Some(field) = even(&engine.model) else {
            return Finding::Fine("all dimensions that can be are multiples of 8".into());
        };
        let change = Change::set([field], None, Basis::Guess);
        if facts.on_gpu != Some(true) {
            let text = format!("for tensor cores of GPUs dimensions should be multiples of 8: {}", change.what);
            return Finding::Note(text, Chart::Manifest);
        }
        let evidence = "Products with these dimensions are padded or do not use tensor cores.".into();
        Advice::about(PRODUCTS, Chart::Manifest, evidence, [Some(change)])
    },
};

/// The model with each dimension rounded up to a multiple of 8; `None` if nothing changes, or if it
/// cannot be rounded.
fn even(model: &Model) -> Option<Field> {
    let up =
        |size: u32, multiple: u32| size.checked_next_multiple_of(multiple.max(1)).filter(|size| *size <= MAX_WIDTH);
    let number = |path, size: u32, to: u32| Field::number(path, size, to, MAX_WIDTH.into());
    match model {
        // Also keep each head size a multiple of 8.
        Model::Gpt(gpt) => number(
            "engine.model.gpt.hiddenSize",
            gpt.hidden_size,
            up(gpt.hidden_size, MULTIPLE.saturating_mul(gpt.heads))?,
        ),
        Model::Bert(bert) => number(
            "engine.model.bert.hiddenSize",
            bert.hidden_size,
            up(bert.hidden_size, MULTIPLE.saturating_mul(bert.heads))?,
        ),
        Model::ResNet(net) => number("engine.model.resnet.width", net.width, up(net.width, MULTIPLE)?),
        Model::Mlp(mlp) => {
            let sizes: Option<Vec<u32>> = mlp.hidden_sizes.iter().map(|size| up(*size, MULTIPLE)).collect();
            let from = json!(mlp.hidden_sizes);
            sizes
                .filter(|sizes| *sizes != mlp.hidden_sizes)
                .map(|sizes| Field::value("engine.model.mlp.hiddenSizes", from, json!(sizes)))
        }
        Model::Custom(_) => None,
    }
}

/// Changes that keep gradients smaller: half the learning rate, or clipping if there is none.
fn smaller_gradients(engine: &EngineConfig) -> Vec<Change> {
    let (rate, last) = (engine.optimizer.learning_rate, engine.schedule.final_learning_rate);
    let mut fields = vec![Field::decimal("engine.optimizer.learningRate", rate, rate / 2.0)];
    if last > rate / 2.0 {
        fields.push(Field::decimal("engine.schedule.finalLearningRate", last, rate / 2.0));
    }
    let clip = engine.optimizer.gradient_clip_norm.is_none();
    let clip = clip.then(|| Change::set([Field::word("engine.optimizer.gradientClipNorm", "1")], None, Basis::Guess));
    [Change::set(fields, None, Basis::Guess)].into_iter().chain(clip).collect()
}

/// The 16-bit format with the exponent range of f32.
fn bf16() -> Field {
    Field::word("engine.precision.computeType", "BF16")
}

pub(super) const AMP_OFF: Rule = Rule {
    id: "amp-off",
    question: 6,
    threshold: "FP32 on hardware with fast 16-bit products (AMX, AVX-512 BF16, a GPU).",
    gain: "A quarter of forward and backward.",
    source: "kineto (eligible work, no tensor core in use); TensorFlow's GPU guide (up to 3 times)",
    check: |facts| {
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        if engine.precision != Precision::Fp32 {
            return Finding::Fine("16-bit products are in use".into());
        }
        let kernel = facts.kernel.as_deref().unwrap_or_default().to_lowercase();
        let gpu = facts.on_gpu == Some(true);
        if !gpu && !["amx", "bf16", "cuda"].iter().any(|word| kernel.contains(word)) {
            return if facts.kernel.is_none() {
                Finding::Unknown("the kernels of the ranks")
            } else {
                Finding::Fine(format!("kernel {kernel} has no faster 16-bit products"))
            };
        }
        let products = facts.step[Part::Forward] + facts.step[Part::Backward];
        let hardware = if gpu { "a GPU".to_owned() } else { format!("kernel {kernel}") };
        Finding::Advice(Advice {
            evidence: format!("FP32 on {hardware}, which has fast 16-bit products; they take {} ms.", ms(products)),
            changes: vec![
                Change::set([Field::word("engine.precision.mode", "AMP")], products * HALF_SAVES, Basis::Guess)
                    .with_remark(LOSS_MAY_CHANGE),
            ],
            urgent: false,
            parts: PRODUCTS,
            chart: Chart::StepTime,
        })
    },
};

pub(super) const OVERFLOWS: Rule = Rule {
    id: "overflow-skips",
    question: 6,
    threshold: "With AMP, of at least 50 steps after the warm-up, ≥ 1 % are skipped because gradients overflowed; with a static loss scale, any.",
    gain: "The time of the skipped steps, measured.",
    source: "ours: dynamic scaling with the usual interval of 2,000 steps skips 0.05 %",
    check: |facts| {
        let Some((engine, Precision::Amp(amp))) = facts.engine.as_ref().map(|engine| (engine, engine.precision)) else {
            return Finding::NotApplicable;
        };
        let Some((steps, skipped)) = facts.skipped.filter(|(steps, _)| *steps >= ENOUGH) else {
            return Finding::Unknown("the record of 50 steps");
        };
        let share = skipped as f64 / steps as f64;
        // Only a dynamic scale overflows as part of its search.
        let is_static = matches!(amp.loss_scaling, LossScaling::Static { .. });
        if skipped == 0 || share < SKIPPED && !is_static {
            return Finding::Fine(format!("{} of {} steps skipped", grouped(skipped), grouped(steps)));
        }
        let gain = facts.step_ms() * share;
        let use_bf16 = || Change::set([bf16()], gain, Basis::Measured);
        let changes = match (amp.compute_type, amp.loss_scaling) {
            (HalfType::Bf16, _) => smaller_gradients(engine)
                .into_iter()
                .map(|change| Change { gain_ms: Some(gain), basis: Basis::Measured, ..change })
                .collect(),
            (HalfType::Fp16, LossScaling::Static { scale }) => {
                let scale = Field::decimal("engine.precision.lossScaling.scale", scale, scale / 16.0);
                vec![Change::set([scale], gain, Basis::Measured), use_bf16()]
            }
            (HalfType::Fp16, LossScaling::Dynamic { growth_interval_steps: steps, .. }) => {
                let path = "engine.precision.lossScaling.growthIntervalSteps";
                let longer = Field::number(path, steps, steps.saturating_mul(4), MAX_STEPS);
                // A block needs a type if the manifest has none.
                let kind = || Field::word("engine.precision.lossScaling.type", "Dynamic");
                let longer = longer.map(|longer| Change::set([longer, kind()], gain, Basis::Measured));
                longer.into_iter().chain([use_bf16()]).collect()
            }
        };
        Finding::Advice(Advice {
            evidence: format!(
                "{} of {} steps ({:.1} %) were skipped because gradients overflowed.",
                grouped(skipped),
                grouped(steps),
                100.0 * share
            ),
            changes,
            urgent: false,
            parts: &[Part::Forward, Part::Backward, Part::Optimizer],
            chart: Chart::Loss,
        })
    },
};

pub(super) const LOSS_SCALE: Rule = Rule {
    id: "loss-scale-collapse",
    question: 6,
    threshold: "Dynamic loss scaling has gone down to 1 or less.",
    gain: "None: the result is in doubt, which comes before speed.",
    source: "ours: a factor of 1 means that gradients overflow by themselves",
    check: |facts| {
        let Some((engine, Precision::Amp(amp))) = facts.engine.as_ref().map(|engine| (engine, engine.precision)) else {
            return Finding::NotApplicable;
        };
        if matches!(amp.loss_scaling, LossScaling::Static { .. }) {
            return Finding::NotApplicable;
        }
        let Some((largest, last)) = facts.loss_scale else { return Finding::Unknown("the loss scale") };
        if last > 1.0 || largest <= 1.0 {
            return Finding::Fine(format!("loss scale {}", three_digits(last)));
        }
        Finding::Advice(Advice {
            evidence: format!(
                "The loss scale fell from {} to {}: gradients overflow by themselves.",
                three_digits(largest),
                three_digits(last)
            ),
            changes: smaller_gradients(engine)
                .into_iter()
                .chain((amp.compute_type == HalfType::Fp16).then(|| Change::set([bf16()], None, Basis::Guess)))
                .collect(),
            urgent: true,
            parts: &[],
            chart: Chart::Loss,
        })
    },
};
