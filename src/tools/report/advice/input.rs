//! Does the step wait for the reader?

use super::{Advice, Basis, Change, Chart, Field, Finding, Rule, ms, of_step};
use crate::report::facts::Facts;
use crate::report::sample::Part;
use switchyard_core::units::counted;

/// Input above this share of the step is a bottleneck, percent.
const MODERATE: f64 = 5.0;
/// Input above this share is the first thing to fix, percent.
const HIGH: f64 = 20.0;
/// Input is the bottleneck if synthetic data makes the step this much shorter, percent.
const SYNTHETIC: f64 = 5.0;

/// Most reader threads to advise.
const MAX_WORKERS: f64 = 64.0;
/// Upper bound of `reader.workers`.
const WORKERS: u64 = 256;

pub(super) const INPUT_BOUND: Rule = Rule {
    id: "input-bound",
    question: 2,
    threshold: "The slowest rank waits for the reader ≥ 5 % of the step (≥ 20 %: high); with `--synthetic`, the step is also ≥ 5 % shorter with synthetic data.",
    gain: "With `--synthetic`: the difference, measured. Else what the reader's measured work, divided among more threads and hidden behind the computation, would leave.",
    source: "TensorFlow profiler (5 % moderate, 20 % high), kineto (5 %)",
    check,
};

fn check(facts: &Facts) -> Finding {
    let wait = facts.step[Part::Input];
    let comparison = facts.synthetic_step_ms.map(|synthetic| (synthetic, facts.step_ms() - synthetic));
    if facts.percent(wait) < MODERATE {
        let same =
            comparison.map_or_else(String::new, |(synthetic, _)| format!("; {} ms with synthetic data", ms(synthetic)));
        return Finding::Fine(format!("input wait {:.1} %: nothing to gain{same}", facts.percent(wait)));
    }
    if let Some((synthetic, saved)) = comparison
        && facts.percent(saved) < SYNTHETIC
    {
        let text = format!(
            "ranks wait {} for input, but a step takes {} ms with synthetic data too: input is not the limit",
            of_step(facts, wait),
            ms(synthetic)
        );
        return Finding::Note(text, Chart::StepTime);
    }
    let high = if facts.percent(wait) >= HIGH { ", which is high" } else { "" };
    let mut evidence = format!("The slowest rank waited {} for input{high}.", of_step(facts, wait));
    if let Some((synthetic, _)) = comparison {
        evidence.push_str(&format!(" With synthetic data a step takes {} ms.", ms(synthetic)));
    }
    if let Some(idle) = facts.gpu_idle_percent() {
        evidence.push_str(&format!(" NVML saw the GPUs idle {idle:.0} % of the run."));
    }
    let mut changes = changes(facts, wait, &mut evidence);
    if let Some((_, saved)) = comparison
        && let Some(first) = changes.first_mut()
    {
        first.gain_ms = Some(saved.min(wait));
        first.basis = Basis::Measured;
    }
    Advice::about(&[Part::Input], Chart::StepTime, evidence, changes.into_iter().map(Some))
}

/// Possible changes, from the reader's capacity and the step's consumption.
fn changes(facts: &Facts, wait: f64, evidence: &mut String) -> Vec<Change> {
    let Some((read, engine)) = facts.read_ms.filter(|read| *read > 0.0).zip(facts.engine.as_ref()) else {
        // The reader was not measured. Twice the readers save at least half of the wait, if there
        // are cores for them.
        return vec![Change::outside_manifest(
            "more `reader.workers`, or less work per sample",
            wait / 2.0,
            Basis::Guess,
        )];
    };
    let reader = &engine.reader;
    let threads = reader.workers.or(facts.reader_threads).unwrap_or(1).max(1);
    let workers = f64::from(threads);
    let consumed = facts.step_ms() - wait;
    evidence.push_str(&format!(
        " The reader works {} ms for a step in {}; the rest of the step takes {} ms.",
        ms(read),
        counted(u64::from(threads), "thread"),
        ms(consumed)
    ));
    // The remaining wait when the reader runs in the background with this many threads.
    let left = |workers: f64| (read / workers - consumed).max(0.0);
    let mut changes = Vec::new();
    if !reader.double_buffer {
        let double = Field::word("engine.reader.doubleBuffer", "Enabled");
        changes.push(Change::set([double], (wait - left(workers)).max(0.0), Basis::Modelled));
    }
    let enough = (read / consumed.max(1e-3)).ceil().min(MAX_WORKERS).max(workers + 1.0);
    let more = Field::number("engine.reader.workers", threads, enough as u64, WORKERS);
    changes.extend(more.and_then(|more| {
        if read / workers > consumed {
            return Some(Change::set([more], (wait - left(enough)).max(0.0), Basis::Modelled));
        }
        // The reader is fast enough on average, so it is occasionally late or gets no CPU.
        let late = || {
            Change::set([more], wait / 2.0, Basis::Guess)
                .with_remark(": it is fast enough in the mean, but late at times")
        };
        reader.double_buffer.then(late)
    }));
    changes.sort_by(|a, b| b.gain_ms.unwrap_or_default().total_cmp(&a.gain_ms.unwrap_or_default()));
    changes
}
