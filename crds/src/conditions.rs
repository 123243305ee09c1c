//! Condition types and reasons as constants, so that clients can rely on their spelling.

/// Summary condition. `Unknown` while the job is unfinished, with the stage as reason; finally
/// `True`/`Complete` or `False`/`Failed`.
pub const SUCCEEDED: &str = "Succeeded";
/// `True` once every step is done.
pub const COMPLETE: &str = "Complete";
/// `True` once the job has failed permanently; the message states the root cause.
pub const FAILED: &str = "Failed";
/// Whether the whole gang is placed. The message of `False` names what is missing.
pub const PLACED: &str = "Placed";
/// Whether `spec.suspend` holds the job; `False` with the reason `Resumed` afterwards.
pub const SUSPENDED: &str = "Suspended";

/// Whether the requested transport is available and no preflight finding blocks the job. Absent if
/// the job needs no fabric, or before the first decision.
pub const FABRIC_READY: &str = "FabricReady";
/// `True` while a pod has other GPUs than planned, with less bandwidth; the message says how much.
/// Absent if this never happened.
pub const PLACEMENT_DEGRADED: &str = "PlacementDegraded";
/// Whether the autoscaler has provisioned the nodes that the gang requested through a
/// ProvisioningRequest; the message is the autoscaler's. Absent if none were requested.
pub const NODES_REQUESTED: &str = "NodesRequested";
/// `True` after the API server rejected an object or a patch without which the pods of a placed
/// gang cannot start; the message contains the server's response. For one hour the job is then
/// queued behind all others. `False` once all gates were lifted. Absent if this never happened.
pub const OBJECTS_REFUSED: &str = "ObjectsRefused";
/// `False` while this version of Switchyard cannot parse a job that another version started; the
/// message says why. Its pods keep running, and the controller leaves the job alone. Absent if the
/// job is readable.
pub const READABLE: &str = "Readable";
/// `False` while the API server rejects pods and the job waits a limited time for a change. The
/// transition time is the time of the first rejection. Absent if it rejects none.
pub const PODS_CREATED: &str = "PodsCreated";
/// `True` while the job makes optimizer steps; `False` with a reason otherwise. Absent if no step
/// has been reported.
pub const PROGRESSING: &str = "Progressing";
/// `True` while a rank is slower than the median of the others by 15 % over 100 steps; the message
/// names the rank and its node. Absent if this never happened.
pub const STRAGGLER: &str = "Straggler";
/// `True` while a GPU of the job needs attention: the driver reported an error, or its clocks or
/// its link are slow. The message names rank, node, GPU and problem. Absent if this never happened.
pub const GPU_TROUBLE: &str = "GPUTrouble";
/// `False` if settings of the template were ignored; the message lists them. Absent if none were.
pub const TEMPLATE_MERGED: &str = "TemplateMerged";

