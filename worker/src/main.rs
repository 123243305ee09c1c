//! The `switchyard-worker` program: one rank of a training job, or all of a pod.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use switchyard_worker::model::Registry;

/// Text of `--version`. `cargo xtask` passes the commit, so that only this file is recompiled for a
/// new one.
const VERSION: &str = match option_env!("SWITCHYARD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    switchyard_worker::program::main_as(VERSION, &Registry::new())
}
