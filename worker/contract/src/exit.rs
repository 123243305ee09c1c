//! Exit codes of `switchyard` and `switchyard-worker`, and descriptions of how a process exited.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Why a Switchyard process exited. The discriminant is its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Finished as requested.
    Done = 0,
    /// An unexpected failure: a bug, or a faulty machine.
    Unexpected = 1,
    /// Wrong command line or manifest.
    Usage = 2,
    /// Training data missing, unreadable, empty or too short.
    Data = 3,
    /// A peer failed; the printed root cause is on another rank.
    PeerFailure = 4,
    /// This rank (or, from the launcher, the job) failed on its own.
    OwnFailure = 5,
    /// A checkpoint was refused.
    CheckpointRefused = 6,
    /// Preflight refused the start.
    PreflightRefused = 7,
    /// The job cannot be placed on these nodes.
    NotPlaceable = 8,
    /// The loss or the gradients are not finite. Retrying the same manifest would give the same
    /// result.
    Diverged = 9,
    /// A rank hung for longer than the job allows.
    Hung = 10,
    /// Stopped by SIGINT, cleanly.
    Interrupted = 130,
    /// Stopped by SIGTERM, cleanly.
    Terminated = 143,
}

impl Exit {
    /// All codes with their descriptions for `--help`.
    pub const ALL: [(Exit, &'static str); 13] = [
        (Exit::Done, "done"),
        (Exit::Unexpected, "unexpected error"),
        (Exit::Usage, "wrong command line or manifest"),
        (Exit::Data, "training data missing, unreadable, empty or too short"),
        (Exit::PeerFailure, "a peer failed; the root cause is on another rank"),
        (Exit::OwnFailure, "the job, or this rank, failed"),
        (Exit::CheckpointRefused, "checkpoint refused"),
        (Exit::PreflightRefused, "preflight refused the start"),
        (Exit::NotPlaceable, "not placeable on these nodes"),
        (Exit::Diverged, "the training diverged: its loss or gradients are not finite"),
        (Exit::Hung, "a rank stood still for longer than failurePolicy.progressTimeoutSeconds"),
        (Exit::Interrupted, "stopped by SIGINT"),
        (Exit::Terminated, "stopped by SIGTERM"),
    ];

    /// The process's exit code.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The exit code with this number, if it is one of ours.
    pub fn from_code(code: i32) -> Option<Exit> {
        Self::ALL.iter().map(|(exit, _)| *exit).find(|exit| i32::from(exit.code()) == code)
    }

    /// Human-readable description.
    pub fn meaning(self) -> &'static str {
        Self::ALL.iter().find(|(exit, _)| *exit == self).map_or("", |(_, text)| text)
    }
}

/// Signals that kill training processes in practice, with their Linux numbers.
const SIGNAL_NAMES: [(i32, &str); 9] = [
    (1, "SIGHUP"),
    (2, "SIGINT"),
    (4, "SIGILL"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (9, "SIGKILL"),
    (11, "SIGSEGV"),
    (15, "SIGTERM"),
];

/// Describes how a process exited.
pub fn describe(status: ExitStatus) -> String {
    if let Some(signal) = status.signal() {
        let known = SIGNAL_NAMES.iter().find(|(number, _)| *number == signal);
        let name = known.map_or_else(String::new, |(_, name)| format!(" ({name})"));
        return format!("killed by signal {signal}{name}");
    }
    let code = status.code().unwrap_or_default();
    match Exit::from_code(code) {
        Some(exit) => format!("exit code {code}: {}", exit.meaning()),
        None => format!("exit code {code}"),
    }
}
