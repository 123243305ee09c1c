//! Condition types and reasons, as constants, so that a reader can rely on the words.

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

/// Whether the transport that the job asks for is there, and nothing that the preflight found blocks it. Absent: the job has no use for a
/// fabric, or nothing has been decided yet.
pub const FABRIC_READY: &str = "FabricReady";
/// `True` while a pod has other GPUs than the plan's, which are worth less; the message says how much. Absent: never so.
pub const PLACEMENT_DEGRADED: &str = "PlacementDegraded";
/// Whether the autoscaler has the nodes that the gang asks for, by a ProvisioningRequest; the message is what it said. Absent: none are asked for.
pub const NODES_REQUESTED: &str = "NodesRequested";
/// `True` after the API server refused an object or a patch without which the pods of a placed gang cannot start; the message holds the server's
/// words. For an hour the job then comes after all others. `False` once all gates were lifted. Absent: never so.
pub const OBJECTS_REFUSED: &str = "ObjectsRefused";
/// `False` while this version of Switchyard cannot read a job that another version began; the message says why. Its pods go on, and nothing is
/// done for it. Absent: it can be read.
pub const READABLE: &str = "Readable";
/// `False` while the API server refuses pods and the job waits a limited time for a change: the time of the transition is that of the first refusal.
/// Absent: it refuses none.
pub const PODS_CREATED: &str = "PodsCreated";
/// `True` while optimizer steps are made; `False` with the reason when none is. Absent: no step has been reported.
pub const PROGRESSING: &str = "Progressing";
/// `True` while a rank is slower than the median of the others by 15 % over 100 steps; the message names it and its node. Absent: never so.
pub const STRAGGLER: &str = "Straggler";
/// `True` while a person should look at a GPU of the job: the driver reported an error, or its clocks or its link are slow. The message names
/// rank, node, GPU and what it has met. Absent: never so.
pub const GPU_TROUBLE: &str = "GPUTrouble";
/// `False` when settings of the template were not taken; the message lists them. Absent: all were.
pub const TEMPLATE_MERGED: &str = "TemplateMerged";

/// Reason of [`FAILED`]: the job ran longer than it may.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// Reason of [`FAILED`]: the spec asks for something that cannot be.
pub const INVALID_SPEC: &str = "InvalidSpec";
/// Reason of [`READABLE`]: a field has a value that this version does not know.
pub const OTHER_VERSION: &str = "OtherVersion";
/// Reason of [`FAILED`]: the program failed, and its restarts are used up.
pub const APPLICATION_FAILURE: &str = "ApplicationFailure";
/// Reason of [`FAILED`]: nodes or images failed, and the restarts for that are used up.
pub const INFRASTRUCTURE_FAILURE: &str = "InfrastructureFailure";
/// Reason of [`PLACED`] while the gang does not fit.
pub const NO_ROOM: &str = "NoRoom";
/// Reason of [`PLACED`] while another job of the namespace gets the quota that the pods used.
pub const QUOTA: &str = "QuotaLeft";
/// Reason of [`PLACED`] while an object that the pods name does not exist: a PersistentVolumeClaim, a ResourceClaim or its template.
pub const ABSENT: &str = "ObjectMissing";
/// Reason of [`PLACED`] while others, such as Kueue, hold the pods by gates of their own.
pub const GATED: &str = "Gated";
/// Reason of [`PLACED`] after somebody removed our gate of a pod before the gang had a place.
pub const GATE_REMOVED: &str = "GateRemoved";
/// Reason of [`PLACED`] after the scheduler refused a pod of the gang on its node.
pub const UNSCHEDULABLE: &str = "Unschedulable";
/// Reason of [`PLACED`] and [`OBJECTS_REFUSED`] after the API server refused an object or a patch that the pods of the gang need.
pub const REFUSED: &str = "Refused";
/// Reason of [`OBJECTS_REFUSED`]: the API server accepted everything later.
pub const ACCEPTED: &str = "Accepted";
/// Reason of [`PLACED`] and [`FABRIC_READY`] while the job must not start over the fabric of the nodes that it could have.
pub const FABRIC_NOT_READY: &str = "FabricNotReady";
/// Reason of [`FABRIC_READY`] and [`FAILED`]: the ranks report another transport than predicted.
pub const TRANSPORT_DIFFERS: &str = "TransportDiffers";
/// Reason of [`FABRIC_READY`]: the ranks report the predicted transport.
pub const AS_FORECAST: &str = "AsForecast";
/// Reason of [`FABRIC_READY`]: the ranks measured less bandwidth than the job asks for.
pub const SLOW_FABRIC: &str = "SlowFabric";
/// Reason of [`PROGRESSING`]: steps are made.
pub const STEPS_MADE: &str = "StepsMade";
/// Reason of [`PROGRESSING`]: a rank stands still; the message names it, its node, what it does, and since when.
pub const HUNG: &str = "Hung";
/// Reason of [`PROGRESSING`]: no step has been reported for a long time.
pub const NO_PROGRESS: &str = "NoProgress";
/// Reason of [`STRAGGLER`]: a rank is slow.
pub const SLOW_RANK: &str = "SlowRank";
/// Reason of [`STRAGGLER`]: no rank is slow any more.
pub const EVEN_PACE: &str = "EvenPace";
/// Reason of [`GPU_TROUBLE`]: the driver reported a critical error.
pub const XID_ERROR: &str = "XidError";
/// Reason of [`GPU_TROUBLE`]: the driver cannot reach the GPU.
pub const GPU_LOST: &str = "GPULost";
/// Reason of [`GPU_TROUBLE`]: ECC could not mend an error of its memory.
pub const MEMORY_ERRORS: &str = "MemoryErrors";
/// Reason of [`GPU_TROUBLE`]: its clocks are lowered for much of the time.
pub const LOWERED_CLOCKS: &str = "LoweredClocks";
/// Reason of [`GPU_TROUBLE`]: its PCIe link uses fewer lanes than it could.
pub const NARROW_LINK: &str = "NarrowLink";
/// Reason of [`GPU_TROUBLE`]: the GPUs of the attempt that runs are well.
pub const GPUS_WELL: &str = "GPUsWell";
/// Reason of [`PLACED`] between two attempts.
pub const RESTARTING: &str = "Restarting";
/// Reason of [`FAILED`]: preempted more often than allowed.
pub const PREEMPTED: &str = "Preempted";
/// Reason of [`FAILED`]: the same thing would happen again.
pub const PERMANENT_FAILURE: &str = "PermanentFailure";
/// Reason of [`FAILED`]: a rule of the failure policy matched.
pub const FAILURE_POLICY: &str = "FailurePolicy";

/// Stage of an unfinished job: the reason of [`SUCCEEDED`] while it is `Unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for room: the gang does not fit now.
    Queued,
    /// Choosing nodes, cores and devices.
    Placing,
    /// Processes start and find each other.
    Starting,
    /// The job is training.
    Running,
    /// An attempt failed; the next one starts.
    Restarting,
    /// The job succeeded.
    Complete,
    /// The job failed for good.
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

/// Conditions of a `GPUTopology`.
pub mod topology {
    /// Whether all sources could be read.
    pub const REPORTED: &str = "Reported";
    /// Whether the facts agree with each other; the message of `False` names fields, what was got and what was expected.
    pub const CONSISTENT: &str = "Consistent";
    /// Whether the facts are of now. An agent that is dead cannot say so: see `observedTime`.
    pub const FRESH: &str = "Fresh";
}
