//! Shared foundation: machines and their devices, link rates, placement, and number formatting.
//!
//! ```text
//! model (nodes, NUMA nodes, cores) ─┐
//! devices (GPUs, NICs, paths, rates) ┴─> placement ─> a place for every process, or a reason
//! ```
//!
//! Everything is addressed by position, and the only dependencies are `std` and `thiserror`: no
//! Kubernetes, no I/O, no clocks, no randomness. `switchyard-topology` converts reports into these
//! types.
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
