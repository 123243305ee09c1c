//! Command failures.

use std::fmt::Display;
use switchyard_local::RunError;
use switchyard_worker_contract::exit::Exit;

/// The message for standard error, and the exit code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub message: String,
    pub exit: Exit,
}

impl Failure {
    pub(crate) fn new(message: impl Display, exit: Exit) -> Failure {
        Failure { message: message.to_string(), exit }
    }

    /// The command line, or a file that it names, is wrong.
    pub(crate) fn usage(message: impl Display) -> Failure {
        Failure::new(message, Exit::Usage)
    }

    /// The machine, the network or this program failed.
    pub(crate) fn unexpected(message: impl Display) -> Failure {
        Failure::new(message, Exit::Unexpected)
    }

    /// Prints the message and returns the exit code. A message that starts with an error code gets
    /// no prefix.
    pub(crate) fn print(&self) -> Exit {
        let has_code = anstream::adapter::strip_str(&self.message).to_string().starts_with("error[");
        anstream::eprintln!("{}{}", if has_code { "" } else { "error: " }, self.message);
        self.exit
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        Failure::new(&error, error.exit())
    }
}

impl From<switchyard_controller::daemon::Failure> for Failure {
    fn from(failure: switchyard_controller::daemon::Failure) -> Failure {
        Failure::new(failure.message, failure.exit)
    }
}
