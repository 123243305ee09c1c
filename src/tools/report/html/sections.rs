//! Sections of text, tables and bars.

use super::elements::{Body, Page, aside, coded, figure, paragraph, table};
use super::time::class;
use crate::report::advice::Change;
use crate::report::markup::{escaped, shortened};
use crate::report::model::{GpuSummary, Item, Pipeline, Remark, Report};
use crate::report::svg::{Bar, bars, split_bar};
use switchyard_core::units::{self, binary, counted, duration, grouped, three_digits};

/// Most bytes shown of a document.
const DOCUMENT: usize = 64 << 10;

pub(super) fn header(report: &Report) -> Page {
    let verdict = &report.verdict;
    let mut about: Vec<String> = verdict.model.iter().cloned().collect();
    about.extend(verdict.parameters.map(|count| format!("{} parameters", grouped(count))));
    if verdict.ranks > 0 {
        about.push(counted(u64::from(verdict.ranks), "rank"));
    }
    format!(
        "<header><h1>{}</h1><span class=\"result {}\">{}</span><p>{}</p></header>\n",
        escaped(&report.job),
        escaped(&verdict.result),
        escaped(&verdict.result),
        escaped(&about.join(", "))
    )
}

pub(super) fn verdict(report: &Report) -> Page {
    let verdict = &report.verdict;
    let mut figures: Vec<(&str, String, String)> = Vec::new();
    let number = |value: Option<f64>| value.map(three_digits);
    if let Some(last) = number(verdict.last_loss) {
        let first = number(verdict.first_loss).map_or_else(String::new, |first| format!("from {first}, nats"));
        figures.push(("Loss", last, first));
    }
    if let Some(loss) = number(verdict.validation_loss) {
        figures.push(("Validation loss", loss, "nats".into()));
    }
    if let Some(rate) = verdict.items_per_second {
        let item = verdict.item.clone().unwrap_or_else(|| "items".into());
        figures.push(("Throughput", units::rate(rate), format!("{item}/s, all ranks")));
    }
    if let Some(step) = number(verdict.step_ms) {
        figures.push(("Step", format!("{step} ms"), "mean after the warm-up".into()));
    }
    if let (Some(p50), Some(p99)) = (number(verdict.step_ms_p50), number(verdict.step_ms_p99)) {
        figures.push(("p50 / p99", format!("{p50} / {p99}"), "ms of a step".into()));
    }
    if let Some(steps) = verdict.steps {
        let total = verdict.total_steps.map_or_else(String::new, |total| format!("of {}", grouped(total)));
        figures.push(("Steps", grouped(steps), total));
    }
    if verdict.attempts > 1 {
        figures.push((
            "Attempts",
            verdict.attempts.to_string(),
            format!("{} repeated", counted(verdict.repeated_steps, "step")),
        ));
    }
    if verdict.preemptions > 0 {
        figures.push(("Preempted", verdict.preemptions.to_string(), counted(verdict.preemptions.into(), "restart")));
    }
    if let Some(seconds) = verdict.seconds {
        figures.push(("Time", duration(seconds), "first to last step".into()));
    }
    if let Some(synthetic) = number(verdict.synthetic_step_ms) {
        figures.push(("Synthetic data", format!("{synthetic} ms"), "a step without reading".into()));
    }
    let mut page = format!("<p class=\"lead\">{}</p>\n", coded(&verdict.sentence));
    if !verdict.message.is_empty() && verdict.result != "complete" {
        let bad = if verdict.result == "failed" { " class=\"bad\"" } else { "" };
        page.push_str(&format!("<p{bad}>{}: {}</p>\n", escaped(&verdict.result), escaped(&verdict.message)));
    }
    if let Some(slowest) = &verdict.slowest {
        let bad = if slowest.is_straggler() { " class=\"bad\"" } else { "" };
        page.push_str(&format!("<p{bad}>Slowest: {}.</p>\n", escaped(&slowest.to_string())));
    }
    if !figures.is_empty() {
        page.push_str("<dl class=\"figures\">");
        for (name, value, small) in figures {
            page.push_str(&format!(
                "<div><dt>{name}</dt><dd>{} <small>{}</small></dd></div>",
                escaped(&value),
                escaped(&small)
            ));
        }
        page.push_str("</dl>\n");
    }
    if let (Some(step), false) = (verdict.step_ms, verdict.parts.is_empty()) {
        let percent = |ms: f64| format!("{:.1} %", 100.0 * ms / step);
        let parts: Vec<Bar<'_>> = verdict
            .parts
            .iter()
            .map(|time| Bar {
                name: time.part.word(),
                value: time.milliseconds,
                words: percent(time.milliseconds),
                class: class(time.part),
            })
            .collect();
        let rank = verdict.slowest_rank.map_or_else(String::new, |rank| format!(" of rank {rank}"));
        let words: Vec<String> = parts.iter().map(|part| format!("{} {}", part.name, part.words)).collect();
        let description = format!("Where the {} ms of a step{rank} go: {}.", three_digits(step), words.join(", "));
        let rows: Vec<Vec<String>> = verdict
            .parts
            .iter()
            .map(|time| vec![time.part.word().into(), three_digits(time.milliseconds), percent(time.milliseconds)])
            .collect();
        let table = table("Parts of a step", &["part", "ms", "share"], &rows);
        let svg = split_bar("Parts of a step", &description, &parts);
        page.push_str(&figure(&svg, &format!("Where the {} ms of a step{rank} go.", three_digits(step)), &table));
    }
    if !report.gaps.is_empty() {
        page.push_str("<div class=\"gaps\"><p>What is missing:</p><ul>");
        report.gaps.iter().for_each(|gap| page.push_str(&format!("<li>{}</li>", coded(gap))));
        page.push_str("</ul></div>\n");
    }
    page
}

