//! The `switchyard-worker` program as a library: your own program calls [`main`] with its own
//! networks.

mod rank;
mod software;

use crate::comm::GroupConfig;
use crate::model::Registry;
use crate::process::variable;
use crate::train::fault::Fault;
use crate::train::{self, Blueprint, TrainError, config};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::prediction::Gpu;

/// One rank of a training job, or all ranks of one node. Started by `switchyard run`, or in a pod.
#[derive(Debug, Parser)]
#[command(name = "switchyard-worker", version, about, after_long_help = help(), max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train as the rank defined by the environment, or as several ranks in one process. Prints one
    /// JSON event per line.
    Train,
    /// Hold and update a part of the weights: the parameter server that the environment defines.
    Serve,
    /// Start and supervise all ranks of this node, as the main process of a pod: divides the CPUs
    /// among the ranks, forwards their output, stops them on SIGTERM (SIGKILL after 25 s, or at
    /// once on a second signal), reaps orphans, and writes a termination message. Prints the events
    /// of rank 0 and, in its pod, a `summary` of the job's progress every 5 s.
    Pod,
    /// Read an engine configuration (JSON) from standard input and print the training plan, as
    /// JSON, without starting anything.
    Inspect,
    /// Read an engine configuration (JSON) from standard input and print a lower bound for the time
    /// of each operation of a step on a GPU, as JSON; needs no GPU.
    Predict {
        /// GPU rates (JSON).
        #[arg(long, value_name = "FILE")]
        device: PathBuf,
    },
    /// Print the libraries and GPUs available to GPU jobs on this machine, as JSON.
    Gpu,
}

/// The whole program: parses the arguments, runs the command, returns the exit code. `registry`:
/// the networks that jobs can use.
pub fn main(registry: &Registry) -> ExitCode {
    main_as(env!("CARGO_PKG_VERSION"), registry)
}

/// [`main`] for a program with its own version, which `--version` prints.
pub fn main_as(version: &'static str, registry: &Registry) -> ExitCode {
    let matches = Cli::command().version(version).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let exit = match cli.command {
        Command::Train => rank::train(registry).code(),
        Command::Serve => rank::serve().code(),
        Command::Pod => crate::pod::run(),
        Command::Inspect => print_result(inspect(registry)).code(),
        Command::Predict { device } => print_result(predict(&device, registry)).code(),
        Command::Gpu => print_result(json(&software::software())).code(),
    };
    ExitCode::from(exit)
}

/// `switchyard-worker inspect`
fn inspect(registry: &Registry) -> Result<String, TrainError> {
    let (config, world) = read_config()?;
    GroupConfig::check_settings()?;
    variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
    let dataset = train::open(&config)?;
    let blueprint = Blueprint::new(&config, dataset, (world, 0), variable(env::KERNEL).as_deref(), registry)?;
    json(&blueprint.inspection()?)
}

/// `switchyard-worker predict`
fn predict(device: &Path, registry: &Registry) -> Result<String, TrainError> {
    let name = device.display().to_string();
    let text =
        std::fs::read_to_string(device).map_err(|error| TrainError::Usage(format!("device file {name}: {error}")))?;
    let gpu = Gpu::parse(&text, &name).map_err(|error| TrainError::Usage(error.to_string()))?;
    let (config, world) = read_config()?;
    json(&train::predict(&config, train::open(&config)?, world, gpu, registry)?)
}

/// Reads the configuration from standard input; also returns the number of ranks.
fn read_config() -> Result<(EngineConfig, u32), TrainError> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| TrainError::Usage(format!("standard input: {error}")))?;
    let config = config::parse(&text, "standard input")?;
    Ok((config, count(env::NUM_NODES)?.saturating_mul(count(env::PROCS_PER_NODE)?)))
}

fn json(value: &impl Serialize) -> Result<String, TrainError> {
    serde_json::to_string(value).map_err(|error| TrainError::Usage(error.to_string()))
}

/// Prints the result or the error.
fn print_result(result: Result<String, TrainError>) -> Exit {
    match result {
        Ok(text) => {
            println!("{text}");
            Exit::Done
        }
        Err(error) => {
            eprintln!("error: {error}");
            error.exit(0)
        }
    }
}

fn count(name: &str) -> Result<u32, TrainError> {
    let text = variable(name).unwrap_or_else(|| "1".into());
    text.parse()
        .ok()
        .filter(|count| *count > 0)
        .ok_or_else(|| TrainError::Usage(format!("{name}: got `{text}`; expected a number from 1 up")))
}

/// Environment variables and exit codes, for `--help`.
fn help() -> String {
    let codes: Vec<String> = Exit::ALL.iter().map(|(exit, text)| format!("  {:>3}  {text}", exit.code())).collect();
    format!("Environment, set by the launcher:\n  {}\n\nExit codes:\n{}", env::ALL.join("\n  "), codes.join("\n"))
}
