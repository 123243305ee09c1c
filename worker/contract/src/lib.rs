//! Contract between launchers (`switchyard run`, the controller) and the worker.
//!
//! Everything that crosses the boundary between the two programs is here, and nothing else:
//! environment variable names ([`mod@env`]), the resolved engine configuration ([`config`]), the
//! events that a rank prints ([`event`]) and how those of several ranks are combined ([`fold`]),
//! GPU health ([`gpu`]), what ranks record for reports ([`record`]) and in case they hang or die
//! ([`recorder`]), NCCL's log ([`nccl`]), lower bounds for GPU step times ([`prediction`]), the GPU
//! software of a machine ([`software`]), a pod's termination message ([`termination`]), exit codes
//! ([`exit`]), CPU lists ([`cpu_list`]) and the kernel's process statistics ([`process_stat`]).
//! Nothing here performs I/O or reads a clock, which keeps Kubernetes out of the worker's
//! dependency tree and the engine out of the launcher's.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod config;
pub mod cpu_list;
pub mod env;
pub mod event;
pub mod exit;
pub mod fold;
pub mod gpu;
pub mod kernels;
pub mod layers;
pub mod nccl;
pub mod prediction;
pub mod process_stat;
pub mod record;
pub mod recorder;
pub mod software;
pub mod straggler;
pub mod termination;

pub use cpu_list::{CpuList, CpuListError};

/// Paths and ports in a job's pod.
pub mod pod {
    /// Port that rank 0 listens on.
    pub const RENDEZVOUS_PORT: u16 = 29400;
    /// Directory of the engine configuration, `engine.json`, or of an MPI job's `hostfile`.
    pub const CONFIG_DIR: &str = "/etc/switchyard";
    /// Directory of the job's key, `key`.
    pub const KEY_DIR: &str = "/var/run/secrets/switchyard";
    /// Directory for the results of a run.
    pub const RUN_DIR: &str = "/var/lib/switchyard";
    /// Path of the container's termination message.
    pub const TERMINATION_LOG: &str = "/dev/termination-log";
    /// File name of the configuration, and its key in the ConfigMap.
    pub const CONFIG_FILE: &str = "engine.json";
    /// File name of the job's key, and its key in the Secret.
    pub const KEY_FILE: &str = "key";
    /// File name of an MPI job's host list, and its key in the ConfigMap.
    pub const HOST_FILE: &str = "hostfile";
}
