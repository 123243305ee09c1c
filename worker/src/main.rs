//! The `switchyard-worker` program: one rank of a training job, or all of a pod.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use switchyard_worker::model::Registry;

fn main() -> ExitCode {
    switchyard_worker::program::main(&Registry::new())
}
