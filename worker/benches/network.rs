//! Collectives and trainings on a slow network, compared with gloo through PyTorch and with Open
//! MPI: `cargo xtask bench network`.
//!
//! Each rank has its own network namespace, a host behind a switch, and every link passes at most
//! the given rate in each direction. All sides pin ranks to the cores round-robin. All sides
//! of a case alternate in rounds. Needs root.
//!
//! - `links`: all-reduce by size at 1 and 10 Gbit/s, next to plain TCP streams around the ring,
//!   which are the limit of these links and cores.
//! - `model`: steps of a model of 250 MB on four hosts at 1 Gbit/s, for each remedy, with the real
//!   programs through `switchyard run --hosts`. The time beyond computation is the step minus the
//!   step of the same job that exchanges nothing.
//! - `servers`: parameter servers with one worker behind half of the rate.
//! - `loss`: validation loss after equal samples, on one host.

#[path = "network/hosts.rs"]
mod hosts;
#[path = "network/links.rs"]
mod links;
#[path = "network/loss.rs"]
mod loss;
#[allow(dead_code)] // The benchmark of the engine can also limit kernels.
#[path = "engine/machine.rs"]
mod machine;
#[path = "network/model.rs"]
mod model;
#[path = "network/mpi.rs"]
mod mpi;
#[path = "../tests/collective_support/rank.rs"]
mod rank;
#[path = "network/role.rs"]
mod role;
#[path = "network/servers.rs"]
mod servers;
#[path = "network/training.rs"]
mod training;

use clap::{Parser, ValueEnum};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

#[derive(Parser)]
struct Options {
    /// Parts to run; the others keep their rows in the result file [default: all].
    #[arg(long, value_enum)]
    part: Vec<Part>,
    /// Number of alternating rounds.
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Where to write the results.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Folder of `switchyard` and `switchyard-worker`.
    #[arg(long)]
    programs: PathBuf,
    /// A Python with torch; without it gloo is left out.
    #[arg(long)]
    python: Option<PathBuf>,
    /// A Python with mpi4py, next to its `mpirun`; without it Open MPI is left out.
    #[arg(long)]
    mpi: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Links,
    Model,
    Servers,
    Loss,
}

fn main() -> ExitCode {
    let outcome = match std::env::var(role::VARIABLE) {
        Ok(role) => role::run(&role),
        Err(_) => run(&Options::parse()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("network: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Outcome<()> {
    let kernels = machine::Kernels::of(false)?;
    let machine = machine::Machine::probe(kernels);
    println!("{machine}");
    let old = options.json.as_ref().and_then(|file| std::fs::read(file).ok());
    let mut document = old.and_then(|old| serde_json::from_slice(&old).ok()).unwrap_or_else(|| json!({}));
    document["command"] = "cargo xtask bench network".into();
    // `debug` is the profile of local runs, in which only the engine is optimised.
    document["profile"] = options.programs.file_name().map_or(Value::Null, |name| name.to_string_lossy().into());
    let parts = if options.part.is_empty() { Part::value_variants() } else { &options.part };
    for part in parts {
        let rows = match part {
            Part::Links => links::measure(options)?,
            Part::Model => model::measure(options)?,
            Part::Servers => servers::measure(options)?,
            Part::Loss => loss::measure(options)?,
        };
        let name = part.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        let after = machine::Machine::probe(kernels);
        document[name] =
            with(rows, json!({"rounds": options.rounds, "machine": machine.json(), "after": after.json()}));
        println!("# {}", after.noise());
        if let Some(file) = &options.json {
            // After each part, because a run takes long and can be interrupted.
            std::fs::write(file, serde_json::to_string_pretty(&document)? + "\n")?;
        }
    }
    Ok(())
}

/// `value` with the fields of `more`, object by object.
pub fn with(mut value: Value, more: Value) -> Value {
    match (&mut value, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (name, more) in more {
                let old = into.remove(&name).unwrap_or_default();
                into.insert(name, with(old, more));
            }
            value
        }
        (_, more) => more,
    }
}

/// Middle of the sorted numbers; for an even count the mean of the middle two.
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

/// The least and the greatest of the numbers.
pub fn range(numbers: &[f64]) -> [f64; 2] {
    numbers.iter().fold([f64::INFINITY, f64::NEG_INFINITY], |[least, most], &x| [least.min(x), most.max(x)])
}
