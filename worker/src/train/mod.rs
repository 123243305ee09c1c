//! The step: samples through the model, gradients through the buckets, weights through the optimizer.
//!
//! ```text
//! Blueprint (pure sizes: layout, buckets, steps, memory) ── inspect
//!      └─> Trainer: reader -> forward -> backward ──> buckets (all-reduces start as they are complete: fusion)
//!                                             └─ wait -> norm -> clip -> optimizer
//! run: Trainer step by step, events, evaluation, the trained model; a watchdog beside it
//! ```
//!
//! Every rank holds the same bits because the initial weights come from the seed, reduced gradients are bit-identical
//! on all ranks, and norm and optimizer give the same bits on every CPU. Nothing else ever touches the weights.

mod blueprint;
mod buckets;
mod check;
pub mod config;
mod disk;
mod error;
mod evaluate;
mod exchange;
pub mod fault;
mod fusion;
mod kernel;
mod memory;
mod recording;
mod resume;
mod run;
mod save;
mod saver;
mod sink;
mod state;
mod step;
mod trainer;
mod watchdog;

pub use blueprint::{Blueprint, open};
pub use error::TrainError;
pub use evaluate::Judgement;
pub use run::{Outside, Reporter, run};
pub use step::{Agreed, Wishes};
pub use trainer::{StepReport, Trainer};
pub use watchdog::End;
