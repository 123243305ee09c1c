//! Group, version, and names that Switchyard uses in a cluster.

/// API group of every Switchyard kind.
pub const GROUP: &str = "training.switchyard.dev";
/// API version of every Switchyard kind.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of every Switchyard object.
pub const API_VERSION: &str = "training.switchyard.dev/v1alpha1";

/// Label of everything that belongs to a job: the job's name.
pub const JOB_NAME: &str = "training.switchyard.dev/job-name";
/// Label of everything that belongs to a job: the job's UID. A later job of the same name has a
/// different one.
pub const JOB_UID: &str = "training.switchyard.dev/job-uid";
/// Label of everything that belongs to one attempt: its number.
pub const ATTEMPT: &str = "training.switchyard.dev/attempt";
/// Label of a pod: the rank of its node in the job.
pub const NODE_RANK: &str = "training.switchyard.dev/node-rank";
/// Label of a pod: its lowest global rank.
pub const RANK: &str = "training.switchyard.dev/rank";
/// Label of a pod in a job with roles: the name of its role.
pub const ROLE: &str = "training.switchyard.dev/role";
/// Label of a pod in a job with roles: its index in the role, from 0.
pub const ROLE_INDEX: &str = "training.switchyard.dev/role-index";
/// Annotation of a pod with GPUs, set when it is placed: CPU lists of its ranks, separated by `;`.
pub const RANK_CPUS: &str = "training.switchyard.dev/rank-cpus";
/// Scheduling gate of every pod, lifted for the whole gang at once.
pub const GANG_GATE: &str = "training.switchyard.dev/gang";
/// Field manager for the objects of a job.
pub const PLAN_MANAGER: &str = "switchyard-plan";
/// Field manager for the status of a job.
pub const STATUS_MANAGER: &str = "switchyard-status";

/// The Lease through which controller replicas elect a leader.
pub const LEASE: &str = "switchyard-controller";
/// Annotation of the Lease: version of the leader.
pub const LEADER_VERSION: &str = "training.switchyard.dev/version";
/// Annotation of the Lease: `ok`, or the leader's findings about the admission policies. Absent
/// until it has tested them.
pub const LEADER_POLICIES: &str = "training.switchyard.dev/policies";
/// Annotation of the Lease: seconds by which the leader's clock is ahead of the API server's.
/// Absent while they agree.
pub const LEADER_CLOCK_SKEW: &str = "training.switchyard.dev/clock-skew-seconds";

/// Annotation of the Lease: state of the leader that no object holds, as JSON, for the next leader.
pub const LEADER_MEMORY: &str = "training.switchyard.dev/memory";

/// Annotation of a pod on the host network: the interface that reaches the other nodes.
pub const SOCKET_INTERFACE: &str = "training.switchyard.dev/socket-interface";
