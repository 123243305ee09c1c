//! The plan: from a TrainJob and what is observed to processes, objects and a status. Pure: no client, no clock, no files.
//!
//! ```text
//!                               ┌─> local    one machine: placement of cores ─> processes ─> LocalPlan
//! TrainJob ─> job ─> ValidJob ──┤
//!                               └─> cluster  pods, nodes, objects as observed ─> placement of GPUs, fabric ─> one decision, or actions
//!                                            objects: what a job has in a cluster; frameworks: what launchers read
//! an attempt has failed ─> restart (again, or not)       what is observed ─> status (what to show)
//! ```
//!
//! `job`, `restart` and `status` are shared. Two executors carry plans out: `switchyard-local` starts processes, and the controller's `apply`
//! writes objects. Neither decides anything.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod eligible;
pub mod frameworks;
pub mod job;
pub mod local;
pub mod objects;
pub mod resources;
pub mod restart;
pub mod status;
mod validate;

pub use job::{Invalid, ValidJob};
pub use validate::validate;
