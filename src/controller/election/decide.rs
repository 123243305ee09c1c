//! What a candidate does, from what it saw. Pure.

use std::time::Duration;

/// Times of the election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A Lease that nobody renews for this long is free.
    pub duration: Duration,
    /// A leader that could not renew for this long stops. Shorter than `duration`.
    pub renew_deadline: Duration,
    /// Pause between two tries.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        // Kubernetes' own controllers have 15 s, 10 s and 2 s. Gangs in the middle of their start wait for the next leader, and correctness does not
        // depend on the election, so this one waits for less long.
        Timing {
            duration: Duration::from_secs(10),
            renew_deadline: Duration::from_secs(7),
            retry: Duration::from_secs(2),
        }
    }
}

/// What this candidate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Waits for the Lease to become free.
    Standby,
    /// Holds it.
    Leading {
        /// When the last successful write was begun, since the machine started.
        renewed: Duration,
    },
}

/// What this process knows about the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen<'a> {
    /// Who held it last; empty: nobody.
    pub holder: &'a str,
    /// For how long this process has seen it say the same.
    pub unchanged: Duration,
    /// How long its holder may lead without renewing it.
    pub lasts: Duration,
}

/// What to do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Write our name into the Lease: make, take or renew it.
    Write,
    /// Look again after this time at the latest.
    Wait(Duration),
    /// Stop leading, and why.
    StepDown(String),
}

/// Decides. `now` is time since the machine started, also while it sleeps or the process is stopped.
pub(super) fn decide(me: &str, now: Duration, role: Role, seen: Seen<'_>, timing: &Timing) -> Action {
    let is_free = seen.holder.is_empty() || seen.holder == me;
    match role {
        Role::Leading { renewed } if now.saturating_sub(renewed) >= timing.renew_deadline => {
            Action::StepDown("the Lease was not renewed in time".into())
        }
        Role::Leading { .. } if !is_free => Action::StepDown(format!("`{}` holds the Lease", seen.holder)),
        // Emptied or deleted: our write fails if another candidate was faster.
        Role::Leading { .. } => Action::Write,
        Role::Standby if is_free => Action::Write,
        // Also when the Lease was deleted: its holder may lead on until it notices.
        Role::Standby if seen.unchanged >= seen.lasts => Action::Write,
        Role::Standby => Action::Wait(timing.retry.min(seen.lasts - seen.unchanged)),
    }
}
