//! Names of the environment variables that the worker reads. The process that starts the worker sets them: `switchyard
//! run`, the controller for a pod, or the supervisor in a pod for its ranks.

/// Name of the TrainJob.
pub const JOB: &str = "SWITCHYARD_JOB";
/// Attempt number, counted from 1. It is part of every handshake: a process of an older attempt cannot join a newer
/// one.
pub const ATTEMPT: &str = "SWITCHYARD_ATTEMPT";
/// Rank of this node (pod), counted from 0.
pub const NODE_RANK: &str = "SWITCHYARD_NODE_RANK";
/// Number of nodes (pods) of the job.
pub const NUM_NODES: &str = "SWITCHYARD_NUM_NODES";
/// Ranks per node: processes, or the devices of a single process.
pub const PROCS_PER_NODE: &str = "SWITCHYARD_PROCS_PER_NODE";
/// Rank of this process on its node, counted from 0. The global rank is `NODE_RANK * PROCS_PER_NODE + LOCAL_RANK`; a
/// process that computes several ranks (`devicesPerProcess`) has this one and the following ones.
pub const LOCAL_RANK: &str = "SWITCHYARD_LOCAL_RANK";
/// `ADDRESS:PORT` where rank 0 listens and to which all others connect. Rank 0 listens on this address only; if its
/// standard input is a socket that already listens there (inetd style), it uses that one. A name is resolved again on
/// every try. The supervisor of a job's only pod needs none and chooses its own.
pub const RENDEZVOUS: &str = "SWITCHYARD_RENDEZVOUS";
/// Path of the engine configuration: [`crate::config::EngineConfig`] as JSON.
pub const CONFIG: &str = "SWITCHYARD_CONFIG";
/// Path of the job token: 32 random bytes that only this user, or a group that was given access to the file, can read.
/// The token itself is never in argv or the environment. The supervisor of a job's only pod creates one.
pub const KEY_FILE: &str = "SWITCHYARD_KEY_FILE";
/// Directory for the results of this run (trained model).
pub const RUN_DIR: &str = "SWITCHYARD_RUN_DIR";
/// Logical CPUs that this rank is pinned to, as a kernel CPU list (`0-3,8`). Absent: not pinned.
pub const CPUS: &str = "SWITCHYARD_CPUS";
/// CPU lists of all ranks of a pod with GPUs, in the order of local ranks and separated by `;`: cores near the GPU of
/// each. For launchers of other frameworks. Empty if they are unknown.
pub const RANK_CPUS: &str = "SWITCHYARD_RANK_CPUS";
/// Compute threads of this rank if the configuration says 0. Absent: as many as the CPUs that the rank may run on.
pub const CPU_THREADS: &str = "SWITCHYARD_CPU_THREADS";
/// Process id of the launcher. When it dies, the rank ends too. Absent: the rank outlives its parent.
pub const PARENT_PID: &str = "SWITCHYARD_PARENT_PID";
/// Forces the transport: `auto` (default), `shm` or `tcp`. See [`crate::config::Transport`].
pub const TRANSPORT: &str = "SWITCHYARD_TRANSPORT";
/// Overrides the host identity by which ranks detect that they share memory. For tests of several hosts on one machine.
pub const HOST_ID: &str = "SWITCHYARD_HOST_ID";
/// Forces the CPU kernels: `auto` (default), `amx`, `avx512bf16`, `avx512`, `avx2` or `portable`. With `auto`, rank 0 chooses how
/// bf16 is multiplied on all ranks, among the ways that all of them have.
pub const KERNEL: &str = "SWITCHYARD_KERNEL";
/// Folder for kernels that were compiled for GPUs, and algorithms that were chosen for them; `none`: nothing is kept.
/// Default: `switchyard/gpu` in the folder of the user's caches (`XDG_CACHE_HOME`, else `~/.cache`). One that cannot be
/// written is no error.
pub const GPU_CACHE: &str = "SWITCHYARD_GPU_CACHE";
/// Seconds of silence after which a peer counts as failed. Default 10.
pub const PEER_TIMEOUT_SECONDS: &str = "SWITCHYARD_PEER_TIMEOUT_SECONDS";
/// Seconds within which all ranks must have joined, counted by each rank from when it has read its data. Default 300.
pub const CONNECT_TIMEOUT_SECONDS: &str = "SWITCHYARD_CONNECT_TIMEOUT_SECONDS";
/// File that gets the [`crate::termination::Termination`] of a pod. Default `/dev/termination-log`, if it exists.
pub const TERMINATION_LOG: &str = "SWITCHYARD_TERMINATION_LOG";

/// Every name above, for checks that a manifest does not set one of them by accident.
pub const ALL: [&str; 22] = [
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
    RANK_CPUS,
    CPU_THREADS,
    PARENT_PID,
    TRANSPORT,
    HOST_ID,
    KERNEL,
    GPU_CACHE,
    PEER_TIMEOUT_SECONDS,
    CONNECT_TIMEOUT_SECONDS,
    TERMINATION_LOG,
    FAULT,
];

/// Fault injection for tests: `exit:STEP`, `kill:STEP`, `hang:STEP`, `stall:STEP` or `panic:STEP`, with an optional `@RANK` and
/// `#ATTEMPT` (`kill:20@1#1`). The rank inflicts it on itself before that step.
pub const FAULT: &str = "SWITCHYARD_FAULT";

/// The names a user may set in `trainer.env`: they tune a rank without changing who it is.
pub const USER_SETTABLE: [&str; 7] =
    [TRANSPORT, HOST_ID, KERNEL, GPU_CACHE, PEER_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS, FAULT];
