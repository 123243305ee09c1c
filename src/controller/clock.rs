//! Skew between the clock of this machine and the API server's. Plans use the server's time, so
//! that a wrong clock does not end graces and deadlines early. Logs and certificates on this
//! machine are wrong nonetheless.

use super::Context;
use jiff::SignedDuration;
use std::time::Duration;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// Smaller skews are not reported, because certificates and tokens tolerate them.
const TOLERATED: SignedDuration = SignedDuration::from_secs(5);
/// Pause between two checks.
const PERIOD: Duration = Duration::from_secs(5);

/// The skew, if it is worth reporting.
pub(super) fn reportable(skew: SignedDuration) -> Option<SignedDuration> {
    Some(skew).filter(|skew| skew.abs() > TOLERATED)
}

/// Logs when the clock becomes wrong and when it is right again, until `stop` becomes true.
pub(super) async fn run(context: Context, mut stop: Receiver<bool>) {
    let mut was_wrong = false;
    while !*stop.borrow() {
        let skew = reportable(context.clock.skew());
        match skew {
            Some(skew) if !was_wrong => {
                let (seconds, direction) =
                    (skew.abs().as_secs(), if skew.is_positive() { "ahead of" } else { "behind" });
                warn!(
                    skew_seconds = skew.as_secs(),
                    "this machine's clock is {seconds} s {direction} the API server's; using the API server's time"
                );
            }
            None if was_wrong => info!("this machine's clock agrees with the API server's again"),
            _ => {}
        }
        was_wrong = skew.is_some();
        let _ = tokio::time::timeout(PERIOD, stop.wait_for(|stop| *stop)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skew_of_seconds_is_not_reported() {
        for (seconds, is_reported) in [(0, false), (5, false), (-5, false), (6, true), (-6, true), (600, true)] {
            assert_eq!(reportable(SignedDuration::from_secs(seconds)).is_some(), is_reported, "{seconds} s");
        }
    }
}
