//! How near is the memory to its bound, and how much larger may the batch be?

use super::{Advice, Basis, Change, Chart, Finding, Rule, of_step};
use crate::report::facts::Facts;
use crate::report::sample::Part;
use switchyard_core::units::binary;
use switchyard_worker_contract::config::Precision;

/// Share of the memory above which a run is near its limit.
const NEAR: f64 = 0.9;
/// Share of the step that a larger batch divides, from which it is worthwhile, percent.
const FIXED: f64 = 10.0;

pub(super) const NEAR_LIMIT: Rule = Rule {
    id: "memory-near-limit",
    question: 7,
    threshold: "The ranks of a node use > 90 % of its memory, or of the job's limit.",
    gain: "None in time: a larger batch or a longer context will not fit.",
    source: "kineto (90 %)",
    check: |facts| {
        let Some(memory) = &facts.memory else { return Finding::Unknown("the memory of the ranks and of the machine") };
        let share = memory.share();
        let text = format!(
            "{} of {} x {} ranks: {:.0} % of {}",
            binary(memory.capacity),
            binary(memory.rank.total()),
            memory.ranks,
            100.0 * share,
            memory.bound
        );
        if share <= NEAR {
            return Finding::Fine(text);
        }
        let mut changes =
            vec![Change::new("a smaller `batchSizePerProcess` with a larger `batchMerge`", None, Basis::Guess)];
        if let Some(engine) = facts.engine.as_ref().filter(|engine| engine.precision == Precision::Fp32) {
            let half = memory.rank.activations / 2;
            let saved = binary(half.min(memory.rank.total()));
            let batch = engine.batch_size_per_process;
            changes.push(Change::new(
                format!("`precision.mode: AMP`: about {saved} less per rank at batch {batch}"),
                None,
                Basis::Guess,
            ));
        }
        let evidence = format!(
            "{} ranks of {} use {:.0} % of {} ({}).",
            memory.ranks,
            binary(memory.rank.total()),
            100.0 * share,
            memory.bound,
            binary(memory.capacity)
        );
        Finding::Advice(Advice { evidence, changes, urgent: false, parts: &[], chart: Chart::Memory })
    },
};

pub(super) const LARGER_BATCH: Rule = Rule {
    id: "batch-could-be-larger",
    question: 7,
    threshold: "Optimizer and what lies between steps take ≥ 10 % of the step, and twice the activations and input fit into 90 % of the memory.",
    gain: "Half of those parts: they come once per step, whatever the batch.",
    source: "TensorFlow's GPU guide (memory peak, hence how much larger the batch may be); 10 % is ours",
    check: |facts: &Facts| {
        let (Some(memory), Some(engine)) = (&facts.memory, &facts.engine) else {
            return Finding::Unknown("the memory of the ranks and of the machine");
        };
        let fixed = facts.step[Part::Optimizer] + facts.step[Part::Other];
        let more = memory.rank.activations.saturating_add(memory.rank.input) as f64 * f64::from(memory.ranks);
        let share = memory.share() + more / memory.capacity.max(1) as f64;
        if facts.percent(fixed) < FIXED || share > NEAR {
            return Finding::Fine(format!("{:.1} % of the step do not depend on the batch", facts.percent(fixed)));
        }
        let batch = engine.batch_size_per_process;
        let evidence = format!(
            "{} do not depend on the size of the batch, and twice the batch would use {:.0} % of {}.",
            of_step(facts, fixed),
            100.0 * share,
            memory.bound
        );
        let what = format!("`batchSizePerProcess: {batch} -> {}`; loss may change", batch.saturating_mul(2));
        Finding::Advice(Advice {
            evidence,
            changes: vec![Change::new(what, fixed / 2.0, Basis::Guess)],
            urgent: false,
            parts: &[Part::Optimizer, Part::Other],
            chart: Chart::Memory,
        })
    },
};
