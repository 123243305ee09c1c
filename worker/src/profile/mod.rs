//! What a rank records while it trains; see [`switchyard_worker_contract::record`] for the files.
//!
//! Always on: one line per step, kept in memory and written with the progress reports. On request: every operation of
//! selected steps.

mod steps;
mod tensorboard;
mod trace;

pub use steps::StepFile;
pub use tensorboard::EventFile;
pub use trace::{Row, Trace};
