//! A worker program with one more network than `switchyard-worker`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    switchyard_worker::program::main(&switchyard_example_custom_model::registry())
}
