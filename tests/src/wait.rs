//! Waiting for events: polls until a condition holds, with an error at the deadline.

use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

/// Time between two polls, short against the seconds that a controller or an API server needs.
const POLL: Duration = Duration::from_millis(50);

/// Waits until `condition` holds. Returns the elapsed time.
///
/// # Errors
/// `condition` failed, or did not hold within `timeout`.
pub fn until(what: &str, timeout: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<Duration> {
    let begin = Instant::now();
    while !condition()? {
        ensure!(begin.elapsed() < timeout, "not {what} after {} s", timeout.as_secs());
        std::thread::sleep(POLL);
    }
    Ok(begin.elapsed())
}

/// [`until`] for asynchronous conditions.
///
/// # Errors
/// Those of [`until`].
pub async fn until_async(
    what: &str,
    timeout: Duration,
    mut condition: impl AsyncFnMut() -> Result<bool>,
) -> Result<Duration> {
    let begin = Instant::now();
    while !condition().await? {
        ensure!(begin.elapsed() < timeout, "not {what} after {} s", timeout.as_secs());
        tokio::time::sleep(POLL).await;
    }
    Ok(begin.elapsed())
}
