//! What a launcher (`switchyard run`, the controller) and the worker agree on.
//!
//! Here is everything that crosses the border between the two programs, and nothing else: the names of environment
//! variables ([`mod@env`]), the resolved engine configuration ([`config`]), the events that a rank prints ([`event`])
//! and how those of several ranks are combined ([`fold`]), how the GPUs of ranks fare ([`gpu`]), what ranks record for a report ([`record`]) and
//! in case they stand still or die ([`recorder`]), how long a step takes on a GPU at best ([`prediction`]), what a machine has for GPUs
//! ([`software`]), the termination
//! message of a pod ([`termination`]), the exit codes ([`exit`]) and CPU lists ([`cpu_list`]). Nothing here performs
//! input or output or reads a clock, so that the worker's dependency tree stays free of Kubernetes and the launcher's
//! free of the engine.
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
pub mod laggard;
pub mod prediction;
pub mod record;
pub mod recorder;
pub mod software;
pub mod termination;

pub use cpu_list::{CpuList, CpuListError};

/// Paths and ports in a pod of a job.
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
    /// Name of the configuration's file and of its key in the ConfigMap.
    pub const CONFIG_FILE: &str = "engine.json";
    /// Name of the key's file and of its key in the Secret.
    pub const KEY_FILE: &str = "key";
    /// Name of the file with the hosts of an MPI job and of its key in the ConfigMap.
    pub const HOST_FILE: &str = "hostfile";
}
