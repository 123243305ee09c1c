//! Whole single-rank networks: their programs, gradients, and results of other implementations.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

mod arrivals;
#[path = "../flat_gradients/mod.rs"]
mod flat_gradients;
mod gradients;
mod network_parity;
mod parity;
mod program;
mod recomputation;
#[path = "../trial/mod.rs"]
mod trial;
