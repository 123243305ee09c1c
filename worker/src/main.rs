//! The `switchyard-worker` program: one rank of a training job.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use switchyard_worker::comm::{Aborter, GroupConfig};
use switchyard_worker::process::{self, variable};
use switchyard_worker::train::fault::Fault;
use switchyard_worker::train::{self, Blueprint, Reporter, TrainError};
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Failure};
use switchyard_worker_contract::exit::Exit;

/// One rank of a training job. Started by `switchyard run`, or in a pod.
#[derive(Debug, Parser)]
#[command(name = "switchyard-worker", version, about, after_long_help = help(), max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train as the rank that the environment names. Prints one JSON event per line.
    Train,
    /// Read an engine configuration (JSON) from standard input and print what would be trained, as JSON; starts nothing.
    Inspect,
}

fn main() -> ExitCode {
    let exit = match Cli::parse().command {
        Command::Train => train_rank(),
        Command::Inspect => inspect(),
    };
    ExitCode::from(exit.code())
}

/// `switchyard-worker inspect`
fn inspect() -> Exit {
    let found = || -> Result<String, TrainError> {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .map_err(|error| TrainError::Usage(format!("standard input: {error}")))?;
        let config = parse_config(&text, "standard input")?;
        GroupConfig::check_settings()?;
        variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
        let world = count(env::NUM_NODES)?.saturating_mul(count(env::PROCS_PER_NODE)?);
        let blueprint = Blueprint::new(&config, world, variable(env::KERNEL).as_deref())?;
        serde_json::to_string(&blueprint.inspection()).map_err(|error| TrainError::Usage(error.to_string()))
    };
    match found() {
        Ok(answer) => {
            println!("{answer}");
            Exit::Done
        }
        Err(error) => {
            eprintln!("error: {error}");
            error.exit(0)
        }
    }
}

/// `switchyard-worker train`
fn train_rank() -> Exit {
    let mut reporter = Reporter::new(std::io::stdout());
    if let Err(message) = process::follow_parent().and_then(|()| process::pin()) {
        eprintln!("error: {message}");
        return Exit::Usage;
    }
    let group = match GroupConfig::from_env() {
        Ok(group) => group,
        Err(error) => {
            eprintln!("error: {error}");
            return Exit::Usage;
        }
    };
    let rank = group.rank();
    let aborter = match process::stop_on_signal(rank) {
        Ok(aborter) => aborter,
        Err(error) => {
            eprintln!("error: cannot listen to signals: {error}");
            return Exit::Unexpected;
        }
    };
    let joined = |handle: Aborter| drop(aborter.set(handle));
    let outcome = catch_unwind(AssertUnwindSafe(|| train_group(&group, &mut reporter, joined)));
    let (failure, exit) = match outcome {
        Ok(Ok(())) => return Exit::Done,
        Ok(Err(error)) => describe(&error, rank),
        Err(panic) => {
            let text =
                panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
            let cause = format!("panicked: {}", text.unwrap_or("no message"));
            (failure(rank, rank, cause, String::new(), Exit::OwnFailure), Exit::OwnFailure)
        }
    };
    if !matches!(exit, Exit::Interrupted | Exit::Terminated) {
        eprintln!("error: rank {}: {}", failure.origin_rank, failure.cause);
    }
    reporter.event(&Event::Failed(failure));
    exit
}

fn train_group<W: std::io::Write>(
    group: &GroupConfig,
    reporter: &mut Reporter<W>,
    joined: impl FnOnce(Aborter),
) -> Result<(), TrainError> {
    let path =
        variable(env::CONFIG).ok_or_else(|| TrainError::Usage(format!("{}: not set; expected a path", env::CONFIG)))?;
    let text = std::fs::read_to_string(&path)
        .map_err(|error| TrainError::Usage(format!("{}: {path}: {error}", env::CONFIG)))?;
    let config = parse_config(&text, &path)?;
    let fault = variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
    let run_dir = PathBuf::from(variable(env::RUN_DIR).unwrap_or_else(|| ".".into()));
    let blueprint = Blueprint::new(&config, group.world(), variable(env::KERNEL).as_deref())?;
    train::run(blueprint, group, &run_dir, fault, reporter, joined)
}

fn describe(error: &TrainError, rank: u32) -> (Failure, Exit) {
    let exit = error.exit(rank);
    let told = match error {
        TrainError::Comm(error) => error.cause().cloned(),
        _ => None,
    };
    match told {
        Some(cause) => (failure(rank, cause.origin_rank, cause.text, cause.during, exit), exit),
        None => (failure(rank, rank, error.to_string(), String::new(), exit), exit),
    }
}

fn failure(rank: u32, origin_rank: u32, cause: String, during: String, exit: Exit) -> Failure {
    Failure { rank, origin_rank, cause, during, exit_code: exit.code() }
}

fn parse_config(text: &str, source: &str) -> Result<EngineConfig, TrainError> {
    serde_json::from_str(text)
        .map_err(|error| TrainError::Usage(format!("engine configuration from {source}: {error}")))
}

fn count(name: &str) -> Result<u32, TrainError> {
    let text = variable(name).unwrap_or_else(|| "1".into());
    text.parse()
        .ok()
        .filter(|count| *count > 0)
        .ok_or_else(|| TrainError::Usage(format!("{name}: got `{text}`; expected a number from 1 up")))
}

/// The environment and the exit codes, for `--help`.
fn help() -> String {
    let codes: Vec<String> = Exit::ALL.iter().map(|(exit, text)| format!("  {:>3}  {text}", exit.code())).collect();
    format!("Environment, set by the launcher:\n  {}\n\nExit codes:\n{}", env::ALL.join("\n  "), codes.join("\n"))
}
