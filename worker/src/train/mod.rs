//! The step: samples through the model, gradients through the buckets, weights through the optimizer.
//!
//! ```text
//! Blueprint (pure sizes: layout, buckets, steps, memory) ── inspect
//!      └─> Engine: weights, moments, gradients and their reductions, where they are computed (cpu, gpu)
//!           └─> Trainer: gives it steps, learns their outcomes, agrees with the group, saves
//! run: Trainer step by step, events, evaluation, the trained model; a watchdog beside it
//! ```
//!
//! Every rank holds the same bits because the initial weights come from the seed, reduced gradients are bit-identical
//! on all ranks, and norm and optimizer give the same bits on every CPU. Nothing else ever touches the weights.

#[cfg(test)]
mod altered;
mod blueprint;
mod check;
pub mod config;
mod cpu;
mod digest;
mod disk;
mod engine;
mod error;
mod evaluate;
mod exchange;
pub mod fault;
mod gpu;
#[cfg(test)]
mod late;
mod memory;
mod pace;
mod progress;
mod recording;
mod report;
mod resume;
mod run;
mod save;
mod saver;
mod scales;
mod statistics;
mod step;
#[cfg(test)]
mod stragglers;
mod tensors;
mod trainer;
mod training;
mod watchdog;

pub use blueprint::{Blueprint, open};
pub use error::TrainError;
pub use evaluate::Judgement;
pub use gpu::{Use, in_use, predict};
pub use report::StepReport;
pub use run::{Outside, Reporter, run};
pub use step::{Agreed, Wishes};
pub use trainer::Trainer;
pub use training::Training;
pub use watchdog::{Alarm, OnAlarm};
