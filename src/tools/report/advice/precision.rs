//! Number formats: do shapes fit the hardware, would 16 bits pay, and do the numbers hold?

use super::{Advice, Basis, Change, Chart, Finding, Rule, ms};
use crate::report::sample::Part;
use switchyard_core::units::{grouped, three_digits};
use switchyard_worker_contract::config::{EngineConfig, HalfType, LossScaling, Model, Precision};

/// Share of the steps that may be skipped because of overflows.
const SKIPPED: f64 = 0.01;
/// Steps after which that share is meaningful.
const ENOUGH: u64 = 50;
/// Share of forward and backward that 16 bits are expected to save on hardware that supports them (the goal: bf16 in at most 0.75 of the time).
const HALF_SAVES: f64 = 0.25;
/// Dimensions of 16-bit products are a multiple of this.
const MULTIPLE: u32 = 8;

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
            changes: vec![Change::new(
                "a smaller `optimizer.learningRate`, a longer warm-up, or `optimizer.gradientClipNorm`",
                None,
                Basis::Guess,
            )],
            urgent: true,
            parts: &[],
            chart: Chart::Loss,
        }),
    },
};

pub(super) const SHAPES: Rule = Rule {
    id: "shapes",
    question: 6,
    threshold: "A dimension of the large products (hidden size, head size, vocabulary, channels) is no multiple of 8. On CPUs a note only.",
    gain: "Not known.",
    source: "TensorFlow's GPU guide; NVIDIA, Matrix Multiplication Background",
    check: |facts| {
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let odd: Vec<(String, u32)> = shapes(engine).into_iter().filter(|(_, size)| size % MULTIPLE != 0).collect();
        if odd.is_empty() {
            return Finding::Fine("all dimensions are multiples of 8".into());
        }
        let each = |(name, size): &(String, u32)| {
            format!("{name} {size} -> {}", size.div_ceil(MULTIPLE).saturating_mul(MULTIPLE))
        };
        let changes = odd.iter().take(6).map(each).collect::<Vec<_>>().join(", ");
        if facts.on_gpu != Some(true) {
            return Finding::Note(
                format!("for tensor cores of GPUs dimensions should be multiples of 8: {changes}"),
                Chart::Manifest,
            );
        }
        Finding::Advice(Advice {
            evidence: "Products with these dimensions are padded or do not use tensor cores.".into(),
            changes: vec![Change::new(changes, None, Basis::Guess)],
            urgent: false,
            parts: PRODUCTS,
            chart: Chart::Manifest,
        })
    },
};

fn shapes(engine: &EngineConfig) -> Vec<(String, u32)> {
    let named = |name: &str, size: u32| (name.to_owned(), size);
    match &engine.model {
        Model::Gpt(gpt) => vec![
            named("hiddenSize", gpt.hidden_size),
            named("head size", gpt.hidden_size / gpt.heads.max(1)),
            named("vocabularySize", gpt.vocabulary_size),
        ],
        // Its embedding is always padded to a multiple of 8.
        Model::Bert(bert) => {
            vec![named("hiddenSize", bert.hidden_size), named("head size", bert.hidden_size / bert.heads.max(1))]
        }
        Model::ResNet(net) => vec![named("width", net.width)],
        Model::Mlp(mlp) => {
            mlp.hidden_sizes.iter().enumerate().map(|(index, size)| (format!("hiddenSizes[{index}]"), *size)).collect()
        }
        Model::Custom(_) => Vec::new(),
    }
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
            changes: vec![Change::new("`precision.mode: AMP`; loss may change", products * HALF_SAVES, Basis::Guess)],
            urgent: false,
            parts: PRODUCTS,
            chart: Chart::StepTime,
        })
    },
};

pub(super) const OVERFLOWS: Rule = Rule {
    id: "overflow-skips",
    question: 6,
    threshold: "With AMP ≥ 1 % of at least 50 steps after the warm-up are skipped because gradients overflowed.",
    gain: "The time of the skipped steps, measured.",
    source: "ours: dynamic scaling with the usual interval of 2,000 steps skips 0.05 %",
    check: |facts| {
        let Some(Precision::Amp(amp)) = facts.engine.as_ref().map(|engine| engine.precision) else {
            return Finding::NotApplicable;
        };
        let Some((steps, skipped)) = facts.skipped.filter(|(steps, _)| *steps >= ENOUGH) else {
            return Finding::Unknown("the record of 50 steps");
        };
        let share = skipped as f64 / steps as f64;
        if share < SKIPPED {
            return Finding::Fine(format!("{} of {} steps skipped", grouped(skipped), grouped(steps)));
        }
        let what = match (amp.compute_type, amp.loss_scaling) {
            (HalfType::Bf16, _) => "a smaller `optimizer.learningRate`: BF16 overflows as late as FP32".to_owned(),
            (HalfType::Fp16, LossScaling::Static { scale }) => format!(
                "`precision.lossScaling: Static` with {} instead of {}, or `computeType: BF16`",
                three_digits(scale / 16.0),
                three_digits(scale)
            ),
            (HalfType::Fp16, LossScaling::Dynamic { growth_interval_steps, .. }) => {
                format!(
                    "`growthIntervalSteps: {growth_interval_steps} -> {}`, or `computeType: BF16`",
                    growth_interval_steps.saturating_mul(4)
                )
            }
        };
        Finding::Advice(Advice {
            evidence: format!(
                "{} of {} steps ({:.1} %) were skipped because gradients overflowed.",
                grouped(skipped),
                grouped(steps),
                100.0 * share
            ),
            changes: vec![Change::new(what, facts.step_ms() * share, Basis::Measured)],
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
        let Some(Precision::Amp(amp)) = facts.engine.as_ref().map(|engine| engine.precision) else {
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
            changes: vec![Change::new(
                "a smaller `optimizer.learningRate`, `gradientClipNorm`, or `computeType: BF16`",
                None,
                Basis::Guess,
            )],
            urgent: true,
            parts: &[],
            chart: Chart::Loss,
        })
    },
};
