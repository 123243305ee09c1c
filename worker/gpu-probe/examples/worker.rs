//! Builds the worker next to the probe for its tests. Behaves exactly like `switchyard-worker`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use switchyard_worker::model::Registry;

fn main() -> ExitCode {
    switchyard_worker::program::main(&Registry::new())
}
