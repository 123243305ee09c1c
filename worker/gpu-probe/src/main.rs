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

mod budget;
mod child;
mod clocks;
mod cpu_losses;
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

use budget::{Allowance, Budget};
use clap::Parser;
use clap::builder::PossibleValuesParser;
use clocks::Clocks;
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
    /// File with the losses recorded on a CPU [default: `cpu-losses.json` next to this program].
    /// What it lacks is trained on the CPU of this machine.
    #[arg(long, value_name = "FILE")]
    cpu_losses: Option<PathBuf>,
    /// Train on the CPU what the parts compare with, write the losses to this file, and exit.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["out", "only", "from", "budget", "cpu_losses"])]
    record_cpu_losses: Option<PathBuf>,
    /// Upper bound on the time limit of each part, in seconds.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Run the most valuable parts that are expected to finish within this time, in seconds. The
    /// others are listed as skipped, and run when the same command is repeated.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(10..))]
    budget: Option<u64>,
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
    if let Some(file) = &arguments.record_cpu_losses {
        let recorded = record_cpu_losses(&arguments, file);
        scratch::remove(std::process::id());
        return recorded.map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS);
    }
    let mut record = match Record::open(arguments.out.as_deref(), arguments.rehearse) {
        Ok(record) => record,
        Err(error) => return fail(&error),
    };
    if arguments.rehearse {
        say("rehearsal: the measurements are meaningless\n");
    }
    let clocks = arguments.out.as_deref().map(Clocks::start).transpose();
    if let Err(error) = &clocks {
        say(&format!("no clocks are recorded: nvidia-smi: {error}\n"));
    }
    let ended = arguments.run_all(&mut record);
    scratch::remove(std::process::id());
    if let Err(error) = ended {
        return fail(&error);
    }
    say(&show::summary(record.results()));
    ExitCode::SUCCESS
}

impl Arguments {
    /// What the parts need to know.
    fn probe(&self) -> Probe {
        Probe {
            places: Places::new(|name| std::env::var_os(name), Path::new("/"), self.python.as_deref()),
            device: self.device,
            python: self.python.clone(),
            worker: self.worker.clone(),
            vectors: self.vectors.clone(),
            cpu_losses: self.cpu_losses.clone(),
            out: self.out.clone(),
            rehearse: self.rehearse,
        }
    }

    /// The parts selected on the command line.
    fn selected(&self) -> impl Iterator<Item = &'static Part> {
        let is_first = |part: &Part| self.from.as_deref().is_none_or(|name| name == part.name);
        let is_named = |part: &Part| self.only.is_empty() || self.only.iter().any(|name| name == part.name);
        PARTS.iter().skip_while(move |part| !is_first(part)).filter(move |part| is_named(part))
    }

    /// Runs the selected parts that have no result yet, as far as the budget allows.
    fn run_all(&self, record: &mut Record) -> Result<(), String> {
        let cache = self.cache().map_err(|error| format!("cannot create a folder for kernels: {error}"))?;
        let mut budget = Budget::new(self.budget, self.rehearse);
        for part in self.selected() {
            if !self.only.is_empty() || !record.has(part.name) {
                record.add(match budget.admit(part.expected) {
                    Ok(allowance) => {
                        budget.charge(part.expected);
                        self.run(part, allowance, &cache)
                    }
                    Err(reason) => self.result(part, 0.0, Outcome::Skipped { reason }),
                })?;
            }
            say(&record.get(part.name).map(show::part).unwrap_or_default());
        }
        Ok(())
    }

    /// The cache of compiled kernels and chosen algorithms, shared by all parts.
    fn cache(&self) -> std::io::Result<PathBuf> {
        match &self.out {
            Some(out) => std::path::absolute(out.join("cache")),
            None => scratch::folder("cache"),
        }
    }

    /// Runs a part in its own process.
    fn run(&self, part: &Part, allowance: Allowance, cache: &Path) -> PartResult {
        let start = Instant::now();
        let own = self.limit.map_or(part.limit, |limit| limit.min(part.limit));
        let (limit, is_cut) = allowance.limit(Duration::from_secs(own));
        let outcome = match child::run(part.name, limit, cache) {
            Outcome::Failed { call, .. } if is_cut && call == child::TIME_LIMIT => {
                let text = format!("was stopped after {} s at the end of the budget", limit.as_secs());
                Outcome::Skipped { reason: format!("{text}; it was expected to take {} s", part.expected) }
            }
            outcome => outcome,
        };
        self.result(part, start.elapsed().as_secs_f64(), outcome)
    }

    fn result(&self, part: &Part, seconds: f64, outcome: Outcome) -> PartResult {
        PartResult {
            part: part.name.to_owned(),
            title: part.title.to_owned(),
            is_rehearsal: self.rehearse,
            seconds: numbers::short(seconds),
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
    let outcome = Outcome::from((part.run)(&arguments.probe()));
    match serde_json::to_string(&outcome) {
        Ok(line) => {
            // On its own line, regardless of what the libraries have printed.
            println!("\n{line}");
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error.to_string()),
    }
}

/// Writes the losses of CPU trainings to a file.
fn record_cpu_losses(arguments: &Arguments, file: &Path) -> Result<(), String> {
    let recorded = parts::record_cpu_losses(&arguments.probe()).map_err(|outcome| show::line(&outcome))?;
    let text = serde_json::to_string(&recorded).map_err(|error| error.to_string())? + "\n";
    std::fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

fn fail(why: &str) -> ExitCode {
    eprintln!("gpu-probe: {why}");
    ExitCode::FAILURE
}

/// Prints, ignoring errors: if the reader is gone, the results may still be wanted.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
