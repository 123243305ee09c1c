//! Builds a report from a record.

use super::advice::{self, Chart, Ranked};
use super::facts::Facts;
use super::model::{API_VERSION, Item, KIND, Remark, Report, Verdict, part_times, round4};
use super::record::Record;
use super::sample::{Part, plausible};
use super::skew::Skew;
use super::{curves, launches, layers, setting};
use switchyard_core::units::three_digits;

impl Record {
    /// Builds the report.
    pub fn report(&self) -> Report {
        let skew = Skew::of_ranks(self.ranks());
        let facts = Facts::of(self, &skew);
        let ranked = facts.as_ref().map(advice::rank).unwrap_or_default();
        let loss = curves::loss(self);
        let remark =
            |rule: &str, text: &str, chart: Option<Chart>| Remark { rule: rule.into(), text: text.into(), chart };
        let last_loss = loss.as_ref().and_then(|loss| loss.windows.last()).map(|window| window.smoothed);
        Report {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            job: setting::job(self),
            verdict: verdict(self, facts.as_ref(), &ranked, last_loss),
            advice: ranked.items.iter().map(item).collect(),
            folded: ranked.folded.iter().map(item).collect(),
            notes: ranked.notes.iter().map(|(rule, text, chart)| remark(rule, text, Some(*chart))).collect(),
            fine: ranked.fine.iter().map(|(rule, text)| remark(rule, text, None)).collect(),
            unknown: ranked.unknown.iter().map(|(rule, what)| remark(rule, what, None)).collect(),
            gaps: self.gaps(),
            loss,
            throughput: curves::throughput(self),
            step_time: curves::step_time(self, facts.as_ref()),
            skew: curves::skew(self, &skew),
            all_reduce: facts.as_ref().and_then(curves::all_reduce),
            pipeline: facts.as_ref().and_then(curves::pipeline),
            layers: facts.as_ref().and_then(layers::layers),
            kernels: facts.as_ref().and_then(launches::kernels),
            memory: setting::memory(self, facts.as_ref()),
            placement: setting::placement(self, facts.as_ref()),
            events: setting::events(self),
            setting: setting::setting(self),
        }
    }
}

fn item(item: &advice::Item) -> Item {
    let tidy_changes = |changes: &[advice::Change]| {
        changes.iter().map(|change| advice::Change { gain_ms: change.gain_ms.map(round4), ..change.clone() }).collect()
    };
    Item {
        rule: item.rule.into(),
        evidence: item.advice.evidence.clone(),
        changes: tidy_changes(&item.advice.changes),
        also: tidy_changes(&item.also),
        gain_ms: item.gain_ms.map(round4),
        basis: item.basis,
        urgent: item.advice.urgent,
        chart: item.advice.chart,
    }
}

fn verdict(record: &Record, facts: Option<&Facts>, ranked: &Ranked, last_loss: Option<f64>) -> Verdict {
    let (result, message) = setting::result(record);
    let inspection = record.documents.inspection.as_ref();
    let finished = record.events.finished.as_ref();
    let folds = record.ranks();
    let last_step = folds.values().map(|fold| fold.last_step).max().filter(|step| *step > 0);
    let curves = folds.values().find_map(|fold| fold.curves.as_ref());
    let lead = folds.values().find(|fold| fold.curves.is_some());
    let seconds = lead.and_then(|fold| Some((fold.last_us?.saturating_sub(fold.first_us?)) as f64 / 1e6));
    let step_ms = facts.map(Facts::step_ms).filter(|ms| *ms > 0.0);
    let rate = inspection.zip(step_ms).map(|(inspection, ms)| inspection.items_per_step as f64 * 1e3 / ms);
    let finite = |loss: Option<f64>| loss.and_then(plausible).map(round4);
    Verdict {
        result: result.into(),
        message,
        sentence: facts.map_or_else(|| "No step is known.".into(), |facts| sentence(facts, ranked)),
        model: inspection.map(|inspection| inspection.model.clone()),
        parameters: inspection.map(|inspection| inspection.parameters),
        ranks: record.world(),
        steps: last_step.or(finished.map(|finished| finished.step)),
        total_steps: inspection.map(|inspection| inspection.total_steps).or(record.events.total_steps),
        attempts: curves.map_or(0, |curves| curves.attempts.len() as u32),
        repeated_steps: curves.map_or(0, |curves| {
            curves.attempts.iter().fold(0_u64, |sum, attempt| sum.saturating_add(attempt.repeated))
        }),
        preemptions: record.documents.job.as_ref().map_or(0, |job| job.restarts.preemption),
        seconds: seconds.filter(|seconds| *seconds >= 0.0).map(round4),
        first_loss: finite(
            curves.and_then(|curves| curves.first_loss).or(finished.and_then(|finished| finished.first_loss)),
        ),
        last_loss: finite(last_loss.or(finished.and_then(|finished| finished.last_loss))),
        validation_loss: finite(
            finished.and_then(|finished| finished.validation_loss).or(record.events.last_evaluation),
        ),
        item: setting::item(record).map(|item| item.word().into()),
        items_per_second: rate.or(record.events.items_per_second).map(round4),
        step_ms: step_ms.map(round4),
        step_ms_p50: facts.and_then(|facts| facts.quantiles).map(|(p50, _)| round4(p50)),
        step_ms_p99: facts.and_then(|facts| facts.quantiles).map(|(_, p99)| round4(p99)),
        slowest: record.events.slowest,
        slowest_rank: facts.and_then(|facts| facts.ranks.get(facts.critical)).map(|rank| rank.rank),
        parts: facts.map(|facts| part_times(&facts.step)).unwrap_or_default(),
        synthetic_step_ms: record.synthetic_step_ms.map(round4),
    }
}

/// The main use of time and the first advice, in one sentence.
fn sentence(facts: &Facts, ranked: &Ranked) -> String {
    let percent = |time: f64| format!("{:.0} %", facts.percent(time));
    let mut text = format!(
        "{} of the step is computation, {} waiting for all-reduce, {} waiting for input",
        percent(facts.step.compute()),
        percent(facts.step.exposed()),
        percent(facts.step[Part::Input])
    );
    if facts.step[Part::Pipeline] > 0.0 {
        text.push_str(&format!(", {} waiting for other stages", percent(facts.step[Part::Pipeline])));
    }
    let urgent = ranked.items.iter().find(|item| item.advice.urgent);
    let best = ranked.items.iter().find(|item| item.gain_ms.is_some());
    match (urgent, best) {
        (Some(urgent), _) => text.push_str(&format!("; but first: {}", urgent.advice.evidence)),
        (None, Some(best)) => {
            let gain = best.gain_ms.unwrap_or_default();
            text.push_str(&format!(
                "; the largest gain in sight is about {} ms a step ({}, {}).",
                three_digits(gain),
                best.rule,
                best.basis.word()
            ));
        }
        (None, None) => text.push_str("; no rule sees more than 1 % to gain."),
    }
    text
}
