//! The worker, so that the tests of the probe have it beside them: what `switchyard-worker` does, and nothing else.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use switchyard_worker::model::Registry;

fn main() -> ExitCode {
    switchyard_worker::program::main(&Registry::new())
}