fn change(change: &Change) -> Page {
    let gain =
        change.gain_ms.map_or_else(String::new, |ms| format!(": ~{} ms, {}", three_digits(ms), change.basis.word()));
    format!("<li>{}{gain}</li>", coded(&change.what))
}

fn item(item: &Item) -> Page {
    let gain = match item.gain_ms {
        Some(ms) => format!("<b>~{} ms</b><span>{}</span>", three_digits(ms), item.basis.word()),
        None if item.urgent => "<b class=\"bad\">first</b><span>result in doubt</span>".into(),
        None => "<b>-</b><span>not estimated</span>".into(),
    };
    let changes: String = item.changes.iter().map(change).collect();
    let also: String = item.also.iter().map(change).collect();
    let also =
        if also.is_empty() { also } else { format!("<p class=\"soft\">After the same time:</p><ul>{also}</ul>") };
    format!(
        "<li><div class=\"gain\">{gain}</div><div><p>{} <a href=\"#{}\" aria-label=\"Evidence for {rule}\">{rule}</a></p><ul>{changes}</ul>{also}</div></li>\n",
        coded(&item.evidence),
        item.chart.anchor(),
        rule = escaped(&item.rule),
    )
}

fn remarks(summary: &str, remarks: &[Remark]) -> Page {
    if remarks.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<String>> = remarks.iter().map(|remark| vec![remark.rule.clone(), remark.text.clone()]).collect();
    format!(
        "<details><summary>{summary} ({})</summary>{}</details>\n",
        remarks.len(),
        table(summary, &["rule", "finding"], &rows)
    )
}

pub(super) fn advice(report: &Report) -> Page {
    let mut page = String::new();
    if report.advice.is_empty() {
        page.push_str(&paragraph("No rule sees more than 1 % of the step to gain."));
    } else {
        let items: String = report.advice.iter().map(item).collect();
        page.push_str(&format!("<ol class=\"advice\">{items}</ol>\n"));
    }
    if !report.notes.is_empty() {
        page.push_str("<h3>Notes</h3>\n<ul class=\"plain\">");
        for note in &report.notes {
            let text = match note.chart {
                Some(chart) => {
                    format!("{} <a href=\"#{}\">{}</a>", coded(&note.text), chart.anchor(), escaped(&note.rule))
                }
                None => coded(&note.text),
            };
            page.push_str(&format!("<li>{text}</li>"));
        }
        page.push_str("</ul>\n");
    }
    if !report.folded.is_empty() {
        let items: String = report.folded.iter().map(item).collect();
        page.push_str(&format!(
            "<details><summary>Less than 1 % of the step ({})</summary><ol class=\"advice\">{items}</ol></details>\n",
            report.folded.len()
        ));
    }
    page.push_str(&remarks("Checked, nothing to gain", &report.fine));
    page.push_str(&remarks("Not checked: what is missing", &report.unknown));
    page
}

