//! The `switchyard-worker` program: one rank of a training job, or all of a pod.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use switchyard_worker::comm::{Aborter, CommError, GroupConfig};
use switchyard_worker::process::{self, variable};
use switchyard_worker::train::fault::Fault;
use switchyard_worker::train::{self, Blueprint, Reporter, TrainError, config};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Failure};
use switchyard_worker_contract::exit::Exit;

/// One rank of a training job, or all ranks of one node. Started by `switchyard run`, or in a pod.
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
    /// Start and watch all ranks of this node, as the main process of a pod: divides the CPUs among the ranks, hands on what
    /// they print, stops them on SIGTERM (25 s, then SIGKILL; at once on a second signal), reaps orphans, and leaves a
    /// termination message. Prints the events of rank 0 and, in its pod, a `summary` of where the job is every 5 s.
    Pod,
    /// Read an engine configuration (JSON) from standard input and print what would be trained, as JSON; starts nothing.
    Inspect,
}

fn main() -> ExitCode {
    let exit = match Cli::parse().command {
        Command::Train => train_rank().code(),
        Command::Pod => switchyard_worker::pod::run(),
        Command::Inspect => inspect().code(),
    };
    ExitCode::from(exit)
}

/// `switchyard-worker inspect`
fn inspect() -> Exit {
    let found = || -> Result<String, TrainError> {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .map_err(|error| TrainError::Usage(format!("standard input: {error}")))?;
        let config = config::parse(&text, "standard input")?;
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
    let config = config::from_env()?;
    let fault = variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
    let run_dir = PathBuf::from(variable(env::RUN_DIR).unwrap_or_else(|| ".".into()));
    let blueprint = Blueprint::new(&config, group.world(), variable(env::KERNEL).as_deref())?;
    train::run(blueprint, group, &run_dir, fault, reporter, joined)
}

fn describe(error: &TrainError, rank: u32) -> (Failure, Exit) {
    let exit = error.exit(rank);
    // Whoever did not come is the origin, as far as this rank knows.
    let origin = match error {
        TrainError::Comm(CommError::Failed(cause)) => {
            let told = failure(rank, cause.origin_rank, cause.text.clone(), cause.during.clone(), exit);
            return (told, exit);
        }
        TrainError::Comm(CommError::Missing { missing, .. }) => missing.first().copied().unwrap_or(rank),
        TrainError::Comm(CommError::Unreachable { .. }) => 0,
        _ => rank,
    };
    (failure(rank, origin, error.to_string(), String::new(), exit), exit)
}

fn failure(rank: u32, origin_rank: u32, cause: String, during: String, exit: Exit) -> Failure {
    Failure { rank, origin_rank, cause, during, exit_code: exit.code() }
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
