//! Sections with a chart over the steps.

use super::elements::{Page, absent, every, figure, paragraph, table};
use crate::report::model::{PartTime, Report, StepWindow};
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
        Part::Optimizer => "optimizer",
        Part::Checkpoint => "checkpoint",
        Part::Other => "other",
    }
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), three_digits)
}

pub(super) fn loss(report: &Report) -> Page {
    let Some(loss) = &report.loss else { return absent("No loss is recorded.") };
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
        unit: "nats",
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
    let caption = format!("{description} Windows of {}.", counted(loss.window_steps, "step"));
    let mut page = figure(&plot.draw(), "Loss over the steps", &caption, &table("Loss, nats", &columns, &rows));
    for restart in loss.restarts.iter().take(10) {
        page.push_str(&paragraph(&format!(
            "Attempt {} resumed at step {}; {} repeated.",
            restart.attempt,
            grouped(restart.step),
            counted(restart.repeated_steps, "step")
        )));
    }
    page
}

pub(super) fn throughput(report: &Report) -> Page {
    let Some(throughput) = &report.throughput else { return absent("No throughput is known: no step is recorded.") };
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
        unit: &throughput.unit,
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
    figure(&plot.draw(), "Throughput over the steps", &description, &table)
}

fn part(parts: &[PartTime], part: Part) -> f64 {
    parts.iter().find(|time| time.part == part).map_or(0.0, |time| time.milliseconds)
}

pub(super) fn step_time(report: &Report) -> Page {
    let Some(time) = report.step_time.as_ref().filter(|time| !time.windows.is_empty()) else {
        return absent("No step is recorded.");
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
    let plot = Plot {
        title: "Parts of the step over the steps",
        description: description.clone(),
        unit: "ms",
        layers: used.iter().map(layer).collect(),
        series: lines.into_iter().filter(|line| !line.points.is_empty()).collect(),
        from_zero: true,
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
    let caption = format!("{description} The areas are means of a window, so that what is rare is seen too.");
    figure(&plot.draw(), "Parts of the step over the steps", &caption, &table("Time of a step, ms", &columns, &rows))
}

/// Bounds of the skew levels, as shares of the median compute time.
const LEVELS: [f64; 3] = [0.05, 0.1, 0.25];

pub(super) fn skew(report: &Report) -> Page {
    let Some(skew) = &report.skew else {
        let text = if report.verdict.ranks == 1 {
            "One rank: nothing to compare."
        } else {
            "The steps of fewer than two ranks are recorded."
        };
        return absent(text);
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
    figure(
        &heat(&chart),
        "Rank skew over the steps",
        &caption,
        &table("Compute time over the median", &columns, &figures),
    )
}