pub(super) fn all_reduce(report: &Report) -> Body {
    let Some(reduce) = &report.all_reduce else {
        return Err(match &report.pipeline {
            _ if report.verdict.ranks == 1 => "one rank has nothing to reduce",
            Some(Pipeline { pipelines: ..=1, .. }) => "each stage has one rank, which has nothing to reduce",
            _ => "no all-reduce is recorded",
        });
    };
    let times = [
        ("alone, before the start", reduce.alone_ms, "c-other"),
        ("under way in a step", reduce.under_way_ms, "forward"),
        ("hidden behind backward", reduce.hidden_ms, "optimizer"),
        ("exposed", Some(reduce.exposed_ms), "communication"),
    ];
    let known: Vec<(&str, f64, &str)> =
        times.into_iter().filter_map(|(name, ms, class)| Some((name, ms?, class))).collect();
    let amounts: Vec<Bar<'_>> = known
        .iter()
        .map(|(name, ms, class)| Bar { name, value: *ms, words: format!("{} ms", three_digits(*ms)), class })
        .collect();
    let mut caption = format!("{} ms of each step are exposed", three_digits(reduce.exposed_ms));
    if let Some(overlap) = reduce.overlap_percent {
        caption.push_str(&format!("; {overlap:.0} % of the all-reduce is hidden behind backward"));
    }
    caption.push('.');
    let mut rows: Vec<Vec<String>> =
        known.iter().map(|(name, ms, _)| vec![(*name).into(), format!("{} ms", three_digits(*ms))]).collect();
    let mut row = |name: &str, value: Option<String>| rows.extend(value.map(|value| vec![name.into(), value]));
    row("over", reduce.transport.clone());
    row("NCCL channels", reduce.channels.clone());
    row("algorithms between hosts", reduce.algorithms.clone());
    row("gradients of a step", reduce.bytes.map(|bytes| binary(bytes as u64)));
    row("a rank sends in a step", reduce.sent_bytes.map(|bytes| binary(bytes as u64)));
    let in_full = reduce.sent_bytes_in_full.map(|bytes| binary(bytes as u64));
    row("it would send with every gradient in 32 bits", in_full);
    row("still to reduce when backward ends", reduce.left_bytes.map(|bytes| binary(bytes as u64)));
    let rate = |rate: Option<f64>| rate.map(|rate| format!("{} GB/s", three_digits(rate)));
    row("bus bandwidth, in a step", rate(reduce.bus_gigabytes_per_second));
    row("bus bandwidth, alone", rate(reduce.alone_gigabytes_per_second));
    row("bus bandwidth, predicted", rate(reduce.predicted_gigabytes_per_second));
    if let (Some(least), Some(most)) = (reduce.bucket_bytes.iter().min(), reduce.bucket_bytes.iter().max()) {
        let count = counted(reduce.bucket_bytes.len() as u64, "all-reduce");
        row("fused into", Some(format!("{count}, {} to {}", binary(*least), binary(*most))));
    }
    let facts = table("All-reduce of a step", &["figure", "value"], &rows);
    let mut page = figure(&bars("All-reduce of a step", &caption, &amounts), &caption, &facts);
    let alone = reduce.alone_ms.zip(reduce.alone_gigabytes_per_second);
    if let (Some((ms, rate)), Some(bytes)) = (alone, reduce.bytes) {
        page.push_str(&paragraph(&format!(
            "{} at {} GB/s bus bandwidth, measured before the first step, are {} ms: what an all-reduce needs when no rank is late.",
            binary(bytes as u64),
            three_digits(rate),
            three_digits(ms)
        )));
    }
    Ok(page)
}

