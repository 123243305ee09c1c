//! A trace of jobs played against a cluster: how long jobs wait, and how fast they run where they are put.
//!
//! ```text
//! trace (rows) ─> play (events) ─┬─> Rule: the product's index and queue, or the rule of a peer ─> who starts where
//!                                └─> speed: what a place is worth, by a model that shares no code with the planner
//! play ─> measure (waits, completion, fragmentation)
//! failures (hosts that fail and are repaired) ─> play
//! ```
//!
//! A rule never sees a duration, only the limit that a manifest may have. Times are seconds after the beginning of the trace.
#![forbid(unsafe_code)]

pub mod chance;
pub mod cluster;
pub mod fabric;
pub mod failures;
pub mod measure;
pub mod picture;
pub mod play;
pub mod rules;
pub mod speed;
pub mod table;
pub mod trace;

#[cfg(test)]
mod tests;
