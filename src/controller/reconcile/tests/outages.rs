//! Outages in simulated time. None of them ends an attempt whose ranks may be training.

use super::hour::Hour;
use super::*;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const NODES: usize = 20;
const JOBS: usize = NODES / 2;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A cluster in which all nodes are in use, two per job.
fn training() -> Hour {
    let mut hour = Hour::new(NODES);
    hour.binds = true;
    (0..JOBS).for_each(|number| hour.apply_job(number, 2, "8"));
    hour.work_until(seconds(60));
    restarts_are(&hour, 0);
    hour
}

fn later(hour: &mut Hour, time: Duration) {
    hour.work_until(hour.passed + time);
}

/// Checks that this number of jobs have restarted, and that the others run in their first attempt.
fn restarts_are(hour: &Hour, expected: usize) {
    let index = hour.context.index();
    assert_eq!(index.jobs.len(), JOBS);
    let is_first = |job: &TrainJob| {
        let status = job.status.as_ref().unwrap();
        let total = status.restarts.as_ref().map_or(0, |restarts| restarts.total);
        (status.attempt, total, stage_of(status)) == (Some(1), 0, Some("Running"))
    };
    let others: Vec<&TrainJob> = index.jobs.values().map(|job| &**job).filter(|job| !is_first(job)).collect();
    assert_eq!(others.len(), expected, "{:?}", others.first().map(|job| &job.status));
}

/// The node on which a rank of the first job runs.
fn node_of(hour: &Hour, rank: usize) -> usize {
    let name = hour.pods[&format!("j0-1-{rank}")].spec.as_ref().unwrap().node_name.clone().unwrap();
    name[1..].parse().unwrap()
}

/// A failing leaf switch of the management network: 30 % of the nodes lose the API server one after
/// another, and recover in the same order.
#[tokio::test]
async fn a_third_of_the_nodes_that_cannot_reach_the_api_server_for_seven_minutes_ends_nothing() {
    let mut hour = training();
    for node in 0..6 {
        hour.set_node(node, "Unknown");
        later(&mut hour, seconds(5));
    }
    later(&mut hour, seconds(7 * 60 - 30));
    restarts_are(&hour, 0);
    for node in 0..6 {
        hour.set_node(node, "True");
        later(&mut hour, seconds(5));
    }
    later(&mut hour, seconds(3600));
    restarts_are(&hour, 0);
}

/// The circuit breaker covers nodes that went silent together. A single one is given up.
#[tokio::test]
async fn a_node_that_is_silent_alone_for_seven_minutes_ends_its_job() {
    let mut hour = training();
    hour.set_node(0, "Unknown");
    later(&mut hour, seconds(59));
    restarts_are(&hour, 0);
    later(&mut hour, seconds(6 * 60));
    restarts_are(&hour, 1);
}

#[tokio::test]
async fn ten_restarts_of_the_network_plugin_on_all_nodes_end_nothing() {
    let mut hour = training();
    for _ in 0..10 {
        (0..NODES).for_each(|node| hour.set_node(node, "False"));
        later(&mut hour, seconds(90));
        (0..NODES).for_each(|node| hour.set_node(node, "True"));
        later(&mut hour, seconds(30));
    }
    restarts_are(&hour, 0);
}

/// The log of rank 0 is unavailable during this time, but the log of rank 1 shows that all ranks
/// make progress.
#[tokio::test]
async fn a_kubelet_of_rank_0_that_is_silent_for_five_minutes_ends_nothing_while_rank_1_makes_steps() {
    for trains in [true, false] {
        let mut hour = training();
        let silent = node_of(&hour, 0);
        hour.set_node(silent, "Unknown");
        for step in 0..30 {
            later(&mut hour, seconds(10));
            let now = hour.now();
            let mut index = hour.context.index();
            let index = &mut *index;
            let id = JobId { namespace: "t".into(), uid: "u0".into() };
            let family = index.job_states.get_mut(&id).unwrap();
            let sources = family.progress.sources(1, family.pods.values(), index.usage.nodes());
            let Some(source) = sources.first().map(|pod| pod.uid.clone()).filter(|_| trains) else { continue };
            assert_eq!((sources.len(), sources[0].node_rank), (1, 1));
            family.progress.record_step(1, &source, Some(step), None, now);
        }
        hour.set_node(silent, "True");
        later(&mut hour, seconds(600));
        restarts_are(&hour, usize::from(!trains));
    }
}

/// `kubectl delete node`, then a restart of its kubelet.
#[tokio::test]
async fn a_node_that_is_deleted_and_registered_again_in_time_ends_nothing() {
    for (away, restarts) in [(35, 0), (45, 1)] {
        let mut hour = training();
        let node = node_of(&hour, 1);
        let gone = ObjectMeta { name: Some(format!("n{node}")), ..ObjectMeta::default() };
        hour.take_in(Look::InAnyCase, |index, _| index.delete_node(&gone));
        later(&mut hour, seconds(away));
        hour.set_node(node, "True");
        later(&mut hour, seconds(600));
        restarts_are(&hour, restarts);
    }
}
