//! Time limits measured from recorded timestamps, which may come from this controller, an earlier
//! one, or another machine. Clocks are corrected while jobs run, for example by an hour after a
//! wrong time zone or a dead battery.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::events::v1::Event;
use switchyard_crds::TrainJob;

/// When an unfinished job is stopped (`spec.activeDeadlineSeconds`). `None` if it has no limit or
/// has not been placed yet.
pub fn deadline(job: &TrainJob) -> Option<Timestamp> {
    let (seconds, status) = (job.spec.active_deadline_seconds?, job.status.as_ref()?);
    // Controllers that predate `placedTime` counted from the start of the first attempt.
    let before = || status.start_time.as_ref().filter(|_| status.placement.is_some());
    let from = status.placed_time.as_ref().or_else(before)?;
    Some(from.0.saturating_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX))
}

/// End of the job that the queue relies on: the limit it was placed with, or a lower one that was
/// set later.
pub fn promised_end(job: &TrainJob) -> Option<Timestamp> {
    [placed_limit_ends(job), deadline(job)].into_iter().flatten().min()
}

fn placed_limit_ends(job: &TrainJob) -> Option<Timestamp> {
    let status = job.status.as_ref()?;
    let limit = SignedDuration::from_secs(status.placed_limit_seconds?);
    Some(status.placed_time.as_ref()?.0.saturating_add(limit).unwrap_or(Timestamp::MAX))
}

/// Whether a job runs longer than the queue relied on, because its limit was raised after it was
/// placed.
pub fn exceeds_placed_limit(job: &TrainJob, now: Timestamp) -> bool {
    placed_limit_ends(job).is_some_and(|end| end <= now && deadline(job).is_none_or(|deadline| deadline > end))
}

/// Upper bound of the clock skew in a cluster: certificates and tokens would not work with more.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// True if a pause of at most `longest` that ends at `end` is over. If more than `longest` remains,
/// the clock was set back since, and the pause counts as over.
pub(super) fn is_over(end: Timestamp, longest: SignedDuration, now: Timestamp) -> bool {
    let left = end.duration_since(now);
    !left.is_positive() || left > longest.saturating_add(SKEW)
}

/// Age from which a report is stale. An agent renews its report every ten minutes.
const STALE_AFTER: SignedDuration = SignedDuration::from_mins(30);

/// True if a report observed at that time is stale.
pub fn is_stale(observed: Timestamp, now: Timestamp) -> bool {
    now.duration_since(observed) > STALE_AFTER
}

/// When an event was last seen, from whichever timestamp field its sender set.
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
        assert!(!is_over(Timestamp::MAX, SignedDuration::MAX, now), "without an upper bound");
    }
}
