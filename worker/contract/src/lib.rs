//! What a launcher (`switchyard run`, the controller) and the worker agree on.
//!
//! Here is everything that crosses the border between the two programs, and nothing else:
//! the names of environment variables ([`mod@env`]), the resolved engine configuration ([`config`]),
//! the events a rank prints ([`event`]) and how those of several ranks are read as one ([`fold`]), the last words of a pod
//! ([`termination`]), the exit codes ([`exit`]) and CPU lists ([`cpu_list`]). Nothing here does anything: no input, output or clock,
//! so that the worker's dependency tree stays free of Kubernetes and the launcher's free of the engine.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod config;
pub mod cpu_list;
pub mod env;
pub mod event;
pub mod exit;
pub mod fold;
pub mod termination;

pub use cpu_list::{CpuList, CpuListError};
