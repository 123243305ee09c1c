//! One operation's turn on a lane: its surroundings, and how it fails.

use super::{
    error::Cause,
    state::{Progress, Shared},
};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why an operation did not complete.
pub(super) enum Broken {
    /// The group failed; the root cause is known or about to be.
    Elsewhere,
    /// A data connection ended. Most likely its peer died, and rank 0 will say so.
    Lane(Cause),
    /// This rank knows the cause.
    Because(Cause),
}

/// What an operation needs to know about its surroundings.
pub(super) struct Turn<'a> {
    pub shared: &'a Shared,
    pub progress: &'a Progress,
    /// Factor of numbers that travel in f16; `None`: they travel in 4 bytes.
    pub wire_scale: Option<f32>,
    /// On the communication thread.
    pub background: bool,
    /// The caller sleeps until an operation has finished.
    pub caller_parked: &'a AtomicBool,
}

impl Turn<'_> {
    /// No other thread of this rank could use the CPU now, except its other lanes.
    pub fn in_front(&self) -> bool {
        !self.background || self.caller_parked.load(Ordering::Relaxed)
    }
}
