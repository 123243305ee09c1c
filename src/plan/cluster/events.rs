//! Decisions that are reported as Kubernetes Events. Reasons are constants: people and alerts match them.

use switchyard_crds::conditions;

/// Severity of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Severity {
    Normal,
    /// A person should check.
    Warning,
}

/// An event to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventDraft {
    pub severity: Severity,
    /// One of the constants of this module.
    pub reason: &'static str,
    pub note: String,
}

impl EventDraft {
    pub(super) fn normal(reason: &'static str, note: String) -> EventDraft {
        EventDraft { severity: Severity::Normal, reason, note }
    }

    pub fn warning(reason: &'static str, note: String) -> EventDraft {
        EventDraft { severity: Severity::Warning, reason, note }
    }
}

/// The whole gang has a place; its gates are lifted.
pub const PLACED: &str = "GangPlaced";
/// There is no room for the gang now.
pub const NO_ROOM: &str = "NoRoom";
/// There is room, but the job must not start over the fabric that is there.
pub const FABRIC_NOT_READY: &str = "FabricNotReady";
/// The ranks report another transport than predicted.
pub const TRANSPORT_DIFFERS: &str = "TransportDiffers";
/// The ranks measured less bandwidth than the job asks for.
pub const SLOW_FABRIC: &str = "SlowFabric";
/// A pod got other GPUs than the plan's.
pub const DEGRADED: &str = "PlacementDegraded";
/// The scheduler did not bind the whole gang in time; the attempt is rolled back.
pub const ROLLED_BACK: &str = "GangRolledBack";
/// The gang gave its pods back, so that another job of the namespace can use the quota.
pub const QUOTA_LEFT: &str = "QuotaLeft";
pub const RUNNING: &str = "Running";
/// A pod was started without its gang.
pub const GATE_REMOVED: &str = conditions::GATE_REMOVED;
/// An attempt starts although a pod of an older one may still run.
pub const OLD_POD_MAY_RUN: &str = "OldPodMayRun";
/// A node of the job is cordoned, and the job stays there.
pub const NODE_CORDONED: &str = "NodeCordoned";
/// The group is started again.
pub const RESTARTING: &str = "Restarting";
/// `spec.suspend` became true.
pub const SUSPENDED: &str = "Suspended";
/// `spec.suspend` became false.
pub const RESUMED: &str = "Resumed";
pub const COMPLETE: &str = "Complete";
pub const FAILED: &str = "Failed";
/// Two settings of the same thing, and which one won.
pub const MERGE_CONFLICT: &str = "MergeConflict";
/// This version cannot read the job, which another version began.
pub const UNREADABLE: &str = "Unreadable";
/// The API server refuses what the job needs.
pub const REFUSED: &str = "Refused";
