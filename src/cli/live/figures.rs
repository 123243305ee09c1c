//! How old a job's figures are, and what may still be said with them.

use super::stage;
use jiff::Timestamp;
use switchyard_core::units::duration;
use switchyard_crds::conditions::Stage;
use switchyard_crds::{TrainJob, TrainerStatus};

/// The controller reads figures every few seconds, and the logs of many jobs in turns: those that are older than this, in seconds, show their
/// age.
const EXPECTED: f64 = 60.0;
/// A log without news is read again after up to this many seconds: older figures say nothing about the end of the job.
const STALE: f64 = 300.0;

fn of(job: &TrainJob) -> Option<&TrainerStatus> {
    job.status.as_ref()?.trainer_status.as_ref()
}

/// Whether the ranks that made the figures may still run.
pub(super) fn are_of_now(job: &TrainJob) -> bool {
    stage(job) == Stage::Running.reason()
}

/// Seconds since the figures of a job that trains were read.
fn seconds(job: &TrainJob, now: Timestamp) -> Option<f64> {
    let at = of(job)?.last_updated_time.as_ref()?.0;
    are_of_now(job).then(|| now.duration_since(at).as_secs_f64().max(0.0))
}

/// The age of figures that are older than expected.
pub(crate) fn age(job: &TrainJob, now: Timestamp) -> Option<f64> {
    seconds(job, now).filter(|age| *age > EXPECTED)
}

/// `40 %`, with its age where that matters. `None`: no figures, or those of steps that the next attempt makes again.
pub(super) fn progress(job: &TrainJob, now: Timestamp) -> Option<String> {
    let begins_again = stage(job) == Stage::Suspended.reason() && job.spec.checkpoint.is_none();
    let percent = of(job).filter(|_| !begins_again)?.progress_percentage;
    let age = age(job, now).map(|age| format!(" ({} old)", duration(age)));
    Some(format!("{percent} %{}", age.unwrap_or_default()))
}

/// Seconds that the job still needs, by figures that are recent enough.
pub(super) fn remaining(job: &TrainJob, now: Timestamp) -> Option<f64> {
    let age = seconds(job, now).filter(|age| *age <= STALE)?;
    Some((of(job)?.estimated_remaining_seconds? as f64 - age).max(0.0))
}
