//! Backfill: which jobs may use the reserved nodes until the head of the queue can start.

use super::*;
use crate::index::queue::PredictorSettings;
use jiff::SignedDuration;
use switchyard_plan::cluster::queue_order::Basis;

const HOUR: SignedDuration = SignedDuration::from_hours(1);

/// Three nodes: on the first runs a job with one hour left, and a gang that needs all three is
/// queued.
fn gang_waits_an_hour(now: Timestamp) -> Vec<Value> {
    let mut items = gang_waits(0);
    items[3]["spec"]["activeDeadlineSeconds"] = json!(7200);
    items[3]["status"]["placedTime"] = json!(now - HOUR);
    items
}

fn explain(items: &[Value], now: Timestamp, job: &TrainJob) -> PlacementVerdict {
    let mut cluster =
        Cluster::of(items, Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
    cluster.explain(job, PreviousPlacement::Ignored).unwrap()
}

#[test]
fn a_job_that_ends_before_the_head_starts_is_backfilled() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let items = gang_waits_an_hour(now);
    let late = |limit: Value| explain(&items, now, &fresh("late", 1, json!({"activeDeadlineSeconds": limit})));
    let forecast = |verdict: &PlacementVerdict, limit| verdict.ahead.as_ref().and_then(|ahead| ahead.forecast(limit));

    let short = late(json!(3600));
    assert_eq!(nodes(&short), ["n2"]);
    let overtaking =
        short.ahead.as_ref().and_then(|ahead| ahead.describe_overtaking(&short.placement.as_ref().unwrap().status));
    let expected = "ends before ns/gang, which is ahead in the queue, can start by 2026-06-01T13:00:00Z";
    assert_eq!(overtaking.as_deref(), Some(expected));

    let long = late(json!(3601));
    assert!(long.placement.is_err());
    assert_eq!(ahead_message(&long), "3 nodes are reserved for ns/gang, which is ahead in the queue");
    let expected =
        "ns/gang can start by 2026-06-01T13:00:00Z: this job may still be running then (activeDeadlineSeconds: 3601)";
    assert_eq!(forecast(&long, Some(3601)).as_deref(), Some(expected));

    let unlimited = late(Value::Null);
    assert!(unlimited.placement.is_err());
    let expected = "ns/gang can start by 2026-06-01T13:00:00Z: with an activeDeadlineSeconds that ends before that, this job can use them until then";
    assert_eq!(forecast(&unlimited, None).as_deref(), Some(expected));
}

#[test]
fn without_a_start_estimate_reserved_nodes_stay_idle() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut items = gang_waits_an_hour(now);
    items[3]["spec"].as_object_mut().unwrap().remove("activeDeadlineSeconds");
    let verdict = explain(&items, now, &fresh("late", 1, json!({"activeDeadlineSeconds": 1})));
    assert!(verdict.placement.is_err());
    assert_eq!(verdict.ahead.unwrap().start, None);
}

/// A Job's pod runs on a node. The start of the head becomes unknown only if it needs that pod's
/// resources.
#[test]
fn foreign_pods_count_if_the_head_needs_their_resources() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    for (cpu, is_known) in [("2", true), ("3", false)] {
        let mut items = gang_waits_an_hour(now);
        items.push(json!({
            "kind": "Pod", "metadata": {"name": "agent", "namespace": "kube-system", "uid": "agent"},
            "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
        }));
        let verdict = explain(&items, now, &fresh("late", 1, json!({"activeDeadlineSeconds": 60})));
        assert_eq!((verdict.placement.is_ok(), verdict.ahead.unwrap().start.is_some()), (is_known, is_known), "{cpu}");
    }
}

/// The job was stopped late or its clock was wrong. The head waits for its node, and no job is
/// backfilled into the past.
#[test]
fn a_job_past_its_limit_can_end_at_any_moment() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let verdict =
        explain(&gang_waits_an_hour(now), now + HOUR * 2, &fresh("late", 1, json!({"activeDeadlineSeconds": 1})));
    assert!(verdict.placement.is_err());
    assert_eq!(verdict.ahead.unwrap().start, Some((now + HOUR * 2, Basis::Limits)));
}

/// It prefers nodes that become free first over those that are least used.
#[test]
fn the_head_reserves_the_nodes_with_the_earliest_start() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut items: Vec<Value> = ["n1", "n2", "n3"].map(node).into();
    for (name, on, limit) in [("long", "n1", json!(90_000)), ("forever", "n2", Value::Null), ("short", "n3", json!(60))]
    {
        let mut runs = job(name, 1, "2026-01-01T00:00:00Z", placed(&[on]));
        runs["spec"]["activeDeadlineSeconds"] = limit;
        runs["status"]["placedTime"] = json!(now);
        items.extend([runs, pod(name, 0, Some(on), 0)]);
    }
    items.push(job("head", 1, "2026-01-02T00:00:00Z", waiting()));
    items.push(pod("head", 0, None, 0));
    let ahead = explain(&items, now, &fresh("late", 1, json!({}))).ahead.unwrap();
    assert_eq!(
        (ahead.nodes, ahead.start),
        (vec!["n3".to_string()], Some((now + SignedDuration::from_secs(60), Basis::Limits)))
    );
}

/// A cluster in which the running job has no limit and started an hour ago.
fn predicting(now: Timestamp, ended: i64) -> Cluster {
    let mut items = gang_waits_an_hour(now);
    items[3]["spec"].as_object_mut().unwrap().remove("activeDeadlineSeconds");
    with_past(&items, now, ended)
}

