//! Condition types and reasons of a TrainJob, as constants, so that a reader can rely on the words.

/// Summary condition: `Unknown` while unfinished with the stage as reason, `True`/`Complete` or `False`/`Failed` at the end.
pub const SUCCEEDED: &str = "Succeeded";
/// `True` once every step is done.
pub const COMPLETE: &str = "Complete";
/// `True` once the job is given up; the message holds the root cause.
pub const FAILED: &str = "Failed";
/// Whether the whole gang has a place; `False` names what is missing.
pub const PLACED: &str = "Placed";
/// Whether `spec.suspend` holds the job; `False` with the reason `Resumed` after it did.
pub const SUSPENDED: &str = "Suspended";

/// Stage of an unfinished job: the reason of [`SUCCEEDED`] while it is `Unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for room: the gang does not fit now.
    Queued,
    /// Choosing nodes, cores and devices.
    Placing,
    /// Processes start and find each other.
    Starting,
    /// Steps are being done.
    Running,
    /// An attempt failed; the next one starts.
    Restarting,
    /// Ended well.
    Complete,
    /// Given up.
    Failed,
    /// Stopped on request before the end.
    Suspended,
}

impl Stage {
    /// The CamelCase word used as a condition's reason and in the STAGE column.
    pub fn reason(self) -> &'static str {
        match self {
            Stage::Queued => "Queued",
            Stage::Placing => "Placing",
            Stage::Starting => "Starting",
            Stage::Running => "Running",
            Stage::Restarting => "Restarting",
            Stage::Complete => "Complete",
            Stage::Failed => "Failed",
            Stage::Suspended => "Suspended",
        }
    }
}
