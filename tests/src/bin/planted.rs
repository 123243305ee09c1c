//! `switchyard` with planted bugs, for the fault tests.
#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use switchyard::cli::{self, Cli};

fn main() -> ExitCode {
    ExitCode::from(cli::execute(Cli::parse()).code())
}
