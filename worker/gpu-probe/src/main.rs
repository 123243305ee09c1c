//! `gpu-probe`: checks what works on a GPU machine and how fast: the CUDA components that the
//! engine builds on, and the engine itself.
//!
//! ```text
//! parts ── child: one process per part, with a time limit ─┬─ driver, cuBLASLt, NVRTC, cuDNN, NCCL: calls of this program
//!   │                                                 ├─ worker: trains on the CPU and on the GPU
//!   v                                                 └─ torch: the same models in PyTorch
//! record: appends a line to results.jsonl per finished part; parts with results are skipped
//! ```
//!
//! Every part runs in its own process with a time limit, so a library that crashes or hangs is an
//! outcome like any other. CUDA is not linked, and a machine without a GPU is not an error
//! ([docs/dev/gpu-probe.md](../../../docs/dev/gpu-probe.md)).
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

/// Checks what works on a GPU machine, and how fast.
#[derive(Debug, Parser)]
#[command(version = version::OWN)]
struct Arguments {
    /// Append the results to `results.jsonl` in this folder. Parts that already have results there
    /// are skipped.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Run only these parts, even if they already have results.
    #[arg(long, value_name = "PART", value_parser = PossibleValuesParser::new(PARTS.iter().map(|part| part.name)))]
    only: Vec<String>,
    /// Skip the parts before this one.
    #[arg(long, value_name = "PART", conflicts_with = "only",
        value_parser = PossibleValuesParser::new(PARTS.iter().map(|part| part.name)))]
    from: Option<String>,
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Compute capability to compile for if there is no GPU, without the dot.
    #[arg(long, value_name = "NUMBER", default_value_t = 90)]
    sm: u32,
    /// Python interpreter whose packages to search, instead of those of VIRTUAL_ENV and PATH. Its
    /// PyTorch is benchmarked.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// The worker program [default: the switchyard-worker next to this program].
    #[arg(long, value_name = "FILE")]
    worker: Option<PathBuf>,
    /// Folder with the launches recorded on the executor [default: `vectors` next to this program].
    #[arg(long, value_name = "FOLDER")]
    vectors: Option<PathBuf>,
    /// Upper bound on the time limit of each part, in seconds.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Use small sizes, for the emulated driver. The measurements are meaningless.
    #[arg(long)]
    rehearse: bool,
    /// Run one part in this process and print its outcome as one line of JSON.
    #[arg(long, value_name = "NAME", hide = true)]
    part: Option<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(name) = &arguments.part {
        return run_part(&arguments, name);
    }
    let mut record = match Record::open(arguments.out.as_deref(), arguments.rehearse) {
        Ok(record) => record,
        Err(error) => return fail(&error),
    };
    if arguments.rehearse {
        say("rehearsal: the measurements are meaningless\n");
    }
    for part in arguments.selected() {
        let is_new = !arguments.only.is_empty() || !record.has(part.name);
        if let Err(error) = if is_new { record.add(arguments.run(part)) } else { Ok(()) } {
            return fail(&error);
        }
        say(&record.get(part.name).map(show::part).unwrap_or_default());
    }
    say(&show::summary(record.results()));
    ExitCode::SUCCESS
}

impl Arguments {
    /// The parts selected on the command line.
    fn selected(&self) -> impl Iterator<Item = &'static Part> {
        let is_first = |part: &Part| self.from.as_deref().is_none_or(|name| name == part.name);
        let is_named = |part: &Part| self.only.is_empty() || self.only.iter().any(|name| name == part.name);
        PARTS.iter().skip_while(move |part| !is_first(part)).filter(move |part| is_named(part))
    }

    /// Runs a part in its own process.
    fn run(&self, part: &Part) -> PartResult {
        let start = Instant::now();
        let limit = self.limit.map_or(part.limit, |limit| limit.min(part.limit));
        let outcome = child::run(part.name, Duration::from_secs(limit));
        PartResult {
            part: part.name.to_owned(),
            title: part.title.to_owned(),
            is_rehearsal: self.rehearse,
            seconds: numbers::short(start.elapsed().as_secs_f64()),
            outcome,
        }
    }
}

/// Runs one part; called in the process that the probe started for it.
fn run_part(arguments: &Arguments, name: &str) -> ExitCode {
    let Some(part) = PARTS.iter().find(|part| part.name == name) else {
        return fail(&format!("no part `{name}`"));
    };
    // Exit with the probe: nothing else reads the outcome.
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return fail(&format!("cannot follow the probe: {error}"));
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
            // On its own line, regardless of what the libraries have printed.
            println!("\n{line}");
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error.to_string()),
    }
}

fn fail(why: &str) -> ExitCode {
    eprintln!("gpu-probe: {why}");
    ExitCode::FAILURE
}

/// Prints, ignoring errors: if the reader is gone, the results may still be wanted.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
