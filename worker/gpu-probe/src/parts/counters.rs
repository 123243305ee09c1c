//! Hardware counters of the slowest kernels in a GPT-124M step, from NVIDIA Nsight Compute.

use super::{Probe, kernels, sanitizer, steps};
use crate::numbers::short;
use crate::outcome::Outcome;
use crate::worker::last_lines;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_worker_contract::config::{EngineConfig, Length, Profile};

const PROGRAM: &str = "ncu";
const TIME: &str = "gpu__time_duration.sum";
const READ: &str = "dram__bytes_read.sum";
const WRITTEN: &str = "dram__bytes_write.sum";
/// Average active warps per multiprocessor, in percent of the maximum.
const OCCUPANCY: &str = "sm__warps_active.avg.pct_of_peak_sustained_active";
const REGISTERS: &str = "launch__registers_per_thread";
const METRICS: [&str; 5] = [TIME, READ, WRITTEN, OCCUPANCY, REGISTERS];
/// Kernels to report, slowest first.
const SHOWN_KERNELS: usize = 15;
/// The first step loads code; the launches of the second are counted; the third ensures that the
/// second is complete even if it has fewer launches.
const STEPS: u32 = 3;

pub(super) fn gpt(probe: &Probe) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let (program, worker) = (sanitizer::program(PROGRAM)?, probe.worker()?);
    let case = steps::gpt_124m_case(probe);
    let config = steps::largest(probe, &worker, &case)?;
    // Profiled steps run eagerly, not as a graph.
    let profile = Some(Profile { from_step: 1, steps: STEPS });
    let config = EngineConfig { profile, length: Length::Steps(STEPS.into()), ..config };
    worker.train("counters", &config, 1)?;
    let launches = launches_of_step(&kernels::times("counters")?).to_string();
    let failed = |text: String| Outcome::failed(PROGRAM, text);
    let folder = crate::scratch::folder("counters").map_err(|error| failed(error.to_string()))?;
    let report = folder.join("ncu.csv");
    let (metrics, file) = (METRICS.join(","), report.display().to_string());
    let arguments = [
        ["--clock-control", "none"],
        ["--metrics", &metrics],
        ["--launch-skip", &launches],
        ["--launch-count", &launches],
        ["--print-units", "base"],
        ["--print-kernel-base", "function"],
        ["--log-file", &file],
    ];
    let arguments = [&["--csv"][..], arguments.as_flattened()].concat();
    let prepared = worker.command("counters", &config, 1, Some((&program, &arguments)));
    let output = prepared.and_then(|mut prepared| Ok((prepared.command.output()?, prepared.log)));
    let (output, log) = output.map_err(|error| failed(error.to_string()))?;
    let said = std::fs::read_to_string(&report).unwrap_or_default();
    if !output.status.success() {
        let log = std::fs::read_to_string(log).unwrap_or_default();
        return Err(Outcome::Failed {
            call: PROGRAM.into(),
            code: output.status.code().map(i64::from),
            text: last_lines(&messages(&said, &log)),
            figures: None,
        });
    }
    let counted = parse_launches(&said).map_err(failed)?;
    if counted.is_empty() {
        let log = std::fs::read_to_string(log).unwrap_or_default();
        return Err(failed(format!("counted no launch of {launches}: {}", last_lines(&messages(&said, &log)))));
    }
    let batch = config.batch_size_per_process;
    Ok(json!({
        "device": device.name, "batch": batch, "launchesOfStep": counted.len(), "kernels": rows(&counted),
    }))
}

/// Kernel launches per step. A matrix product counts as one launch but may take several.
fn launches_of_step(times: &switchyard_worker_contract::kernels::KernelTimes) -> u64 {
    let launches = times.kernels.iter().filter(|kernel| kernel.name != "copy").map(|kernel| kernel.launches);
    launches.sum::<u64>() / times.steps.max(1)
}

/// The non-table part of the tool's output, or the worker's log if that is empty.
fn messages(said: &str, log: &str) -> String {
    let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with('"')).collect();
    if lines.is_empty() { log.to_owned() } else { lines.join("\n") }
}

/// Kernel name and metrics of a launch, in the order of [`METRICS`].
type Launch = (String, [f64; METRICS.len()]);

