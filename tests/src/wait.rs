//! Waiting for events: polls until a condition holds, with an error at the deadline.

use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

/// Time between two polls, short against the seconds that a controller or an API server needs.
const POLL: Duration = Duration::from_millis(50);

/// Waits until `is` holds. Returns the elapsed time.
///
/// # Errors
/// `is` failed, or did not hold within `deadline`.
pub fn until(what: &str, deadline: Duration, mut is: impl FnMut() -> Result<bool>) -> Result<Duration> {
    let begin = Instant::now();
    while !is()? {
        ensure!(begin.elapsed() < deadline, "not {what} after {} s", deadline.as_secs());
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
    deadline: Duration,
    mut is: impl AsyncFnMut() -> Result<bool>,
) -> Result<Duration> {
    let begin = Instant::now();
    while !is().await? {
        ensure!(begin.elapsed() < deadline, "not {what} after {} s", deadline.as_secs());
        tokio::time::sleep(POLL).await;
    }
    Ok(begin.elapsed())
}
