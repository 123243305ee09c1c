//! The training engine of collective jobs: manifest configuration in, trained weights out.
//!
//! ```text
//! EngineConfig -> data (samples) -> model (static plan, arena) -> comm (buckets)
//!             -> train (step loop) -> events
//! ```
//!
//! `pod` starts and supervises the ranks of one node; everything else is one rank. Nothing here
//! depends on Kubernetes: environment variables define a rank's place in the job (see
//! `switchyard_worker_contract::env`), and one JSON file defines the training.
#![deny(unsafe_code)]

pub mod amp;
mod cgroup;
pub mod comm;
pub mod cpu;
pub mod data;
pub mod lowering;
pub mod model;
pub mod nn;
pub mod optimizer;
pub mod pod;
pub mod process;
pub mod profile;
pub mod program;
mod recorder;
mod retry;
pub mod train;
