//! The supervisor: all ranks of one node of a job, as the main process of a pod.
//!
//! ```text
//! environment -> settings (checked once, for all ranks) -> cores (who gets which) -> ranks (started, reaped, ended)
//!                                                                                      |
//!                termination message <- verdict (pure) <- supervise <- output (events, text, summaries)
//! ```
//!
//! What `switchyard run` is on one machine, the controller and these supervisors are in a cluster. A supervisor decides
//! nothing about the job: it starts its ranks, passes on what they print, ends them, and leaves a message that says why.
//! It does not know Kubernetes: the termination message is a file.
//!
//! As process 1 it is the parent of every orphan and reaps them. If it is not process 1 (a process namespace shared with
//! other containers, or a test), it asks the kernel for the same role.

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

/// `switchyard-worker pod`: the exit code of the pod.
pub fn run() -> u8 {
    let termination = match Settings::from_env() {
        Ok(settings) => supervise::supervise(settings)
            .unwrap_or_else(|error| refuse(Exit::Unexpected, format!("the supervisor failed: {error}"))),
        Err(error) => refuse(error.exit(0), error.to_string()),
    };
    if let Err(error) = leave(&termination) {
        eprintln!("warning: no termination message: {error}");
    }
    termination.exit_code
}

/// The termination message of a pod whose ranks were not started, or not watched.
fn refuse(exit: Exit, cause: String) -> Termination {
    eprintln!("error: {cause}");
    let rank = Settings::first_rank_of_env();
    let failure = Failure { rank, origin_rank: rank, cause, during: String::new(), exit_code: exit.code() };
    Termination { exit_code: exit.code(), summary: None, failure: Some(failure) }
}

fn leave(termination: &Termination) -> Result<(), String> {
    let named = crate::process::variable(env::TERMINATION_LOG).map(PathBuf::from);
    // In a pod the default file already exists; elsewhere it is not wanted.
    let (path, create) = match &named {
        Some(path) => (path.as_path(), true),
        None => (Path::new(TERMINATION_LOG), false),
    };
    if !create && !path.exists() {
        return Ok(());
    }
    // In place: the file is a mount and cannot be replaced.
    let open = std::fs::OpenOptions::new().write(true).truncate(true).create(create).open(path);
    open.and_then(|mut file| file.write_all(termination.message().as_bytes()))
        .map_err(|error| format!("{}: {error}", path.display()))
}
