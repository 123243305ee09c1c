//! How close is memory to its limit, and how much larger could the batch be?

use super::communication::MAX_MERGE;
use super::{Advice, Basis, Change, Chart, Field, Finding, LOSS_MAY_CHANGE, Rule, of_step};
use crate::report::facts::Facts;
use crate::report::sample::Part;
use switchyard_core::units::binary;
use switchyard_worker_contract::config::{EngineConfig, Precision};

/// Share of the limit above which a run is close to it.
const NEAR: f64 = 0.9;
/// A larger batch is worthwhile if it amortises at least this share of the step, percent.
const FIXED: f64 = 10.0;
/// Upper bound of `batchSizePerProcess`.
const MAX_BATCH: u64 = 65_536;

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
        let engine = facts.engine.as_ref();
        let smaller = engine.and_then(half_batch).map(|fields| Change::set(fields, None, Basis::Guess));
        let half = engine.filter(|engine| engine.precision == Precision::Fp32).map(|engine| {
            let saved = binary((memory.rank.activations / 2).min(memory.rank.total()));
            let batch = engine.batch_size_per_process;
            let amp = Change::set([Field::word("engine.precision.mode", "AMP")], None, Basis::Guess);
            amp.with_remark(format_args!(": about {saved} less per rank at batch {batch}"))
        });
        let evidence = format!(
            "{} ranks of {} use {:.0} % of {} ({}).",
            memory.ranks,
            binary(memory.rank.total()),
            100.0 * share,
            memory.bound,
            binary(memory.capacity)
        );
        Advice::about(&[], Chart::Memory, evidence, [smaller, half])
    },
};

/// Half the batch with twice the `batchMerge`, which keeps the global batch. `None` if it cannot be
/// halved.
fn half_batch(engine: &EngineConfig) -> Option<[Field; 2]> {
    let (batch, merge) = (engine.batch_size_per_process, engine.batch_merge);
    let merge = (batch.is_multiple_of(2) && u64::from(merge) * 2 <= MAX_MERGE)
        .then(|| Field::number("engine.batchMerge", merge, merge * 2, MAX_MERGE))?;
    Some([Field::number("engine.batchSizePerProcess", batch, batch / 2, MAX_BATCH)?, merge?])
}

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
        let larger = Field::number("engine.batchSizePerProcess", batch, batch.saturating_mul(2), MAX_BATCH);
        let larger = larger.map(|larger| {
            let steps = Field::steps_for_twice_the_batch(engine.length);
            let fields = [larger].into_iter().chain(steps);
            Change::set(fields, fixed / 2.0, Basis::Guess).with_remark(LOSS_MAY_CHANGE)
        });
        Advice::about(&[Part::Optimizer, Part::Other], Chart::Memory, evidence, [larger])
    },
};
