//! Names of the environment variables a rank reads. All are set by the launcher.

/// Name of the TrainJob.
pub const JOB: &str = "SWITCHYARD_JOB";
/// Attempt number, from 1. It is mixed into every handshake: a process of an older attempt cannot join a newer one.
pub const ATTEMPT: &str = "SWITCHYARD_ATTEMPT";
/// Rank of this node (pod), from 0.
pub const NODE_RANK: &str = "SWITCHYARD_NODE_RANK";
/// Number of nodes (pods) of the job.
pub const NUM_NODES: &str = "SWITCHYARD_NUM_NODES";
/// Processes on each node.
pub const PROCS_PER_NODE: &str = "SWITCHYARD_PROCS_PER_NODE";
/// Rank of this process on its node, from 0. The global rank is `NODE_RANK * PROCS_PER_NODE + LOCAL_RANK`.
pub const LOCAL_RANK: &str = "SWITCHYARD_LOCAL_RANK";
/// `ADDRESS:PORT` where rank 0 listens and all others connect. Rank 0 listens on this address only;
/// when its standard input is a socket that already listens there (inetd style), it uses that one.
pub const RENDEZVOUS: &str = "SWITCHYARD_RENDEZVOUS";
/// Path of the engine configuration: [`crate::config::EngineConfig`] as JSON.
pub const CONFIG: &str = "SWITCHYARD_CONFIG";
/// Path of the job token: 32 random bytes, mode 0600. The token itself is never in argv or the environment.
pub const KEY_FILE: &str = "SWITCHYARD_KEY_FILE";
/// Directory for what this run leaves behind (trained model).
pub const RUN_DIR: &str = "SWITCHYARD_RUN_DIR";
/// Logical CPUs this rank is pinned to, as a kernel CPU list (`0-3,8`). Absent: not pinned.
pub const CPUS: &str = "SWITCHYARD_CPUS";
/// Process id of the launcher. When it dies, the rank ends itself. Absent: the rank outlives its parent.
pub const PARENT_PID: &str = "SWITCHYARD_PARENT_PID";
/// Forces the transport: `auto` (default), `shm` or `tcp`. See [`crate::config::Transport`].
pub const TRANSPORT: &str = "SWITCHYARD_TRANSPORT";
/// Overrides the host identity by which ranks find out that they share memory. For tests of several hosts on one machine.
pub const HOST_ID: &str = "SWITCHYARD_HOST_ID";
/// Forces the CPU kernels: `auto` (default), `avx512`, `avx2` or `portable`.
pub const KERNEL: &str = "SWITCHYARD_KERNEL";
/// Seconds without any sign of life of a peer after which it counts as failed. Default 10.
pub const PEER_TIMEOUT_SECONDS: &str = "SWITCHYARD_PEER_TIMEOUT_SECONDS";

/// Path of the file that becomes the container's termination message: [`crate::event::Termination`] as JSON. Absent: none is
/// written.
pub const TERMINATION_LOG: &str = "SWITCHYARD_TERMINATION_LOG";

/// Every name above, for checks that a manifest does not set one of them by accident.
pub const ALL: [&str; 18] = [
    JOB,
    ATTEMPT,
    NODE_RANK,
    NUM_NODES,
    PROCS_PER_NODE,
    LOCAL_RANK,
    RENDEZVOUS,
    CONFIG,
    KEY_FILE,
    RUN_DIR,
    CPUS,
    PARENT_PID,
    TRANSPORT,
    HOST_ID,
    KERNEL,
    PEER_TIMEOUT_SECONDS,
    FAULT,
    TERMINATION_LOG,
];

/// Fault injection for tests: `exit:STEP`, `kill:STEP`, `hang:STEP` or `panic:STEP`, with an optional `@RANK` and `#ATTEMPT`
/// (`kill:20@1#1`). The rank does it to itself before that step.
pub const FAULT: &str = "SWITCHYARD_FAULT";

/// The names a user may set in `trainer.env`: they tune a rank without changing who it is.
pub const USER_SETTABLE: [&str; 5] = [TRANSPORT, HOST_ID, KERNEL, PEER_TIMEOUT_SECONDS, FAULT];
