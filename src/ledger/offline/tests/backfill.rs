//! Backfill: which jobs may use the reserved nodes until the head of the queue can start.

use super::*;
use crate::predictor::Predictor;
use jiff::SignedDuration;
use switchyard_plan::cluster::turn::Basis;

const HOUR: SignedDuration = SignedDuration::from_hours(1);

/// Three nodes: on the first runs a job with one hour left, and a gang that needs all three is
/// queued.
fn gang_waits_an_hour(now: Timestamp) -> Vec<Value> {
    let mut items = gang_waits(0);
    items[3]["spec"]["activeDeadlineSeconds"] = json!(7200);
    items[3]["status"]["placedTime"] = json!(now - HOUR);
    items
}

fn look(items: &[Value], now: Timestamp, job: &TrainJob) -> Verdict {
    let mut cluster = Cluster::of(items, Defaults::default(), Levels::default(), now).unwrap();
    cluster.look(job, Earlier::Forgotten).unwrap()
}

#[test]
fn a_job_that_ends_before_the_head_can_begin_may_use_its_nodes() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let items = gang_waits_an_hour(now);
    let late = |limit: Value| look(&items, now, &fresh("late", 1, json!({"activeDeadlineSeconds": limit})));
    let forecast = |verdict: &Verdict, limit| verdict.ahead.as_ref().and_then(|ahead| ahead.forecast(limit));

    let short = late(json!(3600));
    assert_eq!(nodes(&short), ["n2"]);
    let overtaken = short.ahead.as_ref().and_then(|ahead| ahead.overtaken(&short.place.as_ref().unwrap().status));
    let expected = "ends before ns/gang, which is ahead in the queue, can begin by 2026-06-01T13:00:00Z";
    assert_eq!(overtaken.as_deref(), Some(expected));

    let long = late(json!(3601));
    assert!(long.place.is_err());
    assert_eq!(words(&long), "3 nodes are held for ns/gang, which is ahead in the queue");
    let expected =
        "ns/gang can begin by 2026-06-01T13:00:00Z: this job may still run then (activeDeadlineSeconds: 3601)";
    assert_eq!(forecast(&long, Some(3601)).as_deref(), Some(expected));

    let unlimited = late(Value::Null);
    assert!(unlimited.place.is_err());
    let expected = "ns/gang can begin by 2026-06-01T13:00:00Z: with an activeDeadlineSeconds that ends before that, this job may use them until then";
    assert_eq!(forecast(&unlimited, None).as_deref(), Some(expected));
}

#[test]
fn where_nobody_knows_when_the_head_can_begin_its_nodes_stay_idle() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut items = gang_waits_an_hour(now);
    items[3]["spec"].as_object_mut().unwrap().remove("activeDeadlineSeconds");
    let verdict = look(&items, now, &fresh("late", 1, json!({"activeDeadlineSeconds": 1})));
    assert!(verdict.place.is_err());
    assert_eq!(verdict.ahead.unwrap().start, None);
}

/// A Job's pod runs on a node. The start of the head becomes unknown only if it needs that pod's
/// resources.
#[test]
fn pods_of_others_count_where_the_head_needs_what_they_have() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    for (cpu, is_known) in [("2", true), ("3", false)] {
        let mut items = gang_waits_an_hour(now);
        items.push(json!({
            "kind": "Pod", "metadata": {"name": "agent", "namespace": "kube-system", "uid": "agent"},
            "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
        }));
        let verdict = look(&items, now, &fresh("late", 1, json!({"activeDeadlineSeconds": 60})));
        assert_eq!((verdict.place.is_ok(), verdict.ahead.unwrap().start.is_some()), (is_known, is_known), "{cpu}");
    }
}

/// The job was stopped late or its clock was wrong. The head waits for its node, and no job is
/// backfilled into the past.
#[test]
fn a_job_that_ran_longer_than_its_limit_ends_at_any_moment() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let verdict =
        look(&gang_waits_an_hour(now), now + HOUR * 2, &fresh("late", 1, json!({"activeDeadlineSeconds": 1})));
    assert!(verdict.place.is_err());
    assert_eq!(verdict.ahead.unwrap().start, Some((now + HOUR * 2, Basis::Limits)));
}

/// It prefers nodes that become free first over those that are least used.
#[test]
fn the_head_holds_the_nodes_on_which_it_can_begin_first() {
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
    let ahead = look(&items, now, &fresh("late", 1, json!({}))).ahead.unwrap();
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
    let mut cluster = Cluster::of(items, Defaults::default(), Levels::default(), now).unwrap();
    cluster.index.predictor = Some(Predictor::default());
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
        self.index.reservation.as_mut().unwrap().is_stale = true;
        self.queue();
    }
}

