//! The event loop of commands that start processes.

use crate::failure::Failure;
use tokio::runtime::{Builder, Runtime};

/// Creates an event loop that runs on this thread.
pub(crate) fn event_loop() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::unexpected(format!("cannot start the event loop: {error}")))
}
