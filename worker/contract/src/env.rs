//! Environment variables read by the worker. The process that starts the worker sets them:
//! `switchyard run`, the controller for a pod, or a pod's supervisor for its ranks.

/// Name of the TrainJob.
pub const JOB: &str = "SWITCHYARD_JOB";
/// Attempt number, from 1. Part of every handshake, so that a process of an older attempt cannot
/// join a newer one.
pub const ATTEMPT: &str = "SWITCHYARD_ATTEMPT";
/// Rank of this node (pod), from 0.
pub const NODE_RANK: &str = "SWITCHYARD_NODE_RANK";
/// Number of nodes (pods) of the job.
pub const NUM_NODES: &str = "SWITCHYARD_NUM_NODES";
/// Ranks per node: processes, or the devices of a single process.
pub const PROCS_PER_NODE: &str = "SWITCHYARD_PROCS_PER_NODE";
/// Rank of this process on its node, from 0. The global rank is `NODE_RANK * PROCS_PER_NODE +
/// LOCAL_RANK`. A process that hosts several ranks (`devicesPerProcess`) has this one and the
/// following ones.
pub const LOCAL_RANK: &str = "SWITCHYARD_LOCAL_RANK";
/// Number of this parameter server, from 0, in a process of its own: `switchyard-worker serve`.
/// Instead of `NODE_RANK` and `LOCAL_RANK`.
pub const SERVER: &str = "SWITCHYARD_SERVER";
/// `ADDRESS:PORT` that rank 0 listens on and all others connect to. Rank 0 binds only this address;
/// if its standard input is a socket already listening there (inetd style), it uses that one. Names
/// are resolved again on every connection attempt. The supervisor of a single-pod job needs none
/// and picks its own.
pub const RENDEZVOUS: &str = "SWITCHYARD_RENDEZVOUS";
/// Path of the engine configuration: [`crate::config::EngineConfig`] as JSON.
pub const CONFIG: &str = "SWITCHYARD_CONFIG";
/// Path of the job token: 32 random bytes, readable only by this user or a group with access to the
/// file. The token itself is never in argv or the environment. The supervisor of a single-pod job
/// creates one.
pub const KEY_FILE: &str = "SWITCHYARD_KEY_FILE";
/// Directory for the results of this run (trained model).
pub const RUN_DIR: &str = "SWITCHYARD_RUN_DIR";
/// Logical CPUs that this rank is pinned to, as a kernel CPU list (`0-3,8`). Absent: not pinned.
pub const CPUS: &str = "SWITCHYARD_CPUS";
/// CPU lists of all ranks of a pod with GPUs, in local-rank order, separated by `;`: the cores near
/// each rank's GPU. For launchers of other frameworks. Empty if unknown.
pub const RANK_CPUS: &str = "SWITCHYARD_RANK_CPUS";
/// Compute threads of this rank if the configuration says 0. Absent: one per CPU that the rank may
/// run on.
pub const CPU_THREADS: &str = "SWITCHYARD_CPU_THREADS";
/// Process ID of the launcher. When it dies, the rank exits. Absent: the rank outlives its parent.
pub const PARENT_PID: &str = "SWITCHYARD_PARENT_PID";
/// Forces the transport: `auto` (default), `shm` or `tcp`. See [`crate::config::Transport`].
pub const TRANSPORT: &str = "SWITCHYARD_TRANSPORT";
/// Overrides the host identity that ranks use to detect shared memory. Lets tests simulate several
/// hosts on one machine.
pub const HOST_ID: &str = "SWITCHYARD_HOST_ID";
/// Forces the CPU kernels: `auto` (default), `amx`, `avx512bf16`, `avx512`, `avx2` or `portable`.
/// With `auto`, rank 0 chooses the bf16 multiplication among those that all ranks support.
pub const KERNEL: &str = "SWITCHYARD_KERNEL";
/// Cache directory for compiled GPU kernels and algorithm choices; `none` disables the cache.
/// Default: `switchyard/gpu` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`). An
/// unwritable directory is not an error.
pub const GPU_CACHE: &str = "SWITCHYARD_GPU_CACHE";
/// Seconds of silence after which a peer counts as failed. Default 10.
pub const PEER_TIMEOUT_SECONDS: &str = "SWITCHYARD_PEER_TIMEOUT_SECONDS";
/// Seconds within which all ranks must have joined, counted from when each rank has read its data.
/// Default 300.
pub const CONNECT_TIMEOUT_SECONDS: &str = "SWITCHYARD_CONNECT_TIMEOUT_SECONDS";
/// File that receives the pod's [`crate::termination::Termination`]. Default
/// `/dev/termination-log`, if it exists.
pub const TERMINATION_LOG: &str = "SWITCHYARD_TERMINATION_LOG";

/// Seconds from the pod's SIGTERM until Kubernetes kills it: the template's
/// `terminationGracePeriodSeconds`. Default [`DEFAULT_GRACE_SECONDS`].
pub const GRACE_SECONDS: &str = "SWITCHYARD_GRACE_SECONDS";
/// Kubernetes' default for `terminationGracePeriodSeconds`; `switchyard run` uses the same.
pub const DEFAULT_GRACE_SECONDS: u32 = 30;

/// All names above, so that a manifest can be checked for accidental overrides.
pub const ALL: [&str; 24] = [
    JOB,
    ATTEMPT,
    NODE_RANK,
    NUM_NODES,
    PROCS_PER_NODE,
    LOCAL_RANK,
    SERVER,
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
    GRACE_SECONDS,
    FAULT,
];

/// Fault injection for tests: `exit:STEP`, `kill:STEP`, `hang:STEP`, `stall:STEP` or `panic:STEP`,
/// with an optional `@RANK` and `#ATTEMPT` (`kill:20@1#1`). The rank triggers the fault before that
/// step.
pub const FAULT: &str = "SWITCHYARD_FAULT";

/// Names that a user may set in `trainer.env`: they tune a rank without changing its identity.
pub const USER_SETTABLE: [&str; 7] =
    [TRANSPORT, HOST_ID, KERNEL, GPU_CACHE, PEER_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS, FAULT];
