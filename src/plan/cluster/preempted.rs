//! How often a job was preempted, and when it runs again, as text.

use super::forecast::Forecast;
use super::queue_order::{JobAhead, recent_preemptions};
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::TrainJob;

/// How often a job was preempted: `twice within 24 hours`. `None` if never.
pub fn history(job: &TrainJob, now: Timestamp) -> Option<String> {
    let restarts = job.status.as_ref()?.restarts.as_ref().filter(|restarts| restarts.preemption > 0)?;
    let times = |count: i32| match count {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    };
    let (all, recent) = (restarts.preemption, recent_preemptions(job, now));
    Some(if recent == all {
        format!("{} within 24 hours", times(all))
    } else {
        format!("{}, within 24 hours {}", times(all), times(recent))
    })
}

/// When a preempted job that waits runs again: `resumes after ml/gpt-rack, expected 14:20 UTC`. The
/// time is its own forecast, at the latest. Without one, it is the start of the job ahead, if that
/// is known.
pub fn resumption(ahead: Option<&JobAhead>, forecast: Option<&Forecast>, now: Timestamp) -> Option<String> {
    let latest = forecast.and_then(|forecast| forecast.window.ok()).map(|window| clock_time(window.latest, now));
    let Some(ahead) = ahead else {
        return latest.map(|latest| format!("resumes when it has room, expected {latest}"));
    };
    let after = format!("resumes after {}", ahead.name);
    Some(match (latest, ahead.start) {
        (Some(latest), _) => format!("{after}, expected {latest}"),
        (None, Some((start, _))) => format!("{after}, which is expected to start at {}", clock_time(start, now)),
        (None, None) => after,
    })
}

/// The time of day, with the date unless it is within 24 hours.
fn clock_time(at: Timestamp, now: Timestamp) -> String {
    let is_soon = at.duration_since(now) < SignedDuration::from_hours(24);
    at.strftime(if is_soon { "%H:%M UTC" } else { "%Y-%m-%d %H:%M UTC" }).to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::forecast::{Unknown, Window};
    use super::super::queue_order::Basis;
    use super::*;
    use serde_json::json;

    fn at(text: &str) -> Timestamp {
        format!("2026-11-{text}Z").parse().unwrap()
    }

    #[test]
    fn preemptions_within_a_day_are_counted_separately() {
        let now = at("20T12:00:00");
        for (all, recent, expected) in [
            (0, 0, None),
            (1, 1, Some("once within 24 hours")),
            (2, 2, Some("twice within 24 hours")),
            (4, 1, Some("4 times, within 24 hours once")),
            (3, 0, Some("3 times, within 24 hours never")),
        ] {
            let hours = [
                json!({"since": at("01T00:00:00"), "infrastructure": 0, "preemption": all - recent}),
                json!({"since": now, "infrastructure": 0, "preemption": recent}),
            ];
            let job = json!({
                "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "j"},
                "spec": {"trainer": {"framework": "Plain", "image": "i"}},
                "status": {"restarts": {"application": 0, "infrastructure": 0, "preemption": all, "total": all, "recent": hours}},
            });
            assert_eq!(history(&serde_json::from_value(job).unwrap(), now).as_deref(), expected);
        }
    }

    #[test]
    fn a_preempted_job_resumes_after_the_job_ahead() {
        let now = at("20T12:00:00");
        let ahead = |start: Option<Timestamp>| JobAhead {
            name: "ml/gpt-rack".into(),
            nodes: Vec::new(),
            start: start.map(|start| (start, Basis::Limits)),
            ends_before: None,
        };
        let window = |latest| Ok(Window { earliest: now, latest, running: 1, ahead: 1 });
        let forecast = |window| Forecast { ahead: 1, window };
        let unknown = forecast(Err(Unknown::Running { without: 1, all: 2 }));
        let soon = forecast(window(at("20T14:20:00")));
        let late = forecast(window(at("22T09:05:00")));
        let head = ahead(Some(at("20T13:10:00")));
        for (ahead, forecast, expected) in [
            (Some(&head), Some(&soon), Some("resumes after ml/gpt-rack, expected 14:20 UTC")),
            (Some(&head), Some(&late), Some("resumes after ml/gpt-rack, expected 2026-11-22 09:05 UTC")),
            (Some(&head), Some(&unknown), Some("resumes after ml/gpt-rack, which is expected to start at 13:10 UTC")),
            (Some(&ahead(None)), None, Some("resumes after ml/gpt-rack")),
            (None, Some(&soon), Some("resumes when it has room, expected 14:20 UTC")),
            (None, Some(&unknown), None),
        ] {
            assert_eq!(resumption(ahead, forecast, now).as_deref(), expected);
        }
    }
}
