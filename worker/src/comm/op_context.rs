//! Context and errors of one operation on a lane.

use super::{
    error::Cause,
    state::{Progress, Shared},
};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why an operation did not complete.
pub(super) enum OpError {
    /// The group failed; the root cause is known or about to be.
    GroupFailed,
    /// A data connection ended. Most likely the peer died, and rank 0 will report that.
    LaneLost(Cause),
    /// This rank knows the cause.
    Known(Cause),
}

/// What an operation needs besides its data.
pub(super) struct OpContext<'a> {
    pub shared: &'a Shared,
    pub progress: &'a Progress,
    /// Factor for values sent as f16; `None`: values are sent as f32.
    pub wire_scale: Option<f32>,
    /// Runs on the communication thread.
    pub background: bool,
    /// The caller sleeps until an operation has finished.
    pub caller_parked: &'a AtomicBool,
}

impl OpContext<'_> {
    /// Whether no other thread of this rank could use the CPU now, except its other lanes.
    pub fn in_foreground(&self) -> bool {
        !self.background || self.caller_parked.load(Ordering::Relaxed)
    }
}
