//! The controller's knowledge of the cluster as pure state: objects in, effects out, no I/O.
//!
//! ```text
//! watch ─> index (jobs with their pods, nodes) ─┬─> usage, devices (free resources, GPU owners)
//!                                               ├─> queue (order, reservation, backfill, preemption,
//!                                               │          forecasts, fairness, run time estimates)
//!                                               ├─> quota (the job that keeps its pods)
//!                                               ├─> refusals (jobs that held nodes in vain)
//!                                               ├─> schedulers (those known to exist)
//!                                               └─> pending_writes (not in the cache yet)
//! a file of objects ─> offline ─> the same index ─> placement of a job
//! ```
#![forbid(unsafe_code)]

pub mod devices;
pub mod incidents;
pub mod index;
pub mod job;
pub mod mass_outage;
pub mod offline;
pub mod pending_writes;
pub mod progress;
pub mod quota;
pub mod refusals;
pub mod schedulers;
pub mod usage;

pub use index::queue;
