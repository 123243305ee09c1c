//! The queue on real traces: `cargo xtask bench queue`. Every rule answers the same events on the same clusters, on eight shaken inputs.

use clap::Parser;
use serde_json::{Value, json};
use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_simulate::fabric::Fabric;
use switchyard_simulate::measure::{Counted, Figures, deviation, figures, mean};
use switchyard_simulate::play::{Limits, Rule, Setting, play};
use switchyard_simulate::rules::{Policy, Pool, PoolOrder};
use switchyard_simulate::speed::Model;
use switchyard_simulate::trace::{Row, read, shaken};

#[derive(Parser)]
struct Args {
    /// Result file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Shaken inputs of each case.
    #[arg(long, default_value_t = 8)]
    seeds: u64,
    /// Leaves of eight hosts: 16, 18, 20, 24 are the loads 0.80, 0.71, 0.64, 0.53. 0: the 847 hosts of the cluster that the trace is of, where
    /// jobs come 5.8 times as fast, which is a load of 0.70.
    #[arg(long, value_delimiter = ',', default_values_t = [16, 18, 20])]
    leaves: Vec<usize>,
    /// Only rules whose name has this word.
    #[arg(long)]
    only: Option<String>,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// How much faster jobs come to the cluster that the trace is of, which was nearly empty.
const FASTER: f64 = 5.8;

type Made = Result<Box<dyn Rule>, String>;

/// A rule of the table.
struct Entry {
    name: &'static str,
    limits: Limits,
    make: fn(&Fabric, &GPUTopology) -> Made,
}

fn pool(fabric: &Fabric, order: PoolOrder) -> Made {
    Ok(Box::new(Pool::new(fabric, order)))
}

const TABLE: [Entry; 13] = [
    Entry { name: "Switchyard", limits: Limits::Coarse, make: |f, m| Policy::Switchyard.rule(f, m) },
    Entry { name: "Switchyard, half without limits", limits: Limits::Half, make: |f, m| Policy::Switchyard.rule(f, m) },
    Entry { name: "with predictor, half without", limits: Limits::Half, make: |f, m| Policy::Predicting.rule(f, m) },
    Entry { name: "Switchyard, no limits", limits: Limits::None, make: |f, m| Policy::Switchyard.rule(f, m) },
    Entry { name: "strict FIFO", limits: Limits::None, make: |f, m| Policy::StrictFifo.rule(f, m) },
    Entry { name: "Kueue-like", limits: Limits::None, make: |f, m| Policy::KueueLike.rule(f, m) },
    Entry { name: "Volcano-like", limits: Limits::None, make: |f, m| Policy::VolcanoLike.rule(f, m) },
    Entry { name: "default scheduler", limits: Limits::None, make: |f, m| Policy::DefaultScheduler.rule(f, m) },
    Entry { name: "EASY, coarse limits", limits: Limits::Coarse, make: |f, m| Policy::Easy.rule(f, m) },
    Entry { name: "EASY, half without", limits: Limits::Half, make: |f, m| Policy::Easy.rule(f, m) },
    Entry { name: "ideal: strict FIFO, no places", limits: Limits::None, make: |f, _| pool(f, PoolOrder::StrictFifo) },
    Entry { name: "ideal: best effort, no places", limits: Limits::None, make: |f, _| pool(f, PoolOrder::BestEffort) },
    Entry {
        name: "ideal: shortest first, no places",
        limits: Limits::Exact,
        make: |f, _| pool(f, PoolOrder::Shortest),
    },
];

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let machine = machine(&root)?;
    let traces = root.join("tests/fixtures/traces");
    let mut results = Vec::new();
    let mut jobs = 0;
    for leaves in &args.leaves {
        let fabric = match leaves {
            0 => Fabric::read(File::open(traces.join("lingjun-2023-hosts.csv.gz"))?)?,
            leaves => Fabric::regular(*leaves, 8),
        };
        let mut rows = read(File::open(traces.join("lingjun-2023.csv.gz"))?, &fabric)?.rows;
        if *leaves == 0 {
            rows.iter_mut().for_each(|row| row.submit /= FASTER);
        }
        jobs = rows.len();
        for (name, model) in [("levels", Model::Levels), ("flows", Model::Flows)] {
            println!(
                "\nlingjun, {} GPUs in {} leaves, model {name}, {} inputs",
                fabric.gpus(),
                fabric.leaves.len(),
                args.seeds
            );
            println!("{HEADER}");
            for entry in
                TABLE.iter().filter(|entry| args.only.as_ref().is_none_or(|word| entry.name.contains(word.as_str())))
            {
                let begin = Instant::now();
                let case = Case {
                    rows: &rows,
                    setting: Setting { fabric: &fabric, model, limits: entry.limits },
                    machine: &machine,
                };
                let (inputs, longest) = case.inputs(entry, args.seeds)?;
                let seconds = begin.elapsed().as_secs_f64() / args.seeds as f64;
                println!("{}", line(entry.name, &inputs, seconds, longest));
                results.push(json!({
                    "trace": "lingjun", "gpus": fabric.gpus(), "leaves": fabric.leaves.len(), "model": name, "rule": entry.name, "inputs": inputs,
                    "mean": mean_of(&inputs)?, "completionDeviation": deviation(&all(&inputs, |figures| figures.completion_mean)),
                    "secondsPerTrace": seconds, "longestPassMilliseconds": longest,
                }));
            }
        }
    }
    if let Some(file) = args.json {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let report = json!({
            "command": command(), "machine": cpu.trim_start_matches(['\t', ' ', ':']), "jobs": jobs, "seeds": args.seeds, "results": results,
        });
        fs::write(file, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}

/// The command that gives such a file: what was chosen is part of it.
fn command() -> String {
    let mut given = std::env::args().skip(1).filter(|word| word != "--bench");
    let mut chosen = Vec::new();
    while let Some(word) = given.next() {
        if word == "--json" {
            given.next();
        } else {
            chosen.push(word);
        }
    }
    match chosen.is_empty() {
        true => "cargo xtask bench queue".into(),
        false => format!("cargo bench --workspace --bench queue -- {}", chosen.join(" ")),
    }
}

const HEADER: &str = "rule                                completion, s     p99 wait  wait>=64  longest h  slowdown  slow %  frag %  util %  told %  held %  early %  window h  s/trace  pass ms";

fn line(name: &str, inputs: &[Figures], seconds: f64, longest: f64) -> String {
    let average = |get: fn(&Figures) -> f64| mean(all(inputs, get).into_iter());
    let known = |get: fn(&Figures) -> Option<f64>, unit: f64| {
        let of: Vec<f64> = inputs.iter().filter_map(get).collect();
        if of.is_empty() { "-".to_string() } else { format!("{:.1}", mean(of.into_iter()) / unit) }
    };
    format!(
        "{name:32} {:>8.0} ± {:>6.0} {:>10.0} {:>9.0} {:>10.0} {:>9.1} {:>7.1} {:>7.1} {:>7.1} {:>7} {:>7} {:>8} {:>9} {seconds:>8.2} {longest:>8.1}",
        average(|figures| figures.completion_mean),
        deviation(&all(inputs, |figures| figures.completion_mean)),
        average(|figures| figures.wait_p99),
        average(|figures| figures.large_wait_mean),
        average(|figures| figures.wait_longest) / 3600.0,
        average(|figures| figures.slowdown),
        average(|figures| figures.slow_percent),
        average(|figures| figures.fragmentation_percent),
        average(|figures| figures.utilisation_percent),
        known(|figures| figures.forecast_percent, 1.0),
        known(|figures| figures.forecast_coverage_percent, 1.0),
        known(|figures| figures.forecast_early_percent, 1.0),
        known(|figures| figures.forecast_width_median, 3600.0),
    )
}

fn all(inputs: &[Figures], get: fn(&Figures) -> f64) -> Vec<f64> {
    inputs.iter().map(get).collect()
}

/// The mean of each figure.
fn mean_of(inputs: &[Figures]) -> Result<Value, Box<dyn Error>> {
    let inputs: Vec<Value> = inputs.iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
    let Some(Value::Object(first)) = inputs.first() else { return Ok(Value::Null) };
    let mean_of = |name: &String| match inputs.iter().filter_map(|figures| figures[name].as_f64()).collect::<Vec<_>>() {
        of if of.is_empty() => Value::Null,
        of => json!(mean(of.into_iter())),
    };
    Ok(Value::Object(first.keys().map(|name| (name.clone(), mean_of(name))).collect()))
}

/// The report of a machine with eight GPUs, NVSwitch and NICs: that of the first node of an example.
fn machine(root: &Path) -> Result<GPUTopology, Box<dyn Error>> {
    let text = fs::read_to_string(root.join("examples/clusters/two-racks.json"))?;
    let cluster: Value = serde_json::from_str(&text)?;
    let items = cluster["items"].as_array().ok_or("no items")?;
    let report = items.iter().find(|item| item["kind"] == "GPUTopology").ok_or("no report")?;
    Ok(serde_json::from_value(report.clone())?)
}

struct Case<'a> {
    rows: &'a [Row],
    setting: Setting<'a>,
    machine: &'a GPUTopology,
}

impl Case<'_> {
    /// Figures of each shaken input, and the longest time that the rule took for an answer, milliseconds.
    fn inputs(&self, entry: &Entry, seeds: u64) -> Result<(Vec<Figures>, f64), String> {
        let (mut inputs, mut longest) = (Vec::new(), 0.0_f64);
        for seed in 0..seeds {
            let mut rule = (entry.make)(self.setting.fabric, self.machine)?;
            let played = play(&shaken(self.rows, seed), self.setting, rule.as_mut())?;
            longest = longest.max(played.longest.as_secs_f64() * 1e3);
            inputs.push(figures(&played, self.setting.fabric.gpus(), Counted::Middle));
        }
        Ok((inputs, longest))
    }
}
