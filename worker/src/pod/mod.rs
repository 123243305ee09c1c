//! The pod supervisor: runs all ranks of one node of a job, as the main process of a pod.
//!
//! ```text
//! environment -> settings (checked once for all ranks) -> cores -> ranks (start, reap, end)
//!                                                                     |
//!          termination message <- verdict (pure) <- supervise <- output (events, text, summaries)
//! ```
//!
//! In a cluster, the controller and these supervisors do what `switchyard run` does on one machine.
//! A supervisor decides nothing about the job: it starts its ranks, forwards their output, ends
//! them, and writes a termination message with the reason. It has no dependency on Kubernetes: the
//! termination message is a file.
//!
//! As process 1 it is the parent of every orphan and reaps them. If it is not process 1 (a process
//! namespace shared with other containers, or a test), it becomes a child subreaper.

mod cores;
mod output;
mod ranks;
mod settings;
mod supervise;
mod verdict;

use settings::Settings;
use std::io::Write;
use std::path::{Path, PathBuf};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::Failure;
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::termination::Termination;

/// Default path of a container's termination message.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Runs `switchyard-worker pod`; returns the pod's exit code.
pub fn run() -> u8 {
    let termination = match Settings::from_env() {
        Ok(settings) => supervise::supervise(settings)
            .unwrap_or_else(|error| refuse(Exit::Unexpected, format!("the supervisor failed: {error}"))),
        Err(error) => refuse(error.exit(0), error.to_string()),
    };
    if let Err(error) = write_termination(&termination) {
        eprintln!("warning: no termination message: {error}");
    }
    termination.exit_code
}

/// Termination message of a pod whose ranks could not be started or supervised.
fn refuse(exit: Exit, cause: String) -> Termination {
    eprintln!("error: {cause}");
    let rank = Settings::first_rank_of_env();
    let failure = Failure { rank, origin_rank: rank, cause, during: String::new(), exit_code: exit.code() };
    Termination { exit_code: exit.code(), summary: None, failure: Some(failure) }
}

fn write_termination(termination: &Termination) -> Result<(), String> {
    let named = crate::process::variable(env::TERMINATION_LOG).map(PathBuf::from);
    // In a pod the default file already exists; elsewhere it must not be created.
    let (path, create) = match &named {
        Some(path) => (path.as_path(), true),
        None => (Path::new(TERMINATION_LOG), false),
    };
    if !create && !path.exists() {
        return Ok(());
    }
    // Write in place: the file is a mount and cannot be replaced.
    let open = std::fs::OpenOptions::new().write(true).truncate(true).create(create).open(path);
    open.and_then(|mut file| file.write_all(termination.message().as_bytes()))
        .map_err(|error| format!("{}: {error}", path.display()))
}
