//! Benchmarks the queue on real traces: `cargo xtask bench queue`. Every rule sees the same events
//! on the same clusters, on eight perturbed inputs.
//!
//! With `--part`, `--trace`, `--load`, `--model` or `--only`, a run replaces the replayed rows in
//! the result file and keeps the others, so a long run can be split.

mod parts;
mod pass;
mod results;
mod row;

use clap::Parser;
use parts::{Entry, Part, TraceName};
use results::Results;
use row::Row;
use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_simulate::fabric::Fabric;
use switchyard_simulate::failures::Failures;
use switchyard_simulate::measure::{JobWindow, figures};
use switchyard_simulate::replay::{Scenario, replay};
use switchyard_simulate::speed::Model;
use switchyard_simulate::trace::{self, read, shaken};

#[derive(Parser)]
struct Args {
    /// Result file, from the root of the repository.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Perturbed inputs per case.
    #[arg(long, default_value_t = 8)]
    seeds: u64,
    /// What to replay. Default: everything.
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<Part>,
    /// Default: the part's own traces.
    #[arg(long, value_enum, value_delimiter = ',')]
    trace: Vec<TraceName>,
    /// GPU hours of all jobs ÷ GPU hours of the cluster while jobs are submitted. Default: the
    /// part's own loads.
    #[arg(long, value_delimiter = ',')]
    load: Vec<f64>,
    /// Default: both.
    #[arg(long, value_enum, value_delimiter = ',')]
    model: Vec<ModelName>,
    /// Replay the traces as they are. Use with one seed.
    #[arg(long)]
    exact: bool,
    /// Only rules whose name contains this word.
    #[arg(long)]
    only: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn is_piece(&self) -> bool {
        !(self.part.is_empty() && self.trace.is_empty() && self.load.is_empty() && self.model.is_empty())
            || self.only.is_some()
    }

    /// The requested rules of a part.
    fn entries(&self, part: Part) -> impl Iterator<Item = &'static Entry> {
        part.entries()
            .iter()
            .filter(move |entry| self.only.as_ref().is_none_or(|word| entry.name.contains(word.as_str())))
    }
}

/// The requested values, or all of them.
fn selected<T: Copy>(asked: &[T], all: &[T]) -> Vec<T> {
    if asked.is_empty() { all.to_vec() } else { asked.to_vec() }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ModelName {
    Levels,
    Flows,
}

impl ModelName {
    fn model(self) -> Model {
        match self {
            ModelName::Levels => Model::Levels,
            ModelName::Flows => Model::Flows,
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let machine = machine(&root)?;
    let mut results = Results::open(args.json.as_ref().map(|file| root.join(file)), args.is_piece())?;
    for part in selected(&args.part, &Part::ALL) {
        for trace in selected(&args.trace, part.traces()) {
            for load in selected(&args.load, part.loads(trace)) {
                if part == Part::Pass {
                    let input = Input::read(&root, trace, load)?;
                    pass::measure(&args, part, &input, &machine, &mut results)?;
                    continue;
                }
                for model in selected(&args.model, &[ModelName::Levels, ModelName::Flows]) {
                    let input = Input::read(&root, trace, load)?;
                    replay_all(&args, &input, (part, model), &machine, &mut results)?;
                }
            }
        }
    }
    Ok(())
}

struct Input {
    trace: TraceName,
    load: f64,
    fabric: Fabric,
    rows: Vec<trace::Row>,
}

impl Input {
    fn read(root: &Path, trace: TraceName, load: f64) -> Result<Input, Box<dyn Error>> {
        let folder = root.join("tests/fixtures/traces");
        let hosts =
            trace.hosts().map(|file| Fabric::read(File::open(folder.join(file))?).map_err(Box::<dyn Error>::from));
        let hosts = hosts.transpose()?;
        let any = Fabric::regular(64, 8);
        let mut rows = read(File::open(folder.join(trace.file()))?, hosts.as_ref().unwrap_or(&any))?.rows;
        let gpu_seconds: f64 = rows.iter().map(|row| row.duration * f64::from(row.gpus)).sum();
        let window = rows.last().map_or(0.0, |row| row.submit);
        let fabric = match hosts {
            // The trace's own cluster was nearly empty: compress the arrival times.
            Some(hosts) => {
                let faster = load * window * f64::from(hosts.gpus()) / gpu_seconds;
                rows.iter_mut().for_each(|row| row.submit /= faster);
                hosts
            }
            None => Fabric::regular((gpu_seconds / window / load / 64.0).round() as usize, 8),
        };
        Ok(Input { trace, load, fabric, rows })
    }
}

fn replay_all(
    args: &Args,
    input: &Input,
    (part, model): (Part, ModelName),
    machine: &GPUTopology,
    results: &mut Results,
) -> Result<(), Box<dyn Error>> {
    let Input { trace, load, fabric, rows } = input;
    let (gpus, leaves) = (fabric.gpus(), fabric.leaves.len());
    println!(
        "\n{part:?}: {trace:?} at load {load}, {gpus} GPUs in {leaves} leaves, model {model:?}, {} inputs",
        args.seeds
    );
    println!("{}", row::HEADER);
    for entry in args.entries(part) {
        let begin = Instant::now();
        let (mut inputs, mut longest) = (Vec::new(), 0.0_f64);
        for seed in 0..args.seeds {
            let failures = part.failures().map(|failures| Failures { seed, ..failures });
            let (urgent, preemptible) = (part.urgent(), part.preemptible());
            let scenario =
                Scenario { fabric, model: model.model(), limits: entry.limits, failures, urgent, preemptible };
            let mut rule = (entry.make)(fabric, machine)?;
            let rows = if args.exact { rows.clone() } else { shaken(rows, seed) };
            let outcome = replay(&rows, scenario, rule.as_mut())?;
            longest = longest.max(outcome.longest.as_secs_f64() * 1e3);
            inputs.push(figures(&outcome, gpus, JobWindow::Middle));
        }
        let seconds = begin.elapsed().as_secs_f64() / args.seeds as f64;
        let row = Row { part, input, model, rule: entry.name, inputs: &inputs, seconds, longest };
        println!("{}", row.line());
        results.put(row.json()?)?;
    }
    Ok(())
}

/// Report of a machine with eight GPUs, NVSwitch and NICs, taken from the first node of an example.
fn machine(root: &Path) -> Result<GPUTopology, Box<dyn Error>> {
    let text = fs::read_to_string(root.join("examples/clusters/two-racks.json"))?;
    let cluster: serde_json::Value = serde_json::from_str(&text)?;
    let items = cluster["items"].as_array().ok_or("no items")?;
    let report = items.iter().find(|item| item["kind"] == "GPUTopology").ok_or("no report")?;
    Ok(serde_json::from_value(report.clone())?)
}
