//! The `switchyard` program: parses the command line and does what it says.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use switchyard::cli::{self, Cli};

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.apply_color();
    ExitCode::from(cli::execute(cli).code())
}
