//! Sections with a chart over the steps.

use super::elements::{Body, every, figure, paragraph, table};
use crate::report::model::{PartTime, Pipeline, Report, StageWait, StepWindow};
use crate::report::sample::Part;
use crate::report::svg::{Heat, Layer, Plot, Series, heat};
use switchyard_core::units::{counted, grouped, rate, three_digits};

/// CSS class of a part.
pub(super) fn class(part: Part) -> &'static str {
    match part {
        Part::Input => "input",
        Part::Forward => "forward",
        Part::Backward => "backward",
        Part::Communication => "communication",
        Part::Gather => "gather",
        Part::Pipeline => "pipeline",
        Part::Optimizer => "optimizer",
        Part::Checkpoint => "checkpoint",
        Part::Other => "other",
    }
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), three_digits)
}

pub(super) fn loss(report: &Report) -> Body {
    let Some(loss) = &report.loss else { return Err("no loss is recorded") };
    let at = |step: u64| step as f64;
    let middle = |step: u64| at(step) + (loss.window_steps - 1) as f64 / 2.0;
    let raw = loss.windows.iter().flat_map(|window| {
        let x = middle(window.step);
        [(x, window.least), (x, window.most)]
    });
    let restarts = loss.restarts.iter().map(|restart| at(restart.step)).collect();
    let mut levels = Vec::new();
    // A level far above the curve would flatten it.
    let most = loss.windows.iter().map(|window| window.most).fold(f64::MIN, f64::max);
    levels.extend(loss.bigram.filter(|bigram| *bigram <= most).map(|bigram| (bigram, "bigram entropy")));
    let verdict = &report.verdict;
    let description = format!(
        "Loss over {} from {} to {}{}; validation {}.",
        counted(verdict.steps.unwrap_or_default(), "step"),
        optional(verdict.first_loss),
        optional(verdict.last_loss),
        if loss.restarts.is_empty() {
            String::new()
        } else {
            format!(", {}", counted(loss.restarts.len() as u64, "restart"))
        },
        optional(verdict.validation_loss),
    );
    let plot = Plot {
        title: "Loss over the steps",
        description: description.clone(),
        values: "loss, nats",
        series: vec![
            Series { name: "least to most of a window", class: "raw", points: raw.collect(), dots: false },
            Series {
                name: "smoothed",
                class: "smooth",
                points: loss.windows.iter().map(|window| (middle(window.step), window.smoothed)).collect(),
                dots: false,
            },
            Series {
                name: "validation",
                class: "dot",
                points: loss.validation.iter().map(|point| (at(point.step), point.value)).collect(),
                dots: true,
            },
        ],
        levels,
        marks: vec![
            ("checkpoint", "mark", loss.checkpoints.iter().map(|step| at(*step)).collect()),
            ("restart", "restart", restarts),
        ],
        ..Plot::default()
    };
    let rows: Vec<Vec<String>> = every(&loss.windows)
        .map(|window| {
            let validation = loss
                .validation
                .iter()
                .find(|point| (window.step..window.step + loss.window_steps).contains(&point.step));
            vec![
                grouped(window.step),
                three_digits(window.mean),
                three_digits(window.smoothed),
                three_digits(window.least),
                three_digits(window.most),
                optional(validation.map(|point| point.value)),
            ]
        })
        .collect();
    let columns = ["from step", "mean", "smoothed", "least", "most", "validation"];
    let mut caption = format!("{description} Windows of {}.", counted(loss.window_steps, "step"));
    if !plot.levels.is_empty() {
        caption.push_str(
            " Bigram entropy is the lowest loss of a model that predicts each token from the one before it alone; a \
             loss below it shows that the model uses more context.",
        );
    }
    let mut page = figure(&plot.draw(), &caption, &table("Loss, nats", &columns, &rows));
    for restart in loss.restarts.iter().take(10) {
        page.push_str(&paragraph(&format!(
            "Attempt {} resumed at step {}; {} repeated.",
            restart.attempt,
            grouped(restart.step),
            counted(restart.repeated_steps, "step")
        )));
    }
    Ok(page)
}

