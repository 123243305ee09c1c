//! `gpu-probe`: which parts of CUDA are on this machine, and whether the calls that a GPU back end of the engine needs
//! work there.
//!
//! Every part runs in its own process with a time limit: a library that crashes or hangs is an outcome like any other.
//! CUDA is not linked, and a machine without a GPU is not an error ([docs/gpu-probe.md](../../../docs/gpu-probe.md)).
#![forbid(unsafe_code)]

mod child;
mod numbers;
mod outcome;
mod parts;
mod peaks;
mod show;
mod version;

use clap::Parser;
use outcome::Outcome;
use parts::{PARTS, Probe};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use switchyard_cuda::find::Places;

/// Which parts of CUDA are on this machine, and whether the calls that a GPU back end needs work there.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Write the result to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Without a GPU: compute capability to compile for, without the dot.
    #[arg(long, value_name = "NUMBER", default_value_t = 90)]
    sm: u32,
    /// Python interpreter whose packages to search, instead of those of VIRTUAL_ENV and PATH.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// Small sizes, for a driver that is a program: what is measured means nothing.
    #[arg(long)]
    rehearse: bool,
    /// Run one part in this process and print its outcome as one line of JSON.
    #[arg(long, value_name = "NAME", hide = true)]
    part: Option<String>,
}

/// The result of one part.
#[derive(Debug, Serialize)]
struct PartResult {
    part: &'static str,
    asks: &'static str,
    seconds: f64,
    #[serde(flatten)]
    outcome: Outcome,
}

/// The result file.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    cpu: Option<String>,
    parts: Vec<PartResult>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(name) = &arguments.part {
        return one(&arguments, name);
    }
    let mut results = Vec::new();
    for part in &PARTS {
        let start = Instant::now();
        let outcome = child::run(part.name, Duration::from_secs(part.limit));
        let result = PartResult {
            part: part.name,
            asks: part.asks,
            seconds: numbers::short(start.elapsed().as_secs_f64()),
            outcome,
        };
        say(&show::part(&result));
        results.push(result);
    }
    say(&show::summary(&results));
    let Some(file) = &arguments.json else { return ExitCode::SUCCESS };
    let benchmark = if arguments.rehearse { "gpu-probe rehearsal" } else { "gpu-probe" };
    let report = Report { benchmark, cpu: cpu(), parts: results };
    let text = serde_json::to_string_pretty(&report).map_err(|error| error.to_string());
    match text.and_then(|text| std::fs::write(file, text + "\n").map_err(|error| error.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-probe: cannot write {}: {error}", file.display());
            ExitCode::FAILURE
        }
    }
}

/// Runs one part, in the process that the probe started for it.
fn one(arguments: &Arguments, name: &str) -> ExitCode {
    let Some(part) = PARTS.iter().find(|part| part.name == name) else {
        eprintln!("gpu-probe: no part `{name}`");
        return ExitCode::FAILURE;
    };
    let places = Places::new(|name| std::env::var_os(name), Path::new("/"), arguments.python.as_deref());
    let probe = Probe { places, device: arguments.device, capability: arguments.sm, rehearse: arguments.rehearse };
    let outcome = Outcome::from((part.run)(&probe));
    match serde_json::to_string(&outcome) {
        Ok(line) => {
            // On its own line, whatever the libraries have printed.
            println!("\n{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("gpu-probe: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints. If the reader is gone the probe continues, since the result file may still be wanted.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn cpu() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).to_string())
}
