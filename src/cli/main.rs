//! The `switchyard` program: parses the command line and does what it says.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use switchyard_cli::{self as cli, Cli};

/// What `--version` prints. `cargo xtask` passes the commit that is built; only this file is
/// compiled again for another one.
const VERSION: &str = match option_env!("SWITCHYARD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    let cli = Cli::parse_as(VERSION);
    cli.apply_color();
    ExitCode::from(cli::execute(cli).code())
}
