//! Kubernetes Events that report decisions. Reasons are constants because users and alerts match on
//! them.

use switchyard_crds::conditions;

/// Severity of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Severity {
    Normal,
    /// Needs a person's attention.
    Warning,
}

/// An event to send.
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

/// The whole gang is placed and its gates are lifted.
pub const PLACED: &str = "GangPlaced";
/// No room for the gang at present.
pub const NO_ROOM: &str = "NoRoom";
/// There is room, but the job must not start on the available fabric.
pub const FABRIC_NOT_READY: &str = "FabricNotReady";
/// The ranks report another transport than predicted.
pub const TRANSPORT_DIFFERS: &str = "TransportDiffers";
/// The ranks measured less bandwidth than the job requires.
pub const SLOW_FABRIC: &str = "SlowFabric";
/// A pod got other GPUs than planned.
pub const DEGRADED: &str = "PlacementDegraded";
/// The scheduler did not bind the whole gang in time; the attempt is rolled back.
pub const ROLLED_BACK: &str = "GangRolledBack";
/// The gang released its pods so that another job of the namespace can use the quota.
pub const QUOTA_LEFT: &str = "QuotaLeft";
pub const RUNNING: &str = "Running";
/// A pod was started without its gang.
pub const GATE_REMOVED: &str = conditions::GATE_REMOVED;
/// An attempt starts although a pod of an older one may still run.
pub const OLD_POD_MAY_RUN: &str = "OldPodMayRun";
/// A node of the job is cordoned, and the job stays there.
pub const NODE_CORDONED: &str = "NodeCordoned";
/// The gang is restarted.
pub const RESTARTING: &str = "Restarting";
/// `spec.suspend` became true.
pub const SUSPENDED: &str = "Suspended";
/// `spec.suspend` became false.
pub const RESUMED: &str = "Resumed";
pub const COMPLETE: &str = "Complete";
pub const FAILED: &str = "Failed";
/// Two settings conflict. The note says which one won.
pub const MERGE_CONFLICT: &str = "MergeConflict";
/// This version cannot read a job that another version started.
pub const UNREADABLE: &str = "Unreadable";
/// The API server refuses an object that the job needs.
pub const REFUSED: &str = "Refused";
