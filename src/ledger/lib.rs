//! The controller's knowledge of the cluster as pure state: objects in, effects out, no I/O.
//!
//! ```text
//! watch ─> index (jobs with their pods, nodes) ─┬─> usage, devices (free resources, GPU owners)
//!                                               ├─> contention (order, reservation, preemption)
//!                                               ├─> queue (changes worth a new plan)
//!                                               ├─> forecast (start times of queued jobs)
//!                                               ├─> predictor (run times of jobs without a limit)
//!                                               ├─> fairness (decayed usage per namespace)
//!                                               ├─> quota (the job that keeps its pods)
//!                                               ├─> refusals (jobs that held nodes in vain)
//!                                               ├─> schedulers (those known to exist)
//!                                               └─> pending_writes (not in the cache yet)
//! a file of objects ─> offline ─> the same index ─> placement of a job
//! ```
#![forbid(unsafe_code)]

pub mod contention;
pub mod devices;
pub mod fairness;
pub mod incidents;
pub mod index;
pub mod job;
pub mod leader_state;
pub mod mass_outage;
pub mod offline;
pub mod pending_writes;
pub mod predictor;
pub mod progress;
pub mod quota;
pub mod refusals;
pub mod schedulers;
pub mod usage;
