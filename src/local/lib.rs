//! Runs a TrainJob as processes on this machine. The plan has the same form as in a cluster, but
//! each pod becomes a process.
//!
//! ```text
//! plan ─> inspect (worker, before anything starts) ─> run directory ─> attempt ─> ... ─> status.yaml
//!                                                        ^                 | a rank failed
//!                                                        └─ plan::local::next ┘
//! ```
//!
//! A job of another framework has neither events nor an inspection: [`run_pods`] starts the
//! commands of its pods.
//!
//! [`switchyard_plan`] decides and this crate acts. `switchyard-cli` turns [`Update`]s into output.
#![forbid(unsafe_code)]

mod attempt;
mod cause;
mod error;
mod exec;
mod inspect;
mod pod_group;
mod pods;
mod process;
mod progress;
mod run;
mod run_dir;
mod survivor;
mod worker;

pub use cause::{RankLog, RootCause};
pub use error::AttemptError;
pub use exec::exec;
pub use inspect::{InspectError, predict, software};
pub use pods::{addresses, run_pods};
pub use progress::Interval;
pub use run::{Machines, Outcome, RunError, run};
pub use run_dir::{RunDir, RunDirError};
pub use survivor::Survivor;
pub use worker::{Worker, WorkerNotFound};

use switchyard_plan::local::{LocalPlan, PlannedPod, PodPlan};
use switchyard_worker_contract::event::{CheckpointReport, Finished, GpuTrouble, Inspection, Ready, Summary};

/// An event in the life of a job, in order, for display.
#[derive(Debug)]
pub enum Update<'a> {
    /// The job is planned and inspected; the first attempt starts next.
    Starting {
        /// The plan of the first attempt.
        plan: &'a LocalPlan,
        /// The worker's inspection of the data and the model.
        inspection: &'a Inspection,
        /// The directory of this run.
        run_dir: &'a RunDir,
    },
    /// The pods of another framework are planned; the first attempt starts next.
    PodsStarting {
        /// The plan of the first attempt.
        plan: &'a PodPlan,
        /// The directory of this run.
        run_dir: &'a RunDir,
    },
    /// A pod of another framework printed a line, which is in its log.
    Output { pod: &'a PlannedPod, line: &'a str },
    /// A pod of another framework ended the attempt; all others are stopped.
    PodFailed { attempt: u32, pod: &'a PlannedPod, cause: &'a RootCause },
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
    /// Ranks stand still while the job keeps waiting, or all of them have resumed; the latest
    /// figures say which.
    Standstill(&'a Interval),
    /// The job's worst GPU problem changed; `None` if there is none left.
    GpuTrouble(Option<GpuTrouble>),
    /// A checkpoint is complete, or was abandoned.
    Checkpoint(&'a CheckpointReport),
    /// A rank failed; all others are stopped.
    Failed {
        attempt: u32,
        /// The root cause.
        cause: &'a RootCause,
    },
    /// The whole group restarts.
    Restarting {
        /// Number of the attempt that starts next.
        attempt: u32,
        /// Whether there is a checkpoint directory to resume from. `None` with another framework,
        /// which saves its own checkpoints.
        saved: Option<bool>,
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
    /// SIGKILL has not ended these processes. The run ends without them after `seconds`, or at the
    /// next stop request.
    Surviving {
        /// The failure that ended the attempt; `None` after a stop request.
        cause: Option<&'a RootCause>,
        processes: &'a [Survivor],
        seconds: u64,
    },
    /// A file of the run directory cannot be written. The training continues without its record;
    /// reported once.
    Unrecorded(&'a RunDirError),
    /// All steps are done on every rank.
    Finished {
        /// Rank 0's report.
        report: &'a Finished,
        /// The worker's inspection of the data and the model.
        inspection: &'a Inspection,
        /// Wall time of the last attempt from ready to done, seconds.
        seconds: f64,
        /// Items per second of the whole job over that time.
        items_per_second: f64,
        /// The latest figures.
        figures: Option<&'a Summary>,
    },
}

/// Receives every [`Update`].
pub trait Observer {
    /// Handles one update.
    ///
    /// # Errors
    /// The update cannot be recorded; the run is then aborted.
    fn observe(&mut self, update: Update<'_>) -> Result<(), RunDirError>;
}
