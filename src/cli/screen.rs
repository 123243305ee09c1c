//! What a person sees of a run: header, rank table, progress, failure, summary. Text is made here by pure functions; see `run.rs` for
//! where it goes.

use super::units::{binary, counted, duration, grouped};
use crate::local::{Interval, RootCause};
use crate::plan::Plan;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_worker_contract::config::{EngineConfig, Model};
use switchyard_worker_contract::event::{Finished, Inspection, Ready};
use unicode_width::UnicodeWidthStr;

/// Columns separated by two spaces, each as wide as its widest cell; no borders, no trailing spaces.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width.saturating_sub(cell.width()) + 2));
        }
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// One line about the machine.
fn machine(topology: &GPUTopology) -> String {
    let status = topology.status.clone().unwrap_or_default();
    let cpus = status.cpus.unwrap_or_default();
    let mut parts = vec![counted(u64::from(cpus.cores.or(cpus.threads).unwrap_or_default()), "core")];
    parts.push(counted(status.numa_nodes.len().max(1) as u64, "NUMA node"));
    parts.extend(status.memory_bytes.map(binary));
    parts.push(if status.gpus.is_empty() { "no GPU".into() } else { counted(status.gpus.len() as u64, "GPU") });
    parts.join(", ")
}

fn millions(parameters: u64) -> String {
    if parameters >= 1_000_000_000 {
        format!("{:.2} B", parameters as f64 / 1e9)
    } else {
        format!("{:.2} M", parameters as f64 / 1e6)
    }
}

/// What will be trained, on what, for how long.
pub(super) fn header(plan: &Plan, inspection: &Inspection, run_dir: &str, topology: &GPUTopology) -> String {
    let engine = &plan.engine;
    let Model::Gpt(gpt) = &engine.model;
    let sequences = inspection.tokens_per_step / u64::from(gpt.context_length);
    let mut lines = vec![format!("{}  {run_dir}", plan.job)];
    lines.push(format!(
        "  model    GPT {}x{}, {} parameters, FP32, {} per rank",
        gpt.layers,
        gpt.hidden_size,
        millions(inspection.parameters),
        binary(inspection.memory_bytes)
    ));
    lines.push(format!(
        "  data     {}, {}; {} steps/epoch; {} bytes for validation",
        counted(inspection.files, "file"),
        binary(inspection.bytes),
        grouped(inspection.steps_per_epoch),
        grouped(inspection.validation_tokens),
    ));
    lines.push(format!("  machine  {}; kernels {}", machine(topology), inspection.kernel));
    lines.push(format!("  place    {}", plan.reason.replace(", out of ", ",\n           out of ")));
    lines.push(format!(
        "  steps    {} of {sequences} x {} tokens{}",
        grouped(inspection.total_steps),
        gpt.context_length,
        merge_words(engine)
    ));
    lines.push(format!("  {}", yardsticks(inspection)));
    lines.join("\n")
}

fn merge_words(engine: &EngineConfig) -> String {
    if engine.batch_merge > 1 {
        format!(", merged from {} micro-batches per rank", engine.batch_merge)
    } else {
        String::new()
    }
}

/// The two honest yardsticks of the split that the validation loss is measured on.
fn yardsticks(inspection: &Inspection) -> String {
    let split = if inspection.validation_tokens > 0 { "validation" } else { "training" };
    format!(
        "entropy  unigram {:.3}, bigram {:.3} nats per byte of the {split} text",
        inspection.unigram_nats, inspection.bigram_nats
    )
}

