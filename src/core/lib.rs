//! What everything else stands on: machines and their devices, what links carry, where processes and gangs go, and how amounts are written.
//!
//! ```text
//! model (nodes, NUMA nodes, cores) ─┐
//! devices (GPUs, NICs, paths, rates) ┴─> placement ─> the place of every process, or why there is none
//! ```
//!
//! Positions instead of names, and nothing but `std`: no Kubernetes, no I/O, no clocks, no randomness. Who turns reports into these types is
//! `switchyard-topology`.
#![forbid(unsafe_code)]

pub mod devices;
pub mod digest;
pub mod gpu_model;
pub mod model;
pub mod path;
pub mod placement;
pub mod quantity;
pub mod rates;
pub mod units;
