//! Group, version and the names under which Switchyard appears in a cluster.

/// API group of every kind of Switchyard.
pub const GROUP: &str = "training.switchyard.dev";
/// API version of every kind of Switchyard.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of every object of Switchyard.
pub const API_VERSION: &str = "training.switchyard.dev/v1alpha1";

/// Label of everything that belongs to a job: its name.
pub const JOB_NAME: &str = "training.switchyard.dev/job-name";
/// Label of everything that belongs to a job: its UID. A job of the same name created later has another one.
pub const JOB_UID: &str = "training.switchyard.dev/job-uid";
/// Label of what belongs to one attempt: its number.
pub const ATTEMPT: &str = "training.switchyard.dev/attempt";
/// Label of a pod: the position of its node in the job.
pub const NODE_RANK: &str = "training.switchyard.dev/node-rank";
/// Label of a pod: its lowest global rank.
pub const RANK: &str = "training.switchyard.dev/rank";
/// Annotation of a pod with GPUs, set with its place: CPU lists of its ranks, separated by `;`.
pub const RANK_CPUS: &str = "training.switchyard.dev/rank-cpus";
/// Scheduling gate of every pod, lifted for the whole gang at once.
pub const GANG_GATE: &str = "training.switchyard.dev/gang";
/// Field manager of the objects of a job.
pub const PLAN_MANAGER: &str = "switchyard-plan";
/// Field manager of the status of a job.
pub const STATUS_MANAGER: &str = "switchyard-status";

/// The Lease by which the replicas of the controller elect a leader.
pub const LEASE: &str = "switchyard-controller";
/// Annotation of the Lease: version of the leader.
pub const LEADER_VERSION: &str = "training.switchyard.dev/version";
/// Annotation of the Lease: `ok`, or what the leader found wrong with the admission policies. Absent until it has tried them.
pub const LEADER_POLICIES: &str = "training.switchyard.dev/policies";
/// Annotation of the Lease: seconds by which the leader's clock is ahead of the API server's. Absent while they agree.
pub const LEADER_CLOCK_SKEW: &str = "training.switchyard.dev/clock-skew-seconds";

/// Annotation of the Lease: state of the leader that no object holds, as JSON, for the next leader. Absent if there is none.
pub const LEADER_MEMORY: &str = "training.switchyard.dev/memory";

/// Annotation of a pod on the network of its node: the interface by which the other nodes are reached.
pub const SOCKET_INTERFACE: &str = "training.switchyard.dev/socket-interface";