pub(super) fn throughput(report: &Report) -> Body {
    let Some(throughput) = &report.throughput else { return Err("no step is recorded") };
    let values = || throughput.windows.iter().map(|point| point.value);
    let overall = report.verdict.items_per_second.or(report.verdict.step_ms.map(|ms| 1e3 / ms));
    let description = format!(
        "Throughput of the whole job in {}: {} after the warm-up, windows from {} to {}.",
        throughput.unit,
        overall.map_or_else(|| "-".into(), rate),
        rate(values().fold(f64::MAX, f64::min)),
        rate(values().fold(0.0, f64::max)),
    );
    let plot = Plot {
        title: "Throughput over the steps",
        description: description.clone(),
        values: &throughput.unit,
        series: vec![Series {
            name: &throughput.unit,
            class: "rate",
            points: throughput.windows.iter().map(|point| (point.step as f64, point.value)).collect(),
            dots: false,
        }],
        from_zero: true,
        ..Plot::default()
    };
    let rows: Vec<Vec<String>> =
        every(&throughput.windows).map(|point| vec![grouped(point.step), rate(point.value)]).collect();
    let table = table("Throughput", &["from step", &throughput.unit], &rows);
    Ok(figure(&plot.draw(), &description, &table))
}

fn part(parts: &[PartTime], part: Part) -> f64 {
    parts.iter().find(|time| time.part == part).map_or(0.0, |time| time.milliseconds)
}

/// A step this many times as long as nine in ten is drawn at the edge of the chart, so that the
/// parts of the others stay legible.
const HIGHEST: f64 = 2.0;

/// End of the axis if some steps go beyond it, and the highest value.
fn axis(windows: &[StepWindow]) -> (Option<f64>, f64) {
    let height = |window: &StepWindow| {
        let parts: f64 = window.parts.iter().map(|part| part.milliseconds).sum();
        parts.max(window.p50_ms.unwrap_or(0.0))
    };
    let mut heights: Vec<f64> = windows.iter().map(height).collect();
    heights.sort_by(f64::total_cmp);
    let usual = heights.get(heights.len().saturating_sub(1) * 9 / 10).copied().unwrap_or(0.0);
    let most = heights.into_iter().chain(windows.iter().filter_map(|window| window.p99_ms)).fold(0.0, f64::max);
    ((usual > 0.0 && most > HIGHEST * usual).then_some(HIGHEST * usual), most)
}

pub(super) fn step_time(report: &Report) -> Body {
    let Some(time) = report.step_time.as_ref().filter(|time| !time.windows.is_empty()) else {
        return Err("no step is recorded");
    };
    let used: Vec<Part> =
        Part::ALL.into_iter().filter(|one| time.windows.iter().any(|window| part(&window.parts, *one) > 0.0)).collect();
    let end = time.windows.last().map_or(0, |window| window.step + time.window_steps) as f64;
    let layer = |one: &Part| {
        let mut points: Vec<(f64, f64)> =
            time.windows.iter().map(|window| (window.step as f64, part(&window.parts, *one))).collect();
        points.push((end, points.last().map_or(0.0, |point| point.1)));
        Layer { name: one.word(), class: class(*one), points }
    };
    let middle = |window: &StepWindow| window.step as f64 + time.window_steps as f64 / 2.0;
    let line = |name, class, of: fn(&StepWindow) -> Option<f64>| Series {
        name,
        class,
        points: time.windows.iter().filter_map(|window| Some((middle(window), of(window)?))).collect(),
        dots: false,
    };
    let lines =
        [line("median step", "median", |window| window.p50_ms), line("99th percentile", "p99", |window| window.p99_ms)];
    let verdict = &report.verdict;
    let description = format!(
        "Parts of the step of rank {}: {} ms in the mean, median {} ms, 99th percentile {} ms.",
        time.rank,
        optional(verdict.step_ms),
        optional(verdict.step_ms_p50),
        optional(verdict.step_ms_p99)
    );
    let (end, most) = axis(&time.windows);
    let plot = Plot {
        title: "Parts of the step over the steps",
        description: description.clone(),
        values: "ms of a step",
        layers: used.iter().map(layer).collect(),
        series: lines.into_iter().filter(|line| !line.points.is_empty()).collect(),
        from_zero: true,
        end,
        ..Plot::default()
    };
    let mut columns = vec!["from step"];
    columns.extend(used.iter().map(|part| part.word()));
    columns.extend(["median", "p99"]);
    let rows: Vec<Vec<String>> = every(&time.windows)
        .map(|window| {
            let mut row = vec![grouped(window.step)];
            row.extend(used.iter().map(|one| three_digits(part(&window.parts, *one))));
            row.extend([optional(window.p50_ms), optional(window.p99_ms)]);
            row
        })
        .collect();
    let mut caption = format!("{description} The areas are means of a window, so that what is rare is seen too.");
    if end.is_some() {
        caption.push_str(&format!(
            " Longer steps are drawn at the upper edge of the chart; the longest takes {} ms.",
            three_digits(most)
        ));
    }
    let table = table("Time of a step, ms", &columns, &rows);
    let mut page = figure(&plot.draw(), &caption, &table);
    page.push_str(&report.pipeline.as_ref().map_or_else(String::new, stages));
    Ok(page)
}