/// Parses a table with one line per launch and metric.
fn parse_launches(text: &str) -> Result<Vec<Launch>, String> {
    let table: Vec<&str> = text.lines().filter(|line| line.starts_with('"')).collect();
    let table = table.join("\n");
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(table.as_bytes());
    let header: Vec<String> = reader.headers().map_err(|error| error.to_string())?.iter().map(str::to_owned).collect();
    if header.is_empty() {
        return Ok(Vec::new());
    }
    let column = |name: &str| {
        let missing = || format!("columns {header:?}, expected `{name}` among them");
        header.iter().position(|column| column == name).ok_or_else(missing)
    };
    let [id, kernel, metric, value] =
        [column("ID")?, column("Kernel Name")?, column("Metric Name")?, column("Metric Value")?];
    let mut launches: BTreeMap<u64, (String, [Option<f64>; METRICS.len()])> = BTreeMap::new();
    for line in reader.records() {
        let line = line.map_err(|error| error.to_string())?;
        let field = |at: usize| line.get(at).unwrap_or_default();
        let number = field(id).parse().map_err(|_| format!("launch `{}`, expected a number", field(id)))?;
        let (_, values) = launches.entry(number).or_insert_with(|| (field(kernel).to_owned(), Default::default()));
        if let Some(at) = METRICS.iter().position(|name| *name == field(metric)) {
            values[at] = field(value).replace(',', "").parse().ok();
        }
    }
    let complete = |(number, (name, values)): (u64, (String, [Option<f64>; METRICS.len()]))| {
        let mut all = [0.0; METRICS.len()];
        for ((to, value), metric) in all.iter_mut().zip(values).zip(METRICS) {
            *to = value.ok_or_else(|| format!("launch {number}, `{name}`, has no {metric}, expected a number"))?;
        }
        Ok((name, all))
    };
    launches.into_iter().map(complete).collect()
}

/// The slowest kernels, with occupancy weighted by time.
fn rows(launches: &[Launch]) -> Vec<Value> {
    let mut sums: BTreeMap<&str, [f64; 6]> = BTreeMap::new();
    for (name, [nanoseconds, read, written, occupancy, registers]) in launches {
        let [count, time, from, to, active, most] = sums.entry(name).or_default();
        *count += 1.0;
        *time += nanoseconds;
        *from += read;
        *to += written;
        *active += occupancy * nanoseconds;
        *most = most.max(*registers);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1[1].total_cmp(&a.1[1]));
    let row = |(name, [count, time, from, to, active, most]): (&str, [f64; 6])| {
        json!({
            "kernel": name, "launches": count, "ms": short(time / 1e6), "readMB": short(from / 1e6),
            "writtenMB": short(to / 1e6), "GBs": short((from + to) / time), "occupancyPercent": short(active / time),
            "registers": most,
        })
    };
    sums.into_iter().take(SHOWN_KERNELS).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table with these launches and values.
    fn table(launches: &[(&str, [&str; METRICS.len()])]) -> String {
        let mut text =
            "==PROF== Connected\n\"ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n".to_owned();
        for (id, (name, values)) in launches.iter().enumerate() {
            for (metric, value) in METRICS.iter().zip(values) {
                text += &format!("\"{id}\",\"{name}\",\"{metric}\",\"x\",\"{value}\"\n");
            }
        }
        text
    }

    #[test]
    fn launches_are_summed_per_kernel_and_sorted_by_time() {
        let text = table(&[
            ("convert", ["1,000", "2000", "1000", "50", "32"]),
            ("sum(\"\"a\"\", b)", ["9000", "900", "0", "10", "16"]),
            ("convert", ["3000", "4000", "1000", "70", "32"]),
        ]);
        let rows = rows(&parse_launches(&text).unwrap());
        let expected = json!([
            {"kernel": "sum(\"a\", b)", "launches": 1.0, "ms": 0.009, "readMB": 0.0009, "writtenMB": 0.0, "GBs": 0.1,
                "occupancyPercent": 10.0, "registers": 16.0},
            {"kernel": "convert", "launches": 2.0, "ms": 0.004, "readMB": 0.006, "writtenMB": 0.002, "GBs": 2.0,
                "occupancyPercent": 65.0, "registers": 32.0},
        ]);
        assert_eq!(Value::from(rows), expected);
    }

    #[test]
    fn an_incomplete_table_is_refused() {
        let text = parse_launches(&table(&[("convert", ["1", "2", "n/a", "3", "4"])])).unwrap_err();
        assert_eq!(text, "launch 0, `convert`, has no dram__bytes_write.sum, expected a number");
        let text = parse_launches("\"ID\",\"Kernel Name\"\n").unwrap_err();
        assert_eq!(text, "columns [\"ID\", \"Kernel Name\"], expected `Metric Name` among them");
        assert_eq!(parse_launches("==ERROR== ERR_NVGPUCTRPERM\n"), Ok(Vec::new()));
        assert_eq!(messages("==ERROR== no\n\"ID\"\n", "log"), "==ERROR== no");
    }
}
