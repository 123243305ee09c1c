//! Outages in simulated time. None of them ends an attempt whose ranks may be training.

use super::simulation::Simulation;
use super::*;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const NODES: usize = 20;
const JOBS: usize = NODES / 2;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A cluster in which all nodes are in use, two per job.
fn training_cluster() -> Simulation {
    let mut simulation = Simulation::new(NODES);
    simulation.binds = true;
    (0..JOBS).for_each(|number| simulation.apply_job(number, 2, "8"));
    simulation.run_until(seconds(60));
    assert_restarts(&simulation, 0);
    simulation
}

fn advance(simulation: &mut Simulation, time: Duration) {
    simulation.run_until(simulation.elapsed + time);
}

/// Checks that this number of jobs have restarted, and that the others run in their first attempt.
fn assert_restarts(simulation: &Simulation, expected: usize) {
    let index = simulation.context.index();
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
fn node_of(simulation: &Simulation, rank: usize) -> usize {
    let name = simulation.pods[&format!("j0-1-{rank}")].spec.as_ref().unwrap().node_name.clone().unwrap();
    name[1..].parse().unwrap()
}

/// A failing leaf switch of the management network: 30 % of the nodes lose the API server one after
/// another, and recover in the same order.
#[tokio::test]
async fn a_third_of_the_nodes_without_the_api_server_for_seven_minutes_restarts_nothing() {
    let mut simulation = training_cluster();
    for node in 0..6 {
        simulation.set_node(node, "Unknown");
        advance(&mut simulation, seconds(5));
    }
    advance(&mut simulation, seconds(7 * 60 - 30));
    assert_restarts(&simulation, 0);
    for node in 0..6 {
        simulation.set_node(node, "True");
        advance(&mut simulation, seconds(5));
    }
    advance(&mut simulation, seconds(3600));
    assert_restarts(&simulation, 0);
}

/// The circuit breaker covers nodes that went silent together. A single one is given up.
#[tokio::test]
async fn a_single_node_silent_for_seven_minutes_restarts_its_job() {
    let mut simulation = training_cluster();
    simulation.set_node(0, "Unknown");
    advance(&mut simulation, seconds(59));
    assert_restarts(&simulation, 0);
    advance(&mut simulation, seconds(6 * 60));
    assert_restarts(&simulation, 1);
}

#[tokio::test]
async fn ten_network_plugin_restarts_on_all_nodes_restart_nothing() {
    let mut simulation = training_cluster();
    for _ in 0..10 {
        (0..NODES).for_each(|node| simulation.set_node(node, "False"));
        advance(&mut simulation, seconds(90));
        (0..NODES).for_each(|node| simulation.set_node(node, "True"));
        advance(&mut simulation, seconds(30));
    }
    assert_restarts(&simulation, 0);
}

/// The log of rank 0 is unavailable during this time, but the log of rank 1 shows that all ranks
/// make progress.
#[tokio::test]
async fn a_silent_kubelet_of_rank_0_restarts_nothing_while_rank_1_progresses() {
    for trains in [true, false] {
        let mut simulation = training_cluster();
        let silent = node_of(&simulation, 0);
        simulation.set_node(silent, "Unknown");
        for step in 0..30 {
            advance(&mut simulation, seconds(10));
            let now = simulation.now();
            let mut index = simulation.context.index();
            let index = &mut *index;
            let id = JobId { namespace: "t".into(), uid: "u0".into() };
            let family = index.job_states.get_mut(&id).unwrap();
            let sources = family.progress.sources(1, family.pods.values(), index.usage.nodes());
            let Some(source) = sources.first().map(|pod| pod.uid.clone()).filter(|_| trains) else { continue };
            assert_eq!((sources.len(), sources[0].node_rank), (1, 1));
            family.progress.record_step(1, &source, Some(step), None, now);
        }
        simulation.set_node(silent, "True");
        advance(&mut simulation, seconds(600));
        assert_restarts(&simulation, usize::from(!trains));
    }
}

/// `kubectl delete node`, then a restart of its kubelet.
#[tokio::test]
async fn a_node_deleted_and_registered_again_in_time_restarts_nothing() {
    for (away, restarts) in [(35, 0), (45, 1)] {
        let mut simulation = training_cluster();
        let node = node_of(&simulation, 1);
        let gone = ObjectMeta { name: Some(format!("n{node}")), ..ObjectMeta::default() };
        simulation.apply_change(Pass::Required, |index, _| index.delete_node(&gone));
        advance(&mut simulation, seconds(away));
        simulation.set_node(node, "True");
        advance(&mut simulation, seconds(600));
        assert_restarts(&simulation, restarts);
    }
}
