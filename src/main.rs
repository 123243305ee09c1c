//! The `switchyard` program: parses the command line and does what it says.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use switchyard::cli;

fn main() -> ExitCode {
    let cli = cli::parse();
    cli.apply_color();
    ExitCode::from(cli::execute(cli).code())
}