pub(super) fn memory(report: &Report) -> Body {
    let Some(memory) = &report.memory else { return Err("it is not recorded: there is no `inspection.json`") };
    let mut amounts: Vec<Bar<'_>> = memory
        .kinds
        .iter()
        .map(|amount| Bar {
            name: &amount.kind,
            value: amount.bytes as f64,
            words: binary(amount.bytes),
            class: "forward",
        })
        .collect();
    amounts.push(Bar {
        name: "total",
        value: memory.total_bytes as f64,
        words: binary(memory.total_bytes),
        class: "other",
    });
    let mut caption = format!("Each rank allocates {}.", binary(memory.total_bytes));
    if let Some(fp32) = memory.fp32_bytes.filter(|bytes| *bytes > 0) {
        let saved = 100.0 * (1.0 - memory.total_bytes as f64 / fp32 as f64);
        amounts.push(Bar { name: "in FP32", value: fp32 as f64, words: binary(fp32), class: "c-other" });
        caption.push_str(&format!(" In FP32 it would be {}: {saved:.0} % saved.", binary(fp32)));
    }
    if let Some(kept) = memory.kept_activation_bytes {
        caption.push_str(&format!(" Without recomputation, activations would be {}.", binary(kept)));
    }
    if let Some(gpu) = memory.gpu_bytes {
        amounts.push(Bar { name: "of its GPU", value: gpu as f64, words: binary(gpu), class: "other" });
        caption.push_str(&format!(" On its GPU it allocates {}", binary(gpu)));
        if let Some(fp32) = memory.gpu_fp32_bytes.filter(|bytes| *bytes > 0) {
            let saved = 100.0 * (1.0 - gpu as f64 / fp32 as f64);
            amounts.push(Bar { name: "of its GPU in FP32", value: fp32 as f64, words: binary(fp32), class: "c-other" });
            caption.push_str(&format!("; in FP32 it would be {}: {saved:.0} % saved", binary(fp32)));
        }
        caption.push('.');
    }
    if let (Some(ranks), Some(bound), Some(capacity)) = (memory.ranks_per_node, &memory.bound, memory.capacity_bytes) {
        let all = memory.total_bytes.saturating_mul(u64::from(ranks));
        caption.push_str(&format!(
            " {} of a node use {}, {:.1} % of {bound} ({}).",
            counted(u64::from(ranks), "rank"),
            binary(all),
            100.0 * all as f64 / capacity.max(1) as f64,
            binary(capacity)
        ));
    }
    let rows: Vec<Vec<String>> = amounts.iter().map(|bar| vec![bar.name.into(), bar.words.clone()]).collect();
    let table = table("Memory of a rank", &["for", "amount"], &rows);
    Ok(figure(&bars("Memory of a rank", &caption, &amounts), &caption, &table))
}

pub(super) fn placement(report: &Report) -> Body {
    let Some(placement) = &report.placement else { return Err("it is not recorded where the ranks ran") };
    let mut page = if placement.reason.is_empty() { String::new() } else { paragraph(&placement.reason) };
    placement.warnings.iter().for_each(|warning| page.push_str(&paragraph(&format!("Given up: {warning}"))));
    if let Some(limit) = &placement.limited_by {
        page.push_str(&paragraph(&format!("Bandwidth is limited by: {limit}.")));
    }
    let text = |value: &Option<String>| value.as_deref().map_or_else(|| "-".into(), |text| shortened(text, 120));
    let rows: Vec<Vec<String>> = placement
        .ranks
        .iter()
        .map(|rank| {
            let numa: Vec<String> = rank.numa_nodes.iter().take(8).map(ToString::to_string).collect();
            vec![
                rank.rank.to_string(),
                text(&rank.node),
                text(&rank.cpus),
                if numa.is_empty() { "-".into() } else { numa.join(",") },
                rank.threads.map_or_else(|| "-".into(), |threads| threads.to_string()),
                text(&rank.device),
                rank.compute_ms.map_or_else(|| "-".into(), three_digits),
            ]
        })
        .collect();
    let columns = ["rank", "node", "CPUs", "NUMA", "threads", "device", "compute, ms"];
    let ranks = table("Ranks", &columns, &rows);
    if rows.len() > 16 {
        page.push_str(&format!(
            "<details><summary>{}</summary>{ranks}</details>\n",
            counted(rows.len() as u64, "rank")
        ));
    } else {
        page.push_str(&ranks);
    }
    if placement.more_ranks > 0 {
        page.push_str(&aside(&format!("{} more ranks are not listed.", grouped(u64::from(placement.more_ranks)))));
    }
    page.push_str(&gpus(&placement.gpus));
    Ok(page)
}

