//! Planning: turns a TrainJob and observed state into processes, objects and a status. Pure: no
//! client, no clock, no files.
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
//! `job`, `restart` and `status` are shared by local and cluster plans. Differences between the two
//! are arguments. `objects` are the Kubernetes objects of a job, `frameworks` the inputs of
//! launchers other than Switchyard's. The two executors decide nothing.
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
