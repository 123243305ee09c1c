//! Pauses that start at a recorded time: by this controller, an earlier one, or another machine. Clocks are corrected while jobs run, by an
//! hour where a zone or a battery was wrong.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::events::v1::Event;
use switchyard_crds::TrainJob;

/// When a job is stopped if it has not ended (`spec.activeDeadlineSeconds`). `None`: never, or it has had no place yet.
pub fn deadline(job: &TrainJob) -> Option<Timestamp> {
    let (seconds, status) = (job.spec.active_deadline_seconds?, job.status.as_ref()?);
    // Controllers before `placedTime` counted from the start of the first attempt.
    let before = || status.start_time.as_ref().filter(|_| status.placement.is_some());
    let from = status.placed_time.as_ref().or_else(before)?;
    Some(from.0.saturating_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX))
}

/// When a job has ended by what the queue was promised: the limit that it was placed with, or a lower one that was set since.
pub fn promised_end(job: &TrainJob) -> Option<Timestamp> {
    [placed_limit_ends(job), deadline(job)].into_iter().flatten().min()
}

fn placed_limit_ends(job: &TrainJob) -> Option<Timestamp> {
    let status = job.status.as_ref()?;
    let limit = SignedDuration::from_secs(status.placed_limit_seconds?);
    Some(status.placed_time.as_ref()?.0.saturating_add(limit).unwrap_or(Timestamp::MAX))
}

/// Whether a job runs for longer than the queue was promised: its limit was raised after it was placed.
pub fn breaks_promise(job: &TrainJob, now: Timestamp) -> bool {
    placed_limit_ends(job).is_some_and(|end| end <= now && deadline(job).is_none_or(|deadline| deadline > end))
}

/// Clocks of a cluster differ by less than this: a certificate or a token would not work with more.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// True if a pause of at most `longest` that ends at `end` is over. If more than `longest` is left, the clock was set back since, and the
/// pause counts as over.
pub(super) fn is_over(end: Timestamp, longest: SignedDuration, now: Timestamp) -> bool {
    let left = end.duration_since(now);
    !left.is_positive() || left > longest.saturating_add(SKEW)
}

/// An agent renews its report every ten minutes.
const OLD: SignedDuration = SignedDuration::from_mins(30);

/// True if a report of that time is stale.
pub fn is_old(observed: Timestamp, now: Timestamp) -> bool {
    now.duration_since(observed) > OLD
}

/// When an event was seen last, in whichever of the ways in which its sender may say so.
pub(crate) fn time_of(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().map(|series| series.last_observed_time.0);
    let last = event.deprecated_last_timestamp.as_ref().map(|time| time.0);
    series.into_iter().chain(last).chain(event.event_time.as_ref().map(|time| time.0)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_ends_in_time_and_when_the_clock_was_set_back() {
        let (now, pause) = (Timestamp::from_second(1_000_000).unwrap(), SignedDuration::from_secs(10));
        for (left, over) in [(-3600, true), (0, true), (1, false), (10, false), (70, false), (71, true), (3600, true)] {
            assert_eq!(is_over(now + SignedDuration::from_secs(left), pause, now), over, "{left} s left");
        }
        assert!(!is_over(Timestamp::MAX, SignedDuration::MAX, now), "no longest pause");
    }
}
