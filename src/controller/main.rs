//! Entry point of the controller image.

#![forbid(unsafe_code)]

use clap::{CommandFactory, FromArgMatches, Parser};
use std::process::ExitCode;
use switchyard_controller::daemon::{ControllerArgs, start};

/// Reconciles the TrainJobs of a cluster. The same as `switchyard controller`, without the other
/// commands.
#[derive(Debug, Parser)]
#[command(name = "switchyard-controller", version, about, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    controller: ControllerArgs,
}

/// Text of `--version`; `cargo xtask` sets the commit.
const VERSION: &str = match option_env!("SWITCHYARD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    let matches = Arguments::command().version(VERSION).get_matches();
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match start(&arguments.controller) {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(failure) => {
            let has_code = failure.message.starts_with("error[");
            eprintln!("{}{failure}", if has_code { "" } else { "error: " });
            ExitCode::from(failure.exit.code())
        }
    }
}
