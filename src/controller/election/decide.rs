//! Decides what a candidate does next. Pure.

use std::time::Duration;

/// Timing of the election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A Lease that is not renewed for this long is free.
    pub duration: Duration,
    /// A leader that could not renew the Lease for this long stops. Shorter than `duration`.
    pub renew_deadline: Duration,
    /// Pause between two tries.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        // Kubernetes' own controllers use 15 s, 10 s and 2 s. These are shorter, because gangs that
        // are starting wait for the next leader and correctness does not depend on the election.
        Timing {
            duration: Duration::from_secs(10),
            renew_deadline: Duration::from_secs(7),
            retry: Duration::from_secs(2),
        }
    }
}

/// Role of this candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Waits for the Lease to become free.
    Standby,
    /// Holds the Lease.
    Leading {
        /// Start of the last successful write, as time since boot.
        renewed: Duration,
    },
}

/// This process's view of the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeaseView<'a> {
    /// Identity of the last holder; empty if none.
    pub holder: &'a str,
    /// How long this process has seen it unchanged.
    pub unchanged: Duration,
    /// How long its holder may lead without renewing it.
    pub valid_for: Duration,
}

/// The next action of a candidate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Write our identity into the Lease: create, acquire or renew it.
    Write,
    /// Read the Lease again after this time at the latest.
    Wait(Duration),
    /// Stop leading, with the reason.
    StepDown(String),
}

/// Decides on the next action. `now` is time since boot, which includes suspension of the machine
/// or the process.
pub(super) fn decide(identity: &str, now: Duration, role: Role, lease: LeaseView<'_>, timing: &Timing) -> Action {
    let is_free = lease.holder.is_empty() || lease.holder == identity;
    match role {
        Role::Leading { renewed } if now.saturating_sub(renewed) >= timing.renew_deadline => {
            Action::StepDown("the Lease was not renewed in time".into())
        }
        Role::Leading { .. } if !is_free => Action::StepDown(format!("`{}` holds the Lease", lease.holder)),
        // If the Lease was cleared or deleted, our write fails if another candidate was faster.
        Role::Leading { .. } => Action::Write,
        Role::Standby if is_free => Action::Write,
        // This applies to a deleted Lease, too, because its holder may lead until it notices.
        Role::Standby if lease.unchanged >= lease.valid_for => Action::Write,
        Role::Standby => Action::Wait(timing.retry.min(lease.valid_for - lease.unchanged)),
    }
}
