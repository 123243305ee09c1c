//! The age of a job's figures, and what can still be derived from them.

use super::stage;
use jiff::Timestamp;
use switchyard_core::units::duration;
use switchyard_crds::conditions::Stage;
use switchyard_crds::{TrainJob, TrainerStatus};

/// Show the age of figures older than this many seconds. The controller reads figures every few
/// seconds, taking turns among the logs of many jobs.
const EXPECTED: f64 = 60.0;
/// Figures older than this many seconds no longer predict the job's end. A log without news is
/// reread after at most this time.
const STALE: f64 = 300.0;

fn of(job: &TrainJob) -> Option<&TrainerStatus> {
    job.status.as_ref()?.trainer_status.as_ref()
}

/// Whether the ranks that produced the figures can still be running.
pub(super) fn are_current(job: &TrainJob) -> bool {
    stage(job) == Stage::Running.reason()
}

/// Seconds since a running job's figures were read.
fn seconds(job: &TrainJob, now: Timestamp) -> Option<f64> {
    let at = of(job)?.last_updated_time.as_ref()?.0;
    are_current(job).then(|| now.duration_since(at).as_secs_f64().max(0.0))
}

/// The age of figures that are older than expected.
pub(crate) fn age(job: &TrainJob, now: Timestamp) -> Option<f64> {
    seconds(job, now).filter(|age| *age > EXPECTED)
}

/// `40 %`, with its age if relevant. `None` without figures, or if the next attempt repeats their
/// steps.
pub(super) fn progress(job: &TrainJob, now: Timestamp) -> Option<String> {
    let begins_again = stage(job) == Stage::Suspended.reason() && job.spec.checkpoint.is_none();
    let percent = of(job).filter(|_| !begins_again)?.progress_percentage;
    let age = age(job, now).map(|age| format!(" ({} old)", duration(age)));
    Some(format!("{percent} %{}", age.unwrap_or_default()))
}

/// Remaining seconds of the job, if its figures are recent enough.
pub(super) fn remaining(job: &TrainJob, now: Timestamp) -> Option<f64> {
    let age = seconds(job, now).filter(|age| *age <= STALE)?;
    Some((of(job)?.estimated_remaining_seconds? as f64 - age).max(0.0))
}
