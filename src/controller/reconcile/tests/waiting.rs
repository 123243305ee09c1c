//! A day with hundreds of queued jobs, with simulated clocks and without an API server.

use super::simulation::Simulation;
use super::*;
use crate::queue::Schedule;
use k8s_openapi::api::core::v1::Pod;

const JOBS: usize = 500;
const NODES: usize = 6;
/// Interval between two changes of the free resources.
const CHANGE_INTERVAL: Duration = Duration::from_secs(200);
const HOUR: Duration = Duration::from_secs(3600);

/// Cost of some simulated hours.
struct Cost {
    writes: usize,
    /// [`Simulation::index_size`] after half of the time, and at the end.
    index_size: [usize; 2],
    /// Resident memory of this process at the same times, in KiB.
    resident: [u64; 2],
}

impl Cost {
    /// Checks that the index grows by at most a twentieth.
    fn assert_flat_memory(&self) {
        let [at_half, at_end] = self.index_size;
        assert!(
            at_end <= at_half + at_half / 20,
            "the index grows: {at_half} bytes after half of the time, {at_end} bytes at the end"
        );
    }
}

fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Regression test: five hundred jobs each wrote their status once a minute, and every pod exit in
/// the cluster caused plans of all of them. `cargo xtask bench cluster-size` simulates a day, which
/// takes minutes, and parses the line that is printed.
#[tokio::test]
async fn hundreds_of_queued_jobs_cost_at_most_one_write_per_second_and_no_memory() {
    let count = std::env::var("SWITCHYARD_SIMULATED_HOURS").map_or(1, |hours| hours.parse().unwrap());
    let cost = simulate_hours(count);
    let seconds = count * HOUR.as_secs();
    assert!(cost.writes as u64 <= seconds, "{} writes in {seconds} s", cost.writes);
    assert!(
        cost.writes > JOBS,
        "every queued job must report free resources, even behind the head: {} writes",
        cost.writes
    );
    cost.assert_flat_memory();
    let growth = |[before, after]: [f64; 2]| ((after - before) / before * 1000.0).round() / 10.0;
    let result = json!({
        "waitingJobs": JOBS, "simulatedHours": count, "changesOfWhatIsFree": seconds / CHANGE_INTERVAL.as_secs(), "writes": cost.writes,
        "writesPerSecond": (cost.writes as f64 / seconds as f64 * 1000.0).round() / 1000.0,
        "rssMiBAtHalf": cost.resident[0] >> 10, "rssMiBAtEnd": cost.resident[1] >> 10,
        "growthPercent": growth(cost.resident.map(|kib| kib as f64)),
        "keptBytesGrowthPercent": growth(cost.index_size.map(|bytes| bytes as f64)),
    });
    println!("\nday: {result}");
}

/// Regression test: each released node caused plans of all jobs that fit on it, and each status
/// write caused another plan of its job. In a cluster of 10,000 nodes this took 6 s per node.
#[tokio::test]
async fn a_released_node_replans_only_the_head_and_jobs_that_fit() {
    let mut simulation = Simulation::new(NODES);
    let foreign_pods: Vec<Pod> = (0..NODES).map(|node| simulation.add_foreign_pod(node, "6")).collect();
    simulation.apply_jobs(0..JOBS, |_| 1);
    simulation.run_until(Duration::from_secs(1));
    assert_eq!(simulation.context.index().queue.len(), JOBS);
    assert!(
        simulation.plans <= 3 * JOBS + NODES,
        "at most three plans per job, for attempt, pods and placement; got {}",
        simulation.plans
    );
    for (node, pod) in foreign_pods.iter().enumerate() {
        simulation.plans = 0;
        simulation.apply_change(Pass::Required, |index, _| index.delete_pod(&pod.metadata));
        simulation.run_until(simulation.elapsed + Duration::from_secs(1));
        assert_eq!(simulation.context.index().queue.len(), JOBS - 2 * (node + 1), "a node has room for two pods");
        assert!(simulation.plans <= 10, "{} plans for one node", simulation.plans);
    }
}