/// Observations of the GPUs; empty if none was monitored.
fn gpus(seen: &[GpuSummary]) -> Page {
    if seen.is_empty() {
        return Page::new();
    }
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let list = |all: Vec<String>| if all.is_empty() { "-".into() } else { all.join(", ") };
    let rows: Vec<Vec<String>> = seen
        .iter()
        .map(|gpu| {
            vec![
                gpu.rank.to_string(),
                gpu.bus.clone(),
                duration(gpu.seconds),
                or_dash(gpu.busy_percent.map(|percent| format!("{percent:.0} %"))),
                or_dash(gpu.highest_celsius.map(|celsius| celsius.to_string())),
                list(gpu.slowed.clone()),
                or_dash(gpu.pcie_lanes.map(|(lanes, most)| format!("{lanes} of {most}"))),
                or_dash(
                    gpu.corrected_errors.zip(gpu.uncorrected_errors).map(|(mended, not)| format!("{mended}, {not}")),
                ),
                list(gpu.xids.iter().map(ToString::to_string).collect()),
            ]
        })
        .collect();
    let columns =
        ["rank", "GPU", "watched", "busy", "°C at most", "clocks lowered by", "PCIe lanes", "ECC mended, not", "XIDs"];
    let table = table("GPUs", &columns, &rows);
    if rows.len() > 16 {
        return format!("<details><summary>{}</summary>{table}</details>\n", counted(rows.len() as u64, "GPU"));
    }
    table
}

pub(super) fn events(report: &Report) -> Body {
    if report.events.is_empty() {
        return Err("none is recorded");
    }
    let rows: Vec<Vec<String>> = report
        .events
        .iter()
        .map(|event| {
            let attempt = if event.attempt == 0 { "-".into() } else { event.attempt.to_string() };
            let kind = if event.bad { "failure" } else { "" };
            vec![event.time.clone().unwrap_or_else(|| "-".into()), attempt, kind.into(), event.text.clone()]
        })
        .collect();
    Ok(table("What happened", &["time", "attempt", "kind", "event"], &rows))
}

pub(super) fn setting(report: &Report) -> Page {
    let setting = &report.setting;
    let mut rows = vec![vec!["switchyard".to_string(), report.version.clone()]];
    let mut row =
        |name: &str, value: &Option<String>| rows.extend(value.as_ref().map(|value| vec![name.into(), value.clone()]));
    row("machine", &setting.machine);
    row("data", &setting.data);
    let mut page = table("Versions and machine", &["what", "value"], &rows);
    let mut document = |name: &str, text: String| {
        page.push_str(&format!(
            "<details><summary>{name}</summary><pre tabindex=\"0\">{}</pre></details>\n",
            escaped(&shortened(&text, DOCUMENT))
        ));
    };
    if let Some(manifest) = &setting.manifest {
        document("Manifest", serde_saphyr::to_string(manifest).unwrap_or_default());
    }
    if let Some(engine) = &setting.engine {
        document("Engine configuration", serde_json::to_string_pretty(engine).unwrap_or_default());
    }
    let figures = (&report.verdict, &report.advice, &report.all_reduce, &report.memory);
    document(
        "Figures as JSON (all of them are in report.json)",
        serde_json::to_string_pretty(&figures).unwrap_or_default(),
    );
    if !setting.environment.is_empty() {
        let rows: Vec<Vec<String>> = setting
            .environment
            .iter()
            .map(|entry| vec![entry.name.clone(), entry.value.clone(), entry.reason.clone()])
            .collect();
        let table = table("Environment of the first rank", &["name", "value", "why"], &rows);
        page.push_str(&format!("<details><summary>Environment</summary>{table}</details>\n"));
    }
    page
}
