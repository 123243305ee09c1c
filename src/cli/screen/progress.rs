//! Formats the progress of a run and its successful end.

use super::entropies;
use crate::text::columns;
use switchyard_core::units::{counted, duration, grouped, percent, rate, three_digits};
use switchyard_local::Interval;
use switchyard_worker_contract::event::{Finished, GpuCalls, Inspection, Item, Summary};

/// The bar names the slowest rank if it lags the median of the others by at least this, percent.
const REPORTED_LAG: f64 = 5.0;

/// A progress line for output without a terminal.
pub(crate) fn plain_line(interval: &Interval, now: jiff::Timestamp) -> String {
    let figures = &interval.figures;
    let mut line = format!(
        "{} step={}/{} loss={:.4}",
        now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        figures.step,
        figures.total_steps,
        figures.loss
    );
    if let Some(loss) = figures.validation_loss {
        line.push_str(&format!(" valLoss={loss:.4}"));
    }
    if let Some(accuracy) = figures.accuracy {
        line.push_str(&format!(" valAccuracy={accuracy:.4}"));
    }
    line.push_str(&format!(
        " itemsPerSecond={:.0} stepMs={:.1} inputWaitPct={:.1} commWaitPct={:.1}",
        figures.items_per_second, interval.breakdown.step_ms, figures.input_percent, figures.communication_percent
    ));
    match figures.remaining_seconds {
        Some(seconds) => line.push_str(&format!(" etaS={:.0}", seconds.ceil())),
        None => line.push_str(" etaS=-"),
    }
    if let Some(scale) = figures.loss_scale {
        line.push_str(&format!(" lossScale={scale}"));
    }
    if let Some(skipped) = figures.skipped_steps {
        line.push_str(&format!(" skippedSteps={skipped}"));
    }
    line
}

/// The two lines next to the bar on a terminal.
pub(crate) fn bar_message(interval: &Interval) -> String {
    let figures = &interval.figures;
    let mut validation = figures.validation_loss.map_or_else(String::new, |loss| format!("   val {loss:.3}"));
    if let Some(accuracy) = figures.accuracy {
        validation.push_str(&format!(" ({} right)", percent(accuracy)));
    }
    let eta = figures.remaining_seconds.map_or_else(|| "-".to_string(), duration);
    let stages = interval.breakdown.pipeline_wait_ms.map_or_else(String::new, |ms| format!(" + stage wait {ms:.1}"));
    let mut text = format!(
        "loss {:.3}{validation}   {} {}/s   ETA {eta}\n  {:.1} ms = compute {:.1} + all-reduce wait {:.1}{stages} + input wait {:.1} + other {:.1}",
        figures.loss,
        rate(figures.items_per_second),
        figures.item.word(),
        interval.breakdown.step_ms,
        interval.breakdown.compute_ms,
        interval.breakdown.communication_wait_ms,
        interval.breakdown.input_wait_ms,
        interval.breakdown.other_ms
    );
    if let Some(slowest) = figures.slowest.filter(|slowest| slowest.over_percent > REPORTED_LAG) {
        text.push_str(&format!("   slowest rank {} (+{:.0} %)", slowest.rank, slowest.over_percent));
    }
    if let Some(amp) = amp_words(figures) {
        text.push_str(&format!("   {amp}"));
    }
    text
}

/// Loss scale and skipped steps, with mixed precision.
fn amp_words(figures: &Summary) -> Option<String> {
    let skipped = counted(figures.skipped_steps?, "step");
    let scale = figures.loss_scale.map_or_else(String::new, |scale| format!(", loss scale {}", three_digits(scale)));
    Some(format!("{skipped} skipped{scale}"))
}

/// The end of a successful run.
pub(crate) fn summary(
    report: &Finished,
    inspection: &Inspection,
    seconds: f64,
    items_per_second: f64,
    figures: Option<&Summary>,
    run_dir: &str,
) -> String {
    let mut rows = vec![vec!["done".to_string(), format!("{} steps in {}", grouped(report.step), duration(seconds))]];
    let mut row = |name: &str, text: String| rows.push(vec![name.to_string(), text]);
    let per = if inspection.item == Item::Tokens { " per token" } else { "" };
    if let (Some(first), Some(last)) = (report.first_loss, report.last_loss) {
        row("loss", format!("{first:.3} -> {last:.3} nats{per} (training)"));
    }
    if let Some(loss) = report.validation_loss {
        let mut text = format!("{loss:.3}");
        if let Some(accuracy) = report.accuracy {
            text.push_str(&format!(", {} classified right", percent(accuracy)));
        }
        if let Some((unigram, bigram)) = entropies(inspection) {
            let verdict = if loss < bigram { "below" } else { "NOT below" };
            text.push_str(&format!(", {verdict} the bigram entropy {bigram:.3} (unigram {unigram:.3})"));
        }
        row("validation", text);
    }
    if let Some(amp) = figures.and_then(amp_words) {
        row("precision", amp);
    }
    row(
        "speed",
        format!(
            "{} {}/s; step p50 {:.1} ms, p99 {:.1} ms",
            rate(items_per_second),
            inspection.item.word(),
            report.step_ms_p50,
            report.step_ms_p99
        ),
    );
    if let Some(GpuCalls { works, launches, waits }) = report.gpu_calls {
        row(
            "GPU",
            format!("{works} kernels, products and copies of a step in {launches} calls of the driver; {waits} waits"),
        );
    }
    if let Some(slowest) = figures.and_then(|figures| figures.slowest) {
        row("slowest", slowest.to_string());
    }
    row("weights", format!("{} on every rank", report.weights_digest));
    if let Some(file) = &report.model_file {
        // A full run directory sends the model elsewhere.
        let short = file.rsplit('/').next().map(|name| format!("{run_dir}/{name}"));
        row("model", short.filter(|short| file.ends_with(short.as_str())).unwrap_or_else(|| file.clone()));
    }
    row("run", format!("{run_dir} (status.yaml, plan.yaml, events.jsonl, logs/)"));
    columns(&rows)
}
