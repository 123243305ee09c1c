//! The plan: from a TrainJob and what is observed to processes, objects and a status. Pure: no client, no clock, no files.
//!
//! ```text
//!                       ┌─> local ─────> cores ─> processes ───────────────────────> LocalPlan
//! TrainJob ─> ValidJob ─┤                                                            (switchyard-local starts it)
//!  (validate)           └─> cluster ───> nodes and GPUs ─> fabric ─> objects ──────> a decision, or actions
//!                              ^                                                     (the controller's apply writes it)
//!                              └ pods, nodes and objects as observed
//!
//! a failure ─> restart ─> again, or the end        what was observed ─> status ─> the next status
//! ```
//!
//! `job`, `restart` and `status` are the same for both ways: where one machine and a cluster differ, the difference is an argument. `objects`
//! are what a job has in a cluster, `frameworks` what launchers other than Switchyard's read. The two executors decide nothing.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod eligible;
pub mod frameworks;
pub mod job;
pub mod kueue;
pub mod local;
pub mod objects;
pub mod policies;
pub mod resources;
pub mod restart;
pub mod slices;
pub mod status;
mod validate;
pub mod volumes;

pub use job::{Invalid, ValidJob};
pub use validate::validate;
