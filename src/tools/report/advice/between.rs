//! Time between steps: checkpoints, progress reports, evaluation, and unexplained gaps.

use super::{Advice, Basis, Change, Chart, Field, Finding, Rule, ms, of_step};
use crate::report::sample::Part;

/// Acceptable share of checkpoints in the step, percent.
const CHECKPOINT: f64 = 2.0;
/// Acceptable share of time between steps in the step, percent.
const BETWEEN: f64 = 3.0;
/// Steps between two fetches at which their cost is negligible.
const RARE_FETCH: u32 = 30;
/// Upper bound of fields with a number of steps or seconds.
const MAX_PERIOD: u64 = 1_000_000_000;

pub(super) const CHECKPOINTS: Rule = Rule {
    id: "checkpoint-stall",
    question: 3,
    threshold: "Copies for checkpoints and waits for the one before take ≥ 2 % of the step.",
    gain: "Half of it: checkpoints half as often.",
    source: "ours: at most 2 % of the step time",
    check: |facts| {
        let checkpoint = facts.step[Part::Checkpoint];
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let Some(every) = &engine.checkpoint else { return Finding::NotApplicable };
        if facts.percent(checkpoint) < CHECKPOINT {
            return Finding::Fine(format!("checkpoints {:.1} % of the step", facts.percent(checkpoint)));
        }
        let (field, period) = match (every.every_steps, every.period_seconds) {
            (0, seconds) => ("checkpoint.periodSeconds", seconds),
            (steps, _) => ("checkpoint.everySteps", steps),
        };
        let rarer = Field::number(field, period, period.saturating_mul(2), MAX_PERIOD);
        Advice::about(
            &[Part::Checkpoint],
            Chart::StepTime,
            format!("Checkpoints hold the step up by {}, spread over all steps.", of_step(facts, checkpoint)),
            [
                rarer.map(|rarer| Change::set([rarer], checkpoint / 2.0, Basis::Modelled)),
                Some(Change::outside_manifest("a faster disk for `checkpoint.path`", None, Basis::Guess)),
            ],
        )
    },
};

pub(super) const FETCHES: Rule = Rule {
    id: "frequent-fetches",
    question: 3,
    threshold: "≥ 3 % of the step lies between steps in the median, and `fetchEverySteps` is below 10.",
    gain: "The median of what lies between, times the share of fetches that a fetch every 30 steps saves.",
    source: "kineto and TensorFlow profiler (3 %); PaddlePaddle's guide (fetch every 30 steps)",
    check: |facts| {
        let (Some(engine), Some(median)) = (&facts.engine, facts.between_median) else {
            return Finding::Unknown("the record of single steps");
        };
        let fetch = engine.fetch_every_steps.max(1);
        if fetch >= 10 || facts.percent(median) < BETWEEN {
            return Finding::Fine(format!("a fetch every {fetch} steps; {} ms between steps", ms(median)));
        }
        let saved = median * (1.0 - f64::from(fetch) / f64::from(RARE_FETCH));
        let rarer = Field::number("engine.fetchEverySteps", fetch, RARE_FETCH, MAX_PERIOD);
        Advice::about(
            &[Part::Other],
            Chart::StepTime,
            format!("{} lie between two steps; figures are fetched every {fetch} steps.", of_step(facts, median)),
            [rarer.map(|rarer| Change::set([rarer], saved, Basis::Modelled))],
        )
    },
};

pub(super) const EVALUATION: Rule = Rule {
    id: "frequent-evaluation",
    question: 3,
    threshold: "What lies between steps is ≥ 3 % of the step in the mean beyond its median, and evaluation is on.",
    gain: "Half of the difference of mean and median: evaluation half as often.",
    source: "as above",
    check: |facts| {
        let (Some(engine), Some(median)) = (&facts.engine, facts.between_median) else {
            return Finding::Unknown("the record of single steps");
        };
        let every = engine.evaluation.every_steps;
        if every == 0 {
            return Finding::NotApplicable;
        }
        let rare = (facts.step[Part::Other] - median).max(0.0);
        if facts.percent(rare) < BETWEEN {
            return Finding::Fine(format!("evaluation and other rare work {:.1} % of the step", facts.percent(rare)));
        }
        let batches = engine.evaluation.batches;
        let rarer = Field::number("engine.evaluation.everySteps", every, every.saturating_mul(2), MAX_PERIOD);
        let shorter = batches
            .and_then(|batches| Field::number("engine.evaluation.batches", batches, batches.div_ceil(2), MAX_PERIOD));
        let batches = batches.map_or("all".to_owned(), |batches| batches.to_string());
        Advice::about(
            &[Part::Other],
            Chart::StepTime,
            format!(
                "Rare work between steps takes {}, spread over all steps; evaluation every {every} steps with {batches} batches.",
                of_step(facts, rare)
            ),
            [rarer, shorter].map(|field| field.map(|field| Change::set([field], rare / 2.0, Basis::Modelled))),
        )
    },
};

pub(super) const GAPS: Rule = Rule {
    id: "gaps-between-steps",
    question: 3,
    threshold: "≥ 3 % of the step lies between steps in the median although figures are fetched every 10 steps or less often.",
    gain: "Not known: what fills the gap is outside of the engine.",
    source: "as above",
    check: |facts| {
        let (Some(engine), Some(median)) = (&facts.engine, facts.between_median) else {
            return Finding::Unknown("the record of single steps");
        };
        if engine.fetch_every_steps < 10 || facts.percent(median) < BETWEEN {
            return Finding::Fine(format!("{} ms between steps in the median", ms(median)));
        }
        Finding::Advice(Advice {
            evidence: format!("{} lie between two steps without a fetch or an evaluation.", of_step(facts, median)),
            changes: vec![Change::outside_manifest(
                "look for other programs on the CPUs of the ranks, and for slow logging",
                None,
                Basis::Guess,
            )],
            urgent: false,
            parts: &[Part::Other],
            chart: Chart::StepTime,
        })
    },
};