/// Reason of [`FAILED`]: the job exceeded its deadline.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// Reason of [`FAILED`]: the spec requests something impossible.
pub const INVALID_SPEC: &str = "InvalidSpec";
/// Reason of [`READABLE`]: this version does not know the value of a field.
pub const OTHER_VERSION: &str = "OtherVersion";
/// Reason of [`FAILED`]: the program failed, and its restart budget is exhausted.
pub const APPLICATION_FAILURE: &str = "ApplicationFailure";
/// Reason of [`FAILED`]: nodes or images failed, and the restart budget for that is exhausted.
pub const INFRASTRUCTURE_FAILURE: &str = "InfrastructureFailure";
/// Reason of [`PLACED`] while the gang does not fit.
pub const NO_ROOM: &str = "NoRoom";
/// Reason of [`PLACED`] while another job of the namespace gets the quota that the pods used.
pub const QUOTA: &str = "QuotaLeft";
/// Reason of [`PLACED`] while an object that the pods reference does not exist: a
/// PersistentVolumeClaim, a ResourceClaim or its template.
pub const ABSENT: &str = "ObjectMissing";
/// Reason of [`PLACED`] while other controllers, such as Kueue, hold the pods with their own gates.
pub const GATED: &str = "Gated";
/// Reason of [`PLACED`] after another client removed our scheduling gate from a pod before the gang
/// was placed.
pub const GATE_REMOVED: &str = "GateRemoved";
/// Reason of [`PLACED`] after the scheduler rejected a pod of the gang on its node.
pub const UNSCHEDULABLE: &str = "Unschedulable";
/// Reason of [`PLACED`] and [`OBJECTS_REFUSED`] after the API server rejected an object or a patch
/// that the pods of the gang need.
pub const REFUSED: &str = "Refused";
/// Reason of [`OBJECTS_REFUSED`] after the API server accepted everything.
pub const ACCEPTED: &str = "Accepted";
/// Reason of [`PLACED`] and [`FABRIC_READY`] while the job must not start, because of the fabric of
/// the nodes available to it.
pub const FABRIC_NOT_READY: &str = "FabricNotReady";
/// Reason of [`FABRIC_READY`] and [`FAILED`]: the ranks report a different transport than
/// predicted.
pub const TRANSPORT_DIFFERS: &str = "TransportDiffers";
/// Reason of [`FABRIC_READY`]: the ranks report the predicted transport.
pub const AS_FORECAST: &str = "AsForecast";
/// Reason of [`FABRIC_READY`]: the ranks measured less bandwidth than the job requires.
pub const SLOW_FABRIC: &str = "SlowFabric";
/// Reason of [`PROGRESSING`]: the job makes steps.
pub const STEPS_MADE: &str = "StepsMade";
/// Reason of [`PROGRESSING`]: a rank is hung. The message names the rank, its node, what it is
/// doing, and since when.
pub const HUNG: &str = "Hung";
/// Reason of [`PROGRESSING`]: no step has been reported for a long time.
pub const NO_PROGRESS: &str = "NoProgress";
/// Reason of [`STRAGGLER`]: a rank is slow.
pub const SLOW_RANK: &str = "SlowRank";
/// Reason of [`STRAGGLER`]: no rank is slow anymore.
pub const EVEN_PACE: &str = "EvenPace";
/// Reason of [`GPU_TROUBLE`]: the driver reported a critical error.
pub const XID_ERROR: &str = "XidError";
/// Reason of [`GPU_TROUBLE`]: the driver cannot reach the GPU.
pub const GPU_LOST: &str = "GPULost";
/// Reason of [`GPU_TROUBLE`]: its memory has errors that ECC could not correct.
pub const MEMORY_ERRORS: &str = "MemoryErrors";
/// Reason of [`GPU_TROUBLE`]: its clocks are throttled for much of the time.
pub const LOWERED_CLOCKS: &str = "LoweredClocks";
/// Reason of [`GPU_TROUBLE`]: its PCIe link uses fewer lanes than possible.
pub const NARROW_LINK: &str = "NarrowLink";
/// Reason of [`GPU_TROUBLE`]: the GPUs of the running attempt are healthy.
pub const GPUS_WELL: &str = "GPUsWell";
/// Reason of [`PLACED`] between two attempts.
pub const RESTARTING: &str = "Restarting";
/// Reason of [`FAILED`]: preempted more often than allowed.
pub const PREEMPTED: &str = "Preempted";
/// Reason of [`FAILED`]: a restart would fail in the same way.
pub const PERMANENT_FAILURE: &str = "PermanentFailure";
/// Reason of [`FAILED`]: a rule of the failure policy matched.
pub const FAILURE_POLICY: &str = "FailurePolicy";

/// Stage of an unfinished job. It is the reason of [`SUCCEEDED`] while that is `Unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for room, because the gang does not fit now.
    Queued,
    /// Choosing nodes, cores and devices.
    Placing,
    /// Processes are starting and connecting to each other.
    Starting,
    /// The job is training.
    Running,
    /// An attempt failed; the next one is starting.
    Restarting,
    /// The job succeeded.
    Complete,
    /// The job failed permanently.
    Failed,
    /// Stopped on request before completion.
    Suspended,
}

impl Stage {
    /// CamelCase name used as a condition's reason and in the STAGE column.
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
    /// Whether all sources were readable.
    pub const REPORTED: &str = "Reported";
    /// Whether the facts agree with each other; the message of `False` names the fields, with the
    /// actual and the expected values.
    pub const CONSISTENT: &str = "Consistent";
    /// Whether the facts are current. A dead agent cannot update this: see `observedTime`.
    pub const FRESH: &str = "Fresh";
}