/// How long the stages of a pipeline wait, next to what a pipeline of equal stages would wait.
fn stages(pipeline: &Pipeline) -> String {
    let text = format!(
        "Stages wait for each other in {} % of their steps' time. {} equal stages with {} would wait {} %, if messages took no time.",
        three_digits(pipeline.idle_percent),
        pipeline.stages,
        counted(pipeline.micro_batches.into(), "micro-batch"),
        three_digits(pipeline.least_idle_percent),
    );
    let row = |wait: &StageWait| {
        vec![
            wait.stage.to_string(),
            three_digits(wait.compute_ms),
            three_digits(wait.wait_ms),
            three_digits(wait.idle_percent),
        ]
    };
    let rows: Vec<Vec<String>> = every(&pipeline.waits).map(row).collect();
    let columns = ["stage", "compute, ms", "waits, ms", "waits, %"];
    format!("{}{}", paragraph(&text), table("Stages of the pipeline", &columns, &rows))
}

/// Bounds of the skew levels, as shares of the median compute time.
const LEVELS: [f64; 3] = [0.05, 0.1, 0.25];

pub(super) fn skew(report: &Report) -> Body {
    let Some(skew) = &report.skew else {
        let only = report.verdict.ranks == 1;
        return Err(if only {
            "one rank has no other to compare with"
        } else {
            "steps of fewer than two ranks are recorded"
        });
    };
    let level =
        |over: &Option<f64>| over.map(|over| LEVELS.iter().filter(|bound| over > *bound * skew.median_ms).count());
    let rows = skew.rows.iter().map(|row| {
        let sign = if row.mean_over_ms >= 0.005 { "+" } else { "" };
        // Show values that round to zero without a sign.
        let over = if row.mean_over_ms.abs() < 0.005 { 0.0 } else { row.mean_over_ms };
        let mean = format!("{sign}{} ms", three_digits(over));
        (row.label.clone(), mean, row.over_ms.iter().map(level).collect())
    });
    let worst = skew.rows.iter().max_by(|a, b| a.mean_over_ms.total_cmp(&b.mean_over_ms));
    let worst = worst.map_or_else(String::new, |row| {
        format!(
            " Most over it: {}, {} ms in the mean, > 5 % in {} % of the windows.",
            row.label,
            three_digits(row.mean_over_ms),
            three_digits(row.slow_percent)
        )
    });
    let description = format!(
        "Compute time of each {} over the median of the ranks, {} ms.{worst}",
        skew.by,
        three_digits(skew.median_ms)
    );
    let chart = Heat {
        title: "Rank skew over the steps",
        description: description.clone(),
        rows: rows.collect(),
        levels: [
            ("c-slow0", "up to 5 % over"),
            ("slow1", "5 to 10 %"),
            ("slow2", "10 to 25 %"),
            ("slow3", "more"),
            ("nothing", "not known"),
        ],
        steps: (1.0, skew.steps.last().map_or(1, |step| step + skew.window_steps) as f64),
    };
    let figures: Vec<Vec<String>> = skew
        .rows
        .iter()
        .map(|row| {
            let most = row.over_ms.iter().flatten().copied().reduce(f64::max);
            vec![row.label.clone(), three_digits(row.mean_over_ms), optional(most), three_digits(row.slow_percent)]
        })
        .collect();
    let columns = [skew.by.as_str(), "mean over the median, ms", "most, ms", "slow windows, %"];
    let caption = format!("{description} Fast ranks wait in the all-reduce, so that wall times are equal.");
    let table = table("Compute time over the median", &columns, &figures);
    Ok(figure(&heat(&chart), &caption, &table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rare_slow_step_does_not_flatten_the_parts() {
        let window = |forward: f64, p99: f64| StepWindow {
            step: 0,
            parts: vec![PartTime { part: Part::Forward, milliseconds: forward }],
            p50_ms: Some(9.0),
            p99_ms: Some(p99),
        };
        assert_eq!(axis(&[window(10.0, 19.0), window(10.0, 12.0)]), (None, 19.0));
        assert_eq!(axis(&[window(10.0, 12.0), window(10.0, 900.0)]), (Some(20.0), 900.0));
        let mut windows = vec![window(10.0, 10.0); 20];
        windows[7] = window(300.0, 300.0);
        assert_eq!(axis(&windows), (Some(20.0), 300.0));
        assert_eq!(axis(&[]), (None, 0.0));
    }
}
