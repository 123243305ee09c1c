//! Runs a TrainJob as processes on this machine: the same plan as in a cluster, carried out by starting processes instead of pods.
//!
//! ```text
//! plan ─> inspect (worker, before anything starts) ─> run directory ─> attempt ─> ... ─> status.yaml
//!                                                        ^                 | a rank failed
//!                                                        └── plan::restart ┘
//! ```
//!
//! What to do is decided in [`switchyard_plan`]; here it is done. What a person sees is decided in [`switchyard_cli`], which is told by
//! [`Update`]s.
#![forbid(unsafe_code)]

mod attempt;
mod cause;
mod error;
mod inspect;
mod process;
mod progress;
mod run;
mod run_dir;
mod worker;

pub use cause::{RankLog, RootCause};
pub use error::AttemptError;
pub use inspect::InspectError;
pub use progress::Interval;
pub use run::{Outcome, RunError, run};
pub use run_dir::{RunDir, RunDirError};
pub use worker::{Worker, WorkerNotFound};

use switchyard_plan::local::LocalPlan;
use switchyard_plan::status::Figures;
use switchyard_worker_contract::event::{CheckpointReport, Finished, Inspection, Ready};

/// What happens while a job runs, in order, for whoever shows it.
#[derive(Debug)]
pub enum Update<'a> {
    /// Planned and examined; the first attempt starts next.
    Starting {
        /// The plan of the first attempt.
        plan: &'a LocalPlan,
        /// What the worker found in the data and the model.
        inspection: &'a Inspection,
        /// Where everything of this run goes.
        run_dir: &'a RunDir,
    },
    /// The group of an attempt is complete and connected; training starts.
    Ready {
        /// Attempt number.
        attempt: u32,
        /// The plan of the attempt.
        plan: &'a LocalPlan,
        /// One per rank, in rank order.
        ranks: &'a [Ready],
    },
    /// Every rank has reported an interval of steps.
    Progress(&'a Interval),
    /// Loss and accuracy on the validation split.
    Evaluation {
        /// Steps done.
        step: u64,
        /// The loss, nats.
        loss: f64,
        /// Share classified right, where the model classifies.
        accuracy: Option<f64>,
    },
    /// A checkpoint is complete, or was given up.
    Checkpoint(&'a CheckpointReport),
    /// A rank failed; all others are stopped.
    Failed {
        /// Attempt number.
        attempt: u32,
        /// What happened first.
        cause: &'a RootCause,
    },
    /// The whole group starts again.
    Restarting {
        /// Number of the attempt that starts.
        attempt: u32,
        /// Whether there is a directory of checkpoints to go on from.
        saved: bool,
        /// Restarts so far, this one included.
        restarts: u32,
        /// Restarts allowed.
        max_restarts: u32,
    },
    /// A stop was asked for; the ranks are told.
    Stopping {
        /// Name of the signal.
        signal: &'a str,
        /// Whether they save a checkpoint first.
        saves: bool,
    },
    /// All steps are done on every rank.
    Finished {
        /// Rank 0's report.
        report: &'a Finished,
        /// What the worker found in the data and the model.
        inspection: &'a Inspection,
        /// Wall time of the last attempt from ready to done, seconds.
        seconds: f64,
        /// Items per second of the whole job over that time.
        items_per_second: f64,
        /// The last figures.
        figures: Option<&'a Figures>,
    },
}

/// Told of every [`Update`].
pub trait Observer {
    /// Takes note of one update.
    ///
    /// # Errors
    /// What should be kept of it cannot be written; the run is then given up.
    fn observe(&mut self, update: Update<'_>) -> Result<(), RunDirError>;
}
