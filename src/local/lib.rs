//! Runs a TrainJob as processes on this machine: the same plan as in a cluster, carried out by starting processes instead of pods.
//!
//! ```text
//! plan ─> inspect (worker, before anything starts) ─> run directory ─> attempt ─> ... ─> status.yaml
//!                                                        ^                 | a rank failed
//!                                                        └─ plan::local::next ┘
//! ```
//!
//! [`switchyard_plan`] decides; this crate acts. `switchyard-cli` decides what a person sees, from [`Update`]s.
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
pub use inspect::{InspectError, predict, software};
pub use progress::Interval;
pub use run::{Outcome, RunError, run};
pub use run_dir::{RunDir, RunDirError};
pub use worker::{Worker, WorkerNotFound};

use switchyard_plan::local::LocalPlan;
use switchyard_worker_contract::event::{CheckpointReport, Finished, GpuTrouble, Inspection, Ready, Summary};

/// What happens while a job runs, in order, for display.
#[derive(Debug)]
pub enum Update<'a> {
    /// Planned and examined; the first attempt starts next.
    Starting {
        /// The plan of the first attempt.
        plan: &'a LocalPlan,
        /// What the worker found in the data and the model.
        inspection: &'a Inspection,
        /// The directory of this run.
        run_dir: &'a RunDir,
    },
    /// The group of an attempt is complete and connected; training starts.
    Ready {
        attempt: u32,
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
        /// Share classified correctly, if the model classifies.
        accuracy: Option<f64>,
    },
    /// Ranks stand still and the job goes on waiting, or all go on: the last figures say which.
    Standstill(&'a Interval),
    /// The GPU that a person should look at is another one, or none any more.
    GpuTrouble(Option<GpuTrouble>),
    /// A checkpoint is complete, or was abandoned.
    Checkpoint(&'a CheckpointReport),
    /// A rank failed; all others are stopped.
    Failed {
        attempt: u32,
        /// What happened first.
        cause: &'a RootCause,
    },
    /// The whole group starts again.
    Restarting {
        /// Number of the attempt that starts.
        attempt: u32,
        /// Whether there is a directory of checkpoints to resume from.
        saved: bool,
        /// Restarts so far, this one included.
        restarts: u32,
        /// Restarts allowed.
        max_restarts: u32,
    },
    /// A stop was requested; the ranks are notified.
    Stopping {
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
        figures: Option<&'a Summary>,
    },
}

/// Receives every [`Update`].
pub trait Observer {
    /// Takes note of one update.
    ///
    /// # Errors
    /// Its record cannot be written; the run is then aborted.
    fn observe(&mut self, update: Update<'_>) -> Result<(), RunDirError>;
}