#[test]
fn run_times_stand_in_for_limits_where_they_may() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let late = fresh("late", 1, json!({}));
    // The longest of the last 20 ran for 20 minutes, for an hour, or for an hour and a minute,
    // which is too long.
    for (ended, goes) in [(19, false), (20, true), (60, true), (61, false)] {
        let verdict = predicting(now, ended).look(&late, Earlier::Forgotten).unwrap();
        assert_eq!(verdict.place.is_ok(), goes, "{ended} ended");
        let ahead = verdict.ahead.unwrap();
        // A job that has run for an hour is expected to run for another.
        assert_eq!(ahead.start, Some((now + HOUR, Basis::RunTimes)));
        assert_eq!(ahead.ends_before, goes.then_some(Basis::RunTimes));
        let says = ahead.forecast(None).unwrap();
        assert!(says.starts_with("ns/gang is expected to begin by 2026-06-01T13:00:00Z: "), "{says}");
        assert_eq!(says.contains("jobs like this one ran for less"), goes, "{says}");
        if let Ok(place) = &verdict.place {
            let expected = "is expected to end before ns/gang, which is ahead in the queue, is expected to begin by 2026-06-01T13:00:00Z";
            assert_eq!(ahead.overtaken(&place.status).as_deref(), Some(expected));
        }
    }
    // A job with another number of pods is another kind of job.
    let verdict = predicting(now, 20).look(&fresh("late", 2, json!({})), Earlier::Forgotten).unwrap();
    assert!(verdict.place.is_err());
}

#[test]
fn the_head_is_not_put_off_again_and_again_for_run_times() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut cluster = predicting(now, 20);
    let late = fresh("late", 1, json!({}));
    assert!(cluster.look(&late, Earlier::Forgotten).unwrap().place.is_ok());
    // The running job has not ended when it was expected to. It may run for another two hours, but
    // no job is backfilled because of that.
    cluster.now = now + HOUR + SignedDuration::from_secs(1);
    cluster.look_again();
    let verdict = cluster.look(&late, Earlier::Forgotten).unwrap();
    assert!(verdict.place.is_err());
    assert_eq!(
        verdict.ahead.unwrap().start,
        Some((cluster.now + (cluster.now.duration_since(now - HOUR)), Basis::RunTimes))
    );
    let with_limit = fresh("late", 1, json!({"activeDeadlineSeconds": 7200}));
    assert!(cluster.look(&with_limit, Earlier::Forgotten).unwrap().place.is_ok());
}

#[test]
fn no_guess_puts_off_what_limits_promise() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let verdict =
        with_past(&gang_waits_an_hour(now), now, 20).look(&fresh("late", 1, json!({})), Earlier::Forgotten).unwrap();
    assert!(verdict.place.is_err());
    let ahead = verdict.ahead.unwrap();
    assert_eq!((ahead.start, ahead.ends_before), (Some((now + HOUR, Basis::Limits)), None));
}

/// Regression test: a job that went first because of a short limit raised it once it was placed,
/// and the head waited for a month.
#[test]
fn a_limit_that_was_raised_after_the_place_was_given_puts_nobody_off() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut items = gang_waits_an_hour(now);
    items[3]["status"]["placedLimitSeconds"] = json!(3660);
    let start = |items: &[Value]| look(items, now, &fresh("late", 1, json!({}))).ahead.unwrap().start;
    assert_eq!(start(&items), Some((now + SignedDuration::from_secs(60), Basis::Limits)));
    items[3]["spec"]["activeDeadlineSeconds"] = json!(3601);
    assert_eq!(start(&items), Some((now + SignedDuration::from_secs(1), Basis::Limits)), "a lower one counts");
    // Once the first limit has passed, the head need not wait for the second.
    items[3]["spec"].as_object_mut().unwrap().remove("activeDeadlineSeconds");
    items[3]["status"]["placedLimitSeconds"] = json!(3600);
    let to = |priority: i32, items: &[Value]| {
        let mut items = items.to_vec();
        items[4]["spec"]["priority"] = json!(priority);
        let cluster = Cluster::of(&items, Defaults::default(), Levels::default(), now).unwrap();
        cluster.index.families[&JobId { namespace: "ns".into(), uid: "small".into() }].gives_way_to.clone()
    };
    let why = "ns/gang (priority 0); its limit was raised after it was placed, and the one that it was placed with has passed";
    assert_eq!([to(0, &items), to(1, &items)], [Some(why.to_string()), None], "not to a job of lower priority");
    items[3]["spec"]["activeDeadlineSeconds"] = json!(3600);
    assert_eq!(to(0, &items), None, "it was not raised");
}
