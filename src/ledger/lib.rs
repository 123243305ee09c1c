//! What the controller knows, as pure state: objects go in, effects come out, and nobody is asked.
//!
//! ```text
//! watch ─> index (jobs with their pods, nodes) ─┬─> usage, devices (what is free, who has which GPU)
//!                                               ├─> contention (whose turn it is, what is held, who gives way)
//!                                               ├─> waiting (which change is worth another plan), forecast (when those that wait can begin)
//!                                               ├─> predictor (how long jobs without a limit may run)
//!                                               ├─> fairness (what each namespace had lately)
//!                                               ├─> quota (which job of a namespace keeps its pods)
//!                                               ├─> refusals (whose jobs held nodes and could not start)
//!                                               ├─> schedulers (which have been heard of)
//!                                               └─> own_writes (what was written and not seen yet)
//! a file of objects ─> offline ─> the same index ─> where a job would go
//! ```
#![forbid(unsafe_code)]

pub mod contention;
pub mod devices;
pub mod fairness;
pub mod fleet;
pub mod incidents;
pub mod index;
pub mod job;
pub mod memory;
pub mod offline;
pub mod own_writes;
pub mod predictor;
pub mod progress;
pub mod quota;
pub mod refusals;
pub mod schedulers;
pub mod usage;
