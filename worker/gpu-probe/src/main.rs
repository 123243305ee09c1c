//! `gpu-probe`: what works on a machine with a GPU, and how fast: the parts of CUDA that the engine is built on, and the engine itself.
//!
//! ```text
//! parts ── child: a process of its own, with a limit ─┬─ driver, cuBLASLt, NVRTC, cuDNN, NCCL: calls of this program
//!   │                                                 ├─ worker: trains on the CPU and on the GPU
//!   v                                                 └─ torch: the same models in PyTorch
//! record: a line of results.jsonl when it ends; what is there is not done again
//! ```
//!
//! Every part runs in its own process with a time limit: a library that crashes or hangs is an outcome like any other.
//! CUDA is not linked, and a machine without a GPU is not an error ([docs/dev/gpu-probe.md](../../../docs/dev/gpu-probe.md)).
#![forbid(unsafe_code)]

mod child;
mod jobs;
mod numbers;
mod outcome;
mod parts;
mod peaks;
mod record;
mod scratch;
mod show;
mod torch;
mod version;
mod worker;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use outcome::{Outcome, PartResult};
use parts::{PARTS, Part, Probe};
use record::Record;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use switchyard_cuda::find::Places;

/// What works on a machine with a GPU, and how fast.
#[derive(Debug, Parser)]
#[command(version = version::OWN)]
struct Arguments {
    /// Append the results to `results.jsonl` in this folder. Parts whose results are there are not run again.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Run these parts only, also if their results are there.
    #[arg(long, value_name = "PART", value_parser = PossibleValuesParser::new(PARTS.iter().map(|part| part.name)))]
    only: Vec<String>,
    /// Leave out the parts before this one.
    #[arg(long, value_name = "PART", conflicts_with = "only",
        value_parser = PossibleValuesParser::new(PARTS.iter().map(|part| part.name)))]
    from: Option<String>,
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Without a GPU: compute capability to compile for, without the dot.
    #[arg(long, value_name = "NUMBER", default_value_t = 90)]
    sm: u32,
    /// Python interpreter whose packages to search, instead of those of VIRTUAL_ENV and PATH; its PyTorch is measured.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// The program that trains; the switchyard-worker beside this one if not given.
    #[arg(long, value_name = "FILE")]
    worker: Option<PathBuf>,
    /// Folder of the launches that were recorded on the executor; `vectors` beside this program if not given.
    #[arg(long, value_name = "FOLDER")]
    vectors: Option<PathBuf>,
    /// The most seconds of a part, where its own limit is longer.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Small sizes, for a driver that is a program: what is measured means nothing.
    #[arg(long)]
    rehearse: bool,
    /// Run one part in this process and print its outcome as one line of JSON.
    #[arg(long, value_name = "NAME", hide = true)]
    part: Option<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(name) = &arguments.part {
        return one(&arguments, name);
    }
    let mut record = match Record::open(arguments.out.as_deref(), arguments.rehearse) {
        Ok(record) => record,
        Err(error) => return refused(&error),
    };
    if arguments.rehearse {
        say("a rehearsal: what is measured means nothing\n");
    }
    for part in arguments.chosen() {
        let is_new = !arguments.only.is_empty() || !record.has(part.name);
        if let Err(error) = if is_new { record.add(arguments.run(part)) } else { Ok(()) } {
            return refused(&error);
        }
        say(&record.get(part.name).map(show::part).unwrap_or_default());
    }
    say(&show::summary(record.results()));
    ExitCode::SUCCESS
}

impl Arguments {
    /// The parts that are to have a result.
    fn chosen(&self) -> impl Iterator<Item = &'static Part> {
        let is_first = |part: &Part| self.from.as_deref().is_none_or(|name| name == part.name);
        let is_named = |part: &Part| self.only.is_empty() || self.only.iter().any(|name| name == part.name);
        PARTS.iter().skip_while(move |part| !is_first(part)).filter(move |part| is_named(part))
    }

    /// Runs a part in a process of its own.
    fn run(&self, part: &Part) -> PartResult {
        let start = Instant::now();
        let limit = self.limit.map_or(part.limit, |limit| limit.min(part.limit));
        let outcome = child::run(part.name, Duration::from_secs(limit));
        PartResult {
            part: part.name.to_owned(),
            asks: part.asks.to_owned(),
            is_rehearsal: self.rehearse,
            seconds: numbers::short(start.elapsed().as_secs_f64()),
            outcome,
        }
    }
}

/// Runs one part, in the process that the probe started for it.
fn one(arguments: &Arguments, name: &str) -> ExitCode {
    let Some(part) = PARTS.iter().find(|part| part.name == name) else {
        return refused(&format!("no part `{name}`"));
    };
    // Without the probe there is nobody to report to.
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return refused(&format!("cannot follow the probe: {error}"));
    }
    let probe = Probe {
        places: Places::new(|name| std::env::var_os(name), Path::new("/"), arguments.python.as_deref()),
        device: arguments.device,
        capability: arguments.sm,
        python: arguments.python.clone(),
        worker: arguments.worker.clone(),
        vectors: arguments.vectors.clone(),
        rehearse: arguments.rehearse,
    };
    let outcome = Outcome::from((part.run)(&probe));
    match serde_json::to_string(&outcome) {
        Ok(line) => {
            // On its own line, whatever the libraries have printed.
            println!("\n{line}");
            ExitCode::SUCCESS
        }
        Err(error) => refused(&error.to_string()),
    }
}

fn refused(why: &str) -> ExitCode {
    eprintln!("gpu-probe: {why}");
    ExitCode::FAILURE
}

/// Prints. If the reader is gone the probe continues, since the results may still be wanted.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