/// Regression test: a new leader planned the whole queue before a job that had just been created.
/// With 500 jobs and 10,000 nodes this took 5 s.
#[tokio::test]
async fn a_new_leader_plans_a_placeable_job_before_the_whole_queue() {
    let mut simulation = Simulation::new(NODES);
    for node in 0..NODES - 1 {
        simulation.add_foreign_pod(node, "6");
    }
    let size = |number| 2 + number % 3;
    simulation.apply_jobs(0..JOBS, size);
    simulation.run_until(Duration::from_secs(1));
    assert_eq!(simulation.context.index().queue.len(), JOBS);
    // The next leader knows nothing of the last leader's plans.
    let last = std::mem::take(&mut simulation.context.index().queue);
    let held: Vec<String> = last.reservation().into_iter().flat_map(|held| held.takers()).collect();
    held.iter().for_each(|taker| drop(simulation.context.index().usage.set_share(taker, None)));
    simulation.apply_job(JOBS, 1, "1");
    simulation.context.queue.with(Schedule::clear);
    let keys = simulation.context.index().all_in_order(simulation.epoch);
    keys.into_iter().for_each(|key| simulation.context.queue.add(key, simulation.instant()));
    simulation.plans = 0;
    // Long enough for the job's pods to be created, observed and placed.
    simulation.run_until(simulation.elapsed + DEFERRAL * 10);
    let (placed, waiting) = {
        let index = simulation.context.index();
        let last = &index.jobs[&Key { namespace: "t".into(), name: format!("j{JOBS}") }];
        (switchyard_ledger::job::placement_of(last).is_some(), index.queue.len())
    };
    assert_eq!((placed, waiting), (true, JOBS));
    assert!(simulation.plans <= 20, "{} plans", simulation.plans);
    // The deferred plans run then. Each job is planned once, because the new job is known.
    simulation.plans = 0;
    simulation.run_until(simulation.elapsed + DEFERRAL * 2 * JOBS as u32);
    assert!((JOBS - 20..=JOBS + 10).contains(&simulation.plans), "{} plans", simulation.plans);
}

/// Regression test (S16): with 10,000 gated pods of queued gangs, each later job waited for plans
/// of these gangs.
#[tokio::test]
async fn a_small_job_costs_the_same_behind_ten_thousand_gated_pods() {
    let costs = [0, JOBS].map(|gangs| {
        let mut simulation = Simulation::new(NODES);
        simulation.apply_jobs(0..gangs, |_| 20);
        simulation.run_until(HOUR);
        let gated = |index: &Index| {
            index.job_states.values().flat_map(|family| family.pods.values()).filter(|pod| pod.gated).count()
        };
        assert_eq!(gated(&simulation.context.index()), gangs * 20);
        (simulation.plans, simulation.writes) = (0, 0);
        simulation.apply_job(gangs, 1, "1");
        simulation.run_until(simulation.elapsed + Duration::from_secs(1));
        let index = simulation.context.index();
        let small = &index.jobs[&Key { namespace: "t".into(), name: format!("j{gangs}") }];
        assert!(switchyard_ledger::job::placement_of(small).is_some(), "{:?}", small.status);
        (simulation.plans, simulation.writes)
    });
    assert_eq!(costs[1], costs[0], "plans and writes");
}

/// Simulates some hours with changes of the free resources, after one hour in which all jobs
/// arrive.
fn simulate_hours(count: u64) -> Cost {
    let mut simulation = Simulation::new(NODES);
    let mut foreign_pods: Vec<Pod> = (0..NODES).map(|node| simulation.add_foreign_pod(node, "6")).collect();
    simulation.apply_jobs(0..JOBS, |number| if number == 0 { NODES - 1 } else { 2 + number % 3 });
    simulation.run_until(HOUR);
    assert_eq!(simulation.context.index().queue.len(), JOBS);
    simulation.writes = 0;
    let changes = (count * HOUR.as_secs() / CHANGE_INTERVAL.as_secs()) as usize;
    let mut at_half = (0, 0);
    for number in 0..changes {
        if number == changes / 2 {
            at_half = (simulation.index_size(), resident());
        }
        // The head has reserved all nodes but the busiest one. The free resources there change, but
        // no gang fits.
        let node = (number / 2) % NODES;
        let uid = foreign_pods[node].metadata.clone();
        simulation.apply_change(Pass::Required, |index, _| index.delete_pod(&uid));
        foreign_pods[node] = simulation.add_foreign_pod(node, if number.is_multiple_of(2) { "7" } else { "6" });
        simulation.run_until(simulation.elapsed + CHANGE_INTERVAL);
    }
    let at_end = (simulation.index_size(), resident());
    Cost { writes: simulation.writes, index_size: [at_half.0, at_end.0], resident: [at_half.1, at_end.1] }
}
