//! Start time estimates of queued jobs.

use super::*;
use jiff::SignedDuration;

const NOW: &str = "2026-06-01T12:00:00Z";

/// A job has run on one of three nodes for an hour and has another hour left. A gang that needs all
/// three is queued, and a job of one pod is behind it.
fn queue(small: Value, gang: Value) -> Vec<Value> {
    let mut items = gang_waits(0);
    items[3]["spec"]["activeDeadlineSeconds"] = small;
    items[3]["status"]["placedTime"] = json!("2026-06-01T11:00:00Z");
    items[5]["spec"]["activeDeadlineSeconds"] = gang;
    items.push(job("next", 1, "2026-01-03T00:00:00Z", waiting()));
    items.push(pod("next", 0, None, 0));
    items
}

fn forecasts(items: &[Value]) -> [String; 2] {
    let now: Timestamp = NOW.parse().unwrap();
    let mut cluster =
        Cluster::of(items, Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
    ["gang", "next"].map(|name| {
        let job = cluster.job("ns", name).unwrap().clone();
        let verdict = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
        verdict.forecast.map(|forecast| forecast.message(now)).unwrap_or_default()
    })
}

#[test]
fn each_queued_job_gets_its_position_and_start_window() {
    // Of jobs that have run for an hour, one in ten ends within 7 minutes. The gang may run for
    // half an hour.
    assert_eq!(
        forecasts(&queue(json!(7200), json!(1800))),
        [
            "first in the queue, expected in 5 min to 1 h (from the limit of 1 running job)",
            "second in the queue, expected in 5 min to 1 h 40 min (from limits of 1 running job and 1 ahead)",
        ]
    );
}

#[test]
fn jobs_without_a_limit_are_named_if_there_is_no_forecast() {
    assert_eq!(
        forecasts(&queue(json!(7200), Value::Null)),
        [
            "first in the queue, expected in 5 min to 1 h (from the limit of 1 running job)",
            "second in the queue, no forecast: 1 of 1 job ahead has no activeDeadlineSeconds",
        ]
    );
    let unknown = "no forecast: 1 of 1 running job has no activeDeadlineSeconds";
    assert_eq!(
        forecasts(&queue(Value::Null, json!(1800))),
        [format!("first in the queue, {unknown}"), format!("second in the queue, {unknown}")]
    );
}

/// A job that fits nowhere blocks no other job and has no queue position.
#[test]
fn a_job_that_fits_nowhere_gets_no_forecast() {
    let mut items = queue(json!(7200), json!(1800));
    items[5]["spec"]["trainer"]["numNodes"] = json!(4);
    assert_eq!(forecasts(&items)[0], "");
}

/// When all running jobs have ended, other workloads still occupy their nodes.
#[test]
fn foreign_pods_are_not_expected_to_end() {
    let mut items = queue(json!(7200), json!(1800));
    items.push(json!({
        "kind": "Pod", "metadata": {"name": "agent", "namespace": "kube-system", "uid": "agent"},
        "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]},
    }));
    assert_eq!(
        forecasts(&items)[0],
        "first in the queue, no forecast: it needs more than the running and queued jobs will release"
    );
}

#[test]
fn far_back_in_the_queue_there_is_only_a_position() {
    let mut items = queue(json!(7200), json!(1800));
    for number in 0..64 {
        items.push(job(&format!("between-{number:02}"), 1, "2026-01-02T12:00:00Z", waiting()));
    }
    assert_eq!(forecasts(&items)[1], "66th in the queue, no forecast: more than 64 jobs are ahead");
}

/// Forecasts are computed only as often as they may be written.
#[test]
fn a_forecast_is_recomputed_after_a_minute() {
    let mut index = Cluster::of(
        &queue(json!(7200), json!(1800)),
        Defaults::default(),
        Levels::default(),
        QueueSettings::default(),
        NOW.parse().unwrap(),
    )
    .unwrap()
    .index;
    let key = Key { namespace: "ns".into(), name: "gang".into() };
    let mut forecasts = |seconds| {
        let at = NOW.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seconds);
        index.forecast(&key, at).unwrap().window.unwrap().earliest
    };
    let first = forecasts(0);
    assert_eq!(forecasts(59), first);
    assert!(forecasts(60) > first);
}

/// Regression test: "46th in the queue, no forecast: 47 of 47 jobs ahead have no
/// activeDeadlineSeconds", because the reason was a minute older than the position.
#[test]
fn the_queue_position_and_the_jobs_ahead_are_consistent() {
    let mut items = queue(json!(7200), Value::Null);
    items.push(job("third", 1, "2026-01-04T00:00:00Z", waiting()));
    items.push(pod("third", 0, None, 0));
    let now: Timestamp = NOW.parse().unwrap();
    let mut cluster =
        Cluster::of(&items, Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
    let key = |name: &str| Key { namespace: "ns".into(), name: name.into() };
    let ahead_message = |cluster: &mut Cluster| cluster.index.forecast(&key("third"), now).unwrap().message(now);
    assert_eq!(
        ahead_message(&mut cluster),
        "third in the queue, no forecast: 2 of 2 jobs ahead have no activeDeadlineSeconds"
    );
    cluster.index.queue.remove(&key("next"));
    assert_eq!(
        ahead_message(&mut cluster),
        "second in the queue, no forecast: 1 of 1 job ahead has no activeDeadlineSeconds"
    );
    cluster.index.queue.remove(&key("gang"));
    let alone = ahead_message(&mut cluster);
    assert!(alone.starts_with("first in the queue") && !alone.contains("ahead"), "{alone}");
}