/// The distributed environment: rank, process, cores, devices, address, transport.
pub(super) fn rank_table(plan: &Plan, ranks: &[Ready]) -> String {
    let words = ["RANK", "PID", "CPUS", "NUMA", "DEVICE", "THREADS", "ADDRESS", "TRANSPORT"];
    let mut rows = vec![words.map(String::from).to_vec()];
    for (process, ready) in plan.processes().zip(ranks) {
        let numa: Vec<String> = process.numa_nodes.iter().map(ToString::to_string).collect();
        let devices: Vec<String> = process.devices.iter().map(|device| format!("{device:?}").to_lowercase()).collect();
        rows.push(vec![
            ready.rank.to_string(),
            ready.pid.to_string(),
            ready.cpus.clone(),
            if numa.is_empty() { "-".into() } else { numa.join(",") },
            format!("{} ({})", devices.join(","), ready.kernel),
            ready.threads.to_string(),
            ready.address.clone(),
            ready.transport.word().to_string(),
        ]);
    }
    table(&rows).lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

/// How many gradient tensors became how many all-reduces, and what they cost.
pub(super) fn fusion(plan: &Plan, inspection: &Inspection, ranks: &[Ready]) -> String {
    let buckets = inspection.bucket_bytes.len() as u64;
    let total: u64 = inspection.bucket_bytes.iter().sum();
    let sizes = if buckets == 1 {
        format!("of {}", binary(total))
    } else {
        let largest = inspection.bucket_bytes.iter().max().copied().unwrap_or_default();
        format!("of {} in all, the largest {}", binary(total), binary(largest))
    };
    let mut line = format!(
        "  fusion   {} -> {} {sizes} (limit {} MiB)",
        counted(u64::from(inspection.gradient_tensors), "gradient tensor"),
        counted(buckets, "all-reduce"),
        plan.engine.overlap.bucket_size_mib
    );
    match ranks.first() {
        Some(first) if ranks.len() > 1 => {
            let when = if plan.engine.overlap.enabled { "during backward" } else { "after backward" };
            line.push_str(&format!(
                "\n           over {}, ~{:.2} ms/step, started {when}",
                first.transport.word(),
                first.all_reduce_ms
            ));
        }
        _ => line.push_str("; one rank: nothing is reduced"),
    }
    line
}

/// The progress of a run on one line without a terminal.
pub(super) fn plain_line(interval: &Interval, now: jiff::Timestamp) -> String {
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
    line.push_str(&format!(
        " tokensPerSecond={:.0} stepMs={:.1} inputWaitPct={:.1} commWaitPct={:.1}",
        figures.tokens_per_second, interval.breakdown.step_ms, figures.input_percent, figures.communication_percent
    ));
    match figures.remaining_seconds {
        Some(seconds) => line.push_str(&format!(" etaS={:.0}", seconds.ceil())),
        None => line.push_str(" etaS=-"),
    }
    line
}

/// The two lines beside the bar on a terminal.
pub(super) fn bar_message(interval: &Interval) -> String {
    let figures = &interval.figures;
    let validation = figures.validation_loss.map_or_else(String::new, |loss| format!("   val {loss:.3}"));
    let eta = figures.remaining_seconds.map_or_else(|| "-".to_string(), duration);
    let mut text = format!(
        "loss {:.3}{validation}   {} tokens/s   ETA {eta}\n  {:.1} ms = compute {:.1} + all-reduce wait {:.1} + input wait {:.1} + other {:.1}",
        figures.loss,
        grouped(figures.tokens_per_second as u64),
        interval.breakdown.step_ms,
        interval.breakdown.compute_ms,
        interval.breakdown.communication_wait_ms,
        interval.breakdown.input_wait_ms,
        interval.breakdown.other_ms
    );
    if interval.breakdown.slowest_by_ms > 0.05 * interval.breakdown.step_ms {
        text.push_str(&format!(
            "   slowest rank {} (+{:.1})",
            interval.breakdown.slowest_rank, interval.breakdown.slowest_by_ms
        ));
    }
    text
}

/// A failure: root cause first, then what followed.
pub(super) fn failure(cause: &RootCause, attempt: u32) -> String {
    let others = match cause.others.len() {
        0 => String::new(),
        1 => "; the other rank stopped because of it".to_string(),
        count => format!("; the {count} other ranks stopped because of it"),
    };
    let mut lines = vec![format!("error[SY0503]: rank {} failed first{others}", cause.rank)];
    lines.push(format!("  where    rank {}, pid {}, attempt {attempt}", cause.rank, cause.pid));
    lines.push(format!("  cause    {}", cause.cause));
    if !cause.during.is_empty() {
        lines.push(format!("  during   {}", cause.during));
    }
    lines.push(format!("  log      {}", cause.log.path));
    if cause.log.tail.is_empty() {
        lines.push("           (empty)".into());
    }
    lines.extend(cause.log.tail.iter().map(|line| format!("           | {line}")));
    lines.join("\n")
}

/// The end of a good run.
pub(super) fn summary(
    report: &Finished,
    inspection: &Inspection,
    seconds: f64,
    tokens_per_second: f64,
    run_dir: &str,
) -> String {
    let mut rows = vec![vec!["done".to_string(), format!("{} steps in {}", grouped(report.step), duration(seconds))]];
    let mut row = |name: &str, text: String| rows.push(vec![name.to_string(), text]);
    row("loss", format!("{:.3} -> {:.3} nats per byte (training)", report.first_loss, report.last_loss));
    if let Some(loss) = report.validation_loss {
        let verdict = if loss < inspection.bigram_nats { "below" } else { "NOT below" };
        row(
            "validation",
            format!(
                "{loss:.3}, {verdict} the bigram entropy {:.3} (unigram {:.3})",
                inspection.bigram_nats, inspection.unigram_nats
            ),
        );
    }
    row(
        "speed",
        format!(
            "{} tokens/s; step p50 {:.1} ms, p99 {:.1} ms",
            grouped(tokens_per_second as u64),
            report.step_ms_p50,
            report.step_ms_p99
        ),
    );
    row("weights", format!("{} on every rank", report.weights_digest));
    if let Some(file) = report.model_file.as_deref().and_then(|file| file.rsplit('/').next()) {
        row("model", format!("{run_dir}/{file}"));
    }
    row("run", format!("{run_dir} (status.yaml, plan.yaml, events.jsonl, logs/)"));
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::RankLog;
    use crate::plan::status::Figures;
    use jiff::Timestamp;
    use switchyard_worker_contract::fold::Breakdown;

    #[test]
    fn tables_have_no_borders_and_no_trailing_spaces() {
        let rows = [vec!["A".to_string(), "LONG".to_string()], vec!["xyz".to_string(), "1".to_string()]];
        assert_eq!(table(&rows), "A    LONG\nxyz  1");
    }

    fn interval() -> Interval {
        Interval {
            figures: Figures {
                step: 240,
                total_steps: 600,
                loss: 2.184,
                validation_loss: Some(2.31),
                tokens_per_second: 20_900.0,
                remaining_seconds: Some(34.6),
                communication_percent: 3.2,
                input_percent: 0.4,
                at: Timestamp::UNIX_EPOCH,
            },
            breakdown: Breakdown {
                learning_rate: 0.001,
                gradient_norm: 0.7,
                step_ms: 97.9,
                compute_ms: 91.6,
                communication_wait_ms: 3.1,
                input_wait_ms: 0.4,
                other_ms: 2.8,
                slowest_rank: 1,
                slowest_by_ms: 5.1,
            },
        }
    }

    #[test]
    fn a_line_for_logs_has_keys_and_values_and_no_escape_codes() {
        let line = plain_line(&interval(), Timestamp::UNIX_EPOCH);
        assert_eq!(
            line,
            "1970-01-01T00:00:00Z step=240/600 loss=2.1840 valLoss=2.3100 tokensPerSecond=20900 stepMs=97.9 inputWaitPct=0.4 commWaitPct=3.2 etaS=35"
        );
    }

    #[test]
    fn the_bar_shows_where_the_time_goes() {
        let text = bar_message(&interval());
        assert!(text.contains("loss 2.184   val 2.310   20,900 tokens/s   ETA 35s"), "{text}");
        assert!(
            text.contains(
                "97.9 ms = compute 91.6 + all-reduce wait 3.1 + input wait 0.4 + other 2.8   slowest rank 1 (+5.1)"
            ),
            "{text}"
        );
    }

    #[test]
    fn a_failure_shows_the_first_cause_and_its_log() {
        let cause = RootCause {
            rank: 1,
            pid: 42,
            cause: "killed by signal 9 (SIGKILL)".into(),
            during: "all_reduce of bucket 0".into(),
            code: None,
            log: RankLog { path: "runs/x/logs/attempt-1/rank-1.log".into(), tail: vec!["last words".into()] },
            others: vec![0],
        };
        assert_eq!(
            failure(&cause, 1),
            "error[SY0503]: rank 1 failed first; the other rank stopped because of it\n  where    rank 1, pid 42, attempt 1\n  \
             cause    killed by signal 9 (SIGKILL)\n  during   all_reduce of bucket 0\n  log      runs/x/logs/attempt-1/rank-1.log\n           | last words"
        );
    }
}