/// A cluster with run time estimates from this many ended jobs, which ran for 1, 2, 3 and so on
/// minutes.
fn with_past(items: &[Value], now: Timestamp, ended: i64) -> Cluster {
    let mut cluster =
        Cluster::of(items, Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
    cluster.index.queue.configure(|queue| queue.predictor = Some(PredictorSettings::default()));
    for minutes in 1..=ended {
        let mut job = fresh(&format!("past-{minutes}"), 1, json!({}));
        job.metadata.uid = job.metadata.name.clone();
        let status = json!({
            "placedTime": now - HOUR * 9, "completionTime": now - HOUR * 9 + SignedDuration::from_mins(minutes),
            "conditions": [{"type": "Complete", "status": "True", "reason": "Complete", "message": "", "lastTransitionTime": now}],
        });
        job.status = Some(serde_json::from_value(status).unwrap());
        // A job counts once, however often the watch reports it.
        cluster.index.apply_job(job.clone());
        cluster.index.apply_job(job);
    }
    cluster.look_again();
    cluster
}

impl Cluster {
    /// Recomputes the reservation, as after a change.
    fn look_again(&mut self) {
        self.index.queue.invalidate_reservation();
        self.fill_queue();
    }
}

#[test]
fn run_time_estimates_replace_missing_limits() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let late = fresh("late", 1, json!({}));
    // The longest of the last 20 ran for 20 minutes, for an hour, or for an hour and a minute,
    // which is too long.
    for (ended, goes) in [(19, false), (20, true), (60, true), (61, false)] {
        let verdict = predicting(now, ended).explain(&late, PreviousPlacement::Ignored).unwrap();
        assert_eq!(verdict.placement.is_ok(), goes, "{ended} ended");
        let ahead = verdict.ahead.unwrap();
        // A job that has run for an hour is expected to run for another.
        assert_eq!(ahead.start, Some((now + HOUR, Basis::RunTimes)));
        assert_eq!(ahead.ends_before, goes.then_some(Basis::RunTimes));
        let message = ahead.forecast(None).unwrap();
        assert!(message.starts_with("ns/gang is expected to start by 2026-06-01T13:00:00Z: "), "{message}");
        assert_eq!(message.contains("jobs like this one ran for less"), goes, "{message}");
        if let Ok(placement) = &verdict.placement {
            let expected = "is expected to end before ns/gang, which is ahead in the queue, is expected to start by 2026-06-01T13:00:00Z";
            assert_eq!(ahead.describe_overtaking(&placement.status).as_deref(), Some(expected));
        }
    }
    // A job with another number of pods is another kind of job.
    let verdict = predicting(now, 20).explain(&fresh("late", 2, json!({})), PreviousPlacement::Ignored).unwrap();
    assert!(verdict.placement.is_err());
}

#[test]
fn run_time_estimates_do_not_starve_the_head() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut cluster = predicting(now, 20);
    let late = fresh("late", 1, json!({}));
    assert!(cluster.explain(&late, PreviousPlacement::Ignored).unwrap().placement.is_ok());
    // The running job has not ended when it was expected to. It may run for another two hours, but
    // no job is backfilled because of that.
    cluster.now = now + HOUR + SignedDuration::from_secs(1);
    cluster.look_again();
    let verdict = cluster.explain(&late, PreviousPlacement::Ignored).unwrap();
    assert!(verdict.placement.is_err());
    assert_eq!(
        verdict.ahead.unwrap().start,
        Some((cluster.now + (cluster.now.duration_since(now - HOUR)), Basis::RunTimes))
    );
    let with_limit = fresh("late", 1, json!({"activeDeadlineSeconds": 7200}));
    assert!(cluster.explain(&with_limit, PreviousPlacement::Ignored).unwrap().placement.is_ok());
}

#[test]
fn estimates_never_delay_a_start_promised_by_limits() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let verdict = with_past(&gang_waits_an_hour(now), now, 20)
        .explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored)
        .unwrap();
    assert!(verdict.placement.is_err());
    let ahead = verdict.ahead.unwrap();
    assert_eq!((ahead.start, ahead.ends_before), (Some((now + HOUR, Basis::Limits)), None));
}

/// Regression test: a job that went first because of a short limit raised it once it was placed,
/// and the head waited for a month.
#[test]
fn a_limit_raised_after_placement_delays_no_other_job() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut items = gang_waits_an_hour(now);
    items[3]["status"]["placedLimitSeconds"] = json!(3660);
    let start = |items: &[Value]| explain(items, now, &fresh("late", 1, json!({}))).ahead.unwrap().start;
    assert_eq!(start(&items), Some((now + SignedDuration::from_secs(60), Basis::Limits)));
    items[3]["spec"]["activeDeadlineSeconds"] = json!(3601);
    assert_eq!(start(&items), Some((now + SignedDuration::from_secs(1), Basis::Limits)), "a lower limit counts");
    // Once the first limit has passed, the head need not wait for the second.
    items[3]["spec"].as_object_mut().unwrap().remove("activeDeadlineSeconds");
    items[3]["status"]["placedLimitSeconds"] = json!(3600);
    let to = |priority: i32, items: &[Value]| {
        let mut items = items.to_vec();
        items[4]["spec"]["priority"] = json!(priority);
        let cluster =
            Cluster::of(&items, Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
        cluster.index.job_states[&JobId { namespace: "ns".into(), uid: "small".into() }].preempted_by.clone()
    };
    let why = "ns/gang (priority 0); its limit was raised after placement, and the original limit has passed";
    assert_eq!([to(0, &items), to(1, &items)], [Some(why.to_string()), None], "never by a job of lower priority");
    items[3]["spec"]["activeDeadlineSeconds"] = json!(3600);
    assert_eq!(to(0, &items), None, "it was not raised");
}
