//! Switchyard plans and runs training jobs.
//!
//! ```text
//! manifest ─> validate ─> snapshot ─> placement ─> plan (pure) ─> local (processes) ─> status
//!                            ^                                        |
//!                       topology <── GPUTopology <── node-agent       └── events of the ranks
//! ```
//!
//! See ARCHITECTURE.md for the rooms and what each may use.
#![forbid(unsafe_code)]

pub mod apply;
pub mod cli;
pub mod controller;
pub mod convert;
pub mod doctor;
pub mod local;
pub mod report;
