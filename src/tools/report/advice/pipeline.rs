//! Do the stages of a pipeline wait for each other?

use super::communication::MAX_MERGE;
use super::{Advice, Basis, Change, Chart, Field, Finding, LOSS_MAY_CHANGE, Rule, ms, of_step};
use crate::report::sample::Part;
use serde_json::json;
use switchyard_core::units::percent;
use switchyard_worker_contract::config::{EngineConfig, idle_share};

/// Stage wait below this share of the step is not worth a change, percent.
const WORTH: f64 = 10.0;

pub(super) const IDLE: Rule = Rule {
    id: "idle-stages",
    question: 8,
    threshold: "The slowest rank of a pipeline waits ≥ 10 % of the step for other stages.",
    gain: "Half of the wait that a pipeline of equal stages has with this computation: twice as many micro-batches halve it.",
    source: "GPipe (Huang et al. 2019): (K - 1) / (M + K - 1); 10 % is ours",
    check: |facts| {
        let Some((engine, pipeline)) = facts.engine.as_ref().and_then(|engine| Some((engine, engine.pipeline?))) else {
            return Finding::NotApplicable;
        };
        let wait = facts.step[Part::Pipeline];
        if facts.percent(wait) < WORTH {
            return Finding::Fine(format!("stage wait {} ms ({:.1} %)", ms(wait), facts.percent(wait)));
        }
        let evidence = format!(
            "{} are waiting for other stages; {} equal stages with {} micro-batches would wait {} of it.",
            of_step(facts, wait),
            pipeline.stages,
            engine.batch_merge,
            percent(idle_share(pipeline.stages, engine.batch_merge)),
        );
        let fill =
            facts.step.compute() * f64::from(pipeline.stages.saturating_sub(1)) / f64::from(engine.batch_merge.max(1));
        Advice::about(&[Part::Pipeline], Chart::StepTime, evidence, [more_micro_batches(engine, wait.min(fill) / 2.0)])
    },
};

/// Twice as many micro-batches: of half the size if that is possible, so that the loss stays.
fn more_micro_batches(engine: &EngineConfig, gain_ms: f64) -> Option<Change> {
    let (merge, batch) = (engine.batch_merge, engine.batch_size_per_process);
    let merge = Field::number("engine.batchMerge", merge, merge.saturating_mul(2), MAX_MERGE)?;
    if batch.is_multiple_of(2) && batch > 0 {
        let halved = Field::value("engine.batchSizePerProcess", batch, json!(batch / 2));
        return Some(Change::set([merge, halved], gain_ms, Basis::Modelled));
    }
    let fields = [merge].into_iter().chain(Field::steps_for_twice_the_batch(engine.length));
    Some(Change::set(fields, gain_ms, Basis::Modelled).with_remark(LOSS_MAY_CHANGE))
}
