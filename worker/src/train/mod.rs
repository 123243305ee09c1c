//! The step: samples through the model, gradients through the buckets, weights through the
//! optimizer.
//!
//! ```text
//! Preparation: opens the data, alone or together with the other ranks
//!  └─> Blueprint (pure sizes: layout, buckets, steps, memory) ── inspect
//!      └─> Engine: weights, moments, gradients and their reductions (cpu_engine, cuda_engine)
//!           └─> Trainer: drives steps, handles outcomes, agrees with the group, saves
//! run: Trainer step by step, events, evaluation, the trained model, under a watchdog
//! ```
//!
//! All ranks hold identical bits because the initial weights come from the seed, reduced gradients
//! are bit-identical on all ranks, and norm and optimizer give the same bits on every CPU. Nothing
//! else modifies the weights. With local steps this holds after each average.

mod blueprint;
mod check;
pub mod config;
mod cpu_engine;
mod cuda_engine;
mod digest;
mod directory;
mod disk;
mod engine;
mod error;
mod evaluate;
mod exchange;
pub mod fault;
mod load;
mod memory;
mod pace;
mod places;
mod preparation;
mod progress;
mod recording;
mod report;
mod resume;
mod run;
mod save;
mod saver;
mod scales;
mod stages;
mod statistics;
mod step;
mod tensors;
#[cfg(test)]
mod tests;
mod trainer;
mod training;
mod watchdog;

pub use blueprint::{Blueprint, open};
pub use cuda_engine::{GpuUsage, gpu_usage, predict};
pub use error::TrainError;
pub use evaluate::ValidationResult;
pub use exchange::serve;
pub use preparation::{Preparation, SharedData};
pub use report::StepReport;
pub use run::{Reporter, RunOptions, run};
pub use step::{StepConsensus, StepRequest};
pub use trainer::Trainer;
pub use training::Training;
pub use watchdog::{Alarm, OnAlarm};
