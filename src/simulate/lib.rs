//! Replays a trace of jobs against a cluster: how long jobs wait, and how fast they run where they
//! are placed.
//!
//! ```text
//! trace (rows) ─> replay (events) ─┬─> Rule: the product's queue, or a peer's ─> which jobs start where
//!                                  └─> speed: value of a placement, independent of the planner
//! replay ─> measure (waits, completion, fragmentation)
//! failures (host failures and repairs) ─> replay
//! ```
//!
//! A rule never sees a job's duration, only the limit that its manifest can have. Times are seconds
//! since the start of the trace.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod fabric;
pub mod failures;
pub mod measure;
pub mod picture;
pub mod replay;
pub mod rng;
pub mod rules;
pub mod speed;
pub mod table;
pub mod trace;

#[cfg(test)]
mod tests;
