//! A day with hundreds of queued jobs, with simulated clocks and without an API server.

use super::hour::Hour;
use super::*;
use crate::queue::Schedule;
use k8s_openapi::api::core::v1::Pod;

const JOBS: usize = 500;
const NODES: usize = 6;
/// Interval between two changes of the free resources.
const CHANGE: Duration = Duration::from_secs(200);
const HOUR: Duration = Duration::from_secs(3600);

/// Cost of some simulated hours.
struct Counted {
    writes: usize,
    /// [`Hour::kept`] after half of the time, and at the end.
    kept: [usize; 2],
    /// Resident memory of this process at the same times, in KiB.
    resident: [u64; 2],
}

impl Counted {
    /// Checks that the index grows by at most a twentieth.
    fn is_flat(&self) {
        let [at_half, at_end] = self.kept;
        assert!(
            at_end <= at_half + at_half / 20,
            "what is kept grows: {at_half} bytes after half of the time, {at_end} at the end"
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
async fn hundreds_that_wait_cost_one_write_a_second_at_most_and_no_memory() {
    let count = std::env::var("SWITCHYARD_SIMULATED_HOURS").map_or(1, |hours| hours.parse().unwrap());
    let counted = hours(count);
    let seconds = count * HOUR.as_secs();
    assert!(counted.writes as u64 <= seconds, "{} writes in {seconds} s", counted.writes);
    assert!(
        counted.writes > JOBS,
        "each waiting job reports free resources, also behind the head: {} writes",
        counted.writes
    );
    counted.is_flat();
    let growth = |[before, after]: [f64; 2]| ((after - before) / before * 1000.0).round() / 10.0;
    let result = json!({
        "waitingJobs": JOBS, "simulatedHours": count, "changesOfWhatIsFree": seconds / CHANGE.as_secs(), "writes": counted.writes,
        "writesPerSecond": (counted.writes as f64 / seconds as f64 * 1000.0).round() / 1000.0,
        "rssMiBAtHalf": counted.resident[0] >> 10, "rssMiBAtEnd": counted.resident[1] >> 10,
        "growthPercent": growth(counted.resident.map(|kib| kib as f64)),
        "keptBytesGrowthPercent": growth(counted.kept.map(|bytes| bytes as f64)),
    });
    println!("\nday: {result}");
}

/// Regression test: each released node caused plans of all jobs that fit on it, and each status
/// write caused another plan of its job. In a cluster of 10,000 nodes this took 6 s per node.
#[tokio::test]
async fn a_node_that_becomes_free_is_planned_for_by_the_head_and_by_whom_it_helps() {
    let mut hour = Hour::new(NODES);
    let busy: Vec<Pod> = (0..NODES).map(|node| hour.foreign(node, "6")).collect();
    hour.apply_jobs(0..JOBS, |_| 1);
    hour.work_until(Duration::from_secs(1));
    assert_eq!(hour.context.index().queue.len(), JOBS);
    assert!(hour.plans <= 3 * JOBS + NODES, "for the attempt, the pods and the place of each: {}", hour.plans);
    for (node, pod) in busy.iter().enumerate() {
        hour.plans = 0;
        hour.take_in(Look::InAnyCase, |index, _| index.delete_pod(&pod.metadata));
        hour.work_until(hour.passed + Duration::from_secs(1));
        assert_eq!(hour.context.index().queue.len(), JOBS - 2 * (node + 1), "a node has room for two pods");
        assert!(hour.plans <= 10, "{} plans for one node", hour.plans);
    }
}

/// Regression test: a new leader planned the whole queue before a job that had just been created.
/// With 500 jobs and 10,000 nodes this took 5 s.
#[tokio::test]
async fn a_new_leader_comes_to_a_job_that_finds_a_place_before_it_plans_the_whole_queue() {
    let mut hour = Hour::new(NODES);
    for node in 0..NODES - 1 {
        hour.foreign(node, "6");
    }
    let big = |number| 2 + number % 3;
    hour.apply_jobs(0..JOBS, big);
    hour.work_until(Duration::from_secs(1));
    assert_eq!(hour.context.index().queue.len(), JOBS);
    // The next leader knows nothing of the last leader's plans.
    let last = hour.context.index().reservation.take();
    let held: Vec<String> = last.iter().flat_map(|held| held.takers()).collect();
    held.iter().for_each(|taker| drop(hour.context.index().usage.set_share(taker, None)));
    hour.context.index().queue.clear();
    hour.apply_job(JOBS, 1, "1");
    hour.context.queue.with(Schedule::clear);
    let keys = hour.context.index().all_in_order(hour.epoch);
    keys.into_iter().for_each(|key| hour.context.queue.add(key, hour.instant()));
    hour.plans = 0;
    // Long enough for the job's pods to be created, observed and placed.
    hour.work_until(hour.passed + PUT_OFF * 10);
    let (placed, waiting) = {
        let index = hour.context.index();
        let last = &index.jobs[&Key { namespace: "t".into(), name: format!("j{JOBS}") }];
        (switchyard_ledger::job::placement_of(last).is_some(), index.queue.len())
    };
    assert_eq!((placed, waiting), (true, JOBS));
    assert!(hour.plans <= 20, "{} plans", hour.plans);
    // The deferred plans run then. Each job is planned once, because the new job is known.
    hour.plans = 0;
    hour.work_until(hour.passed + PUT_OFF * 2 * JOBS as u32);
    assert!((JOBS - 20..=JOBS + 10).contains(&hour.plans), "{} plans", hour.plans);
}

/// Regression test (S16): with 10,000 gated pods of queued gangs, each later job waited for plans
/// of these gangs.
#[tokio::test]
async fn a_small_job_costs_as_much_behind_ten_thousand_gated_pods_as_without_them() {
    let costs = [0, JOBS].map(|gangs| {
        let mut hour = Hour::new(NODES);
        hour.apply_jobs(0..gangs, |_| 20);
        hour.work_until(HOUR);
        let gated = |index: &Index| {
            index.job_states.values().flat_map(|family| family.pods.values()).filter(|pod| pod.gated).count()
        };
        assert_eq!(gated(&hour.context.index()), gangs * 20);
        (hour.plans, hour.writes) = (0, 0);
        hour.apply_job(gangs, 1, "1");
        hour.work_until(hour.passed + Duration::from_secs(1));
        let index = hour.context.index();
        let small = &index.jobs[&Key { namespace: "t".into(), name: format!("j{gangs}") }];
        assert!(switchyard_ledger::job::placement_of(small).is_some(), "{:?}", small.status);
        (hour.plans, hour.writes)
    });
    assert_eq!(costs[1], costs[0], "plans and writes");
}

/// Simulates some hours with changes of the free resources, after one hour in which all jobs
/// arrive.
fn hours(count: u64) -> Counted {
    let mut hour = Hour::new(NODES);
    let mut busy: Vec<Pod> = (0..NODES).map(|node| hour.foreign(node, "6")).collect();
    hour.apply_jobs(0..JOBS, |number| if number == 0 { NODES - 1 } else { 2 + number % 3 });
    hour.work_until(HOUR);
    assert_eq!(hour.context.index().queue.len(), JOBS);
    hour.writes = 0;
    let changes = (count * HOUR.as_secs() / CHANGE.as_secs()) as usize;
    let mut at_half = (0, 0);
    for number in 0..changes {
        if number == changes / 2 {
            at_half = (hour.kept(), resident());
        }
        // The head has reserved all nodes but the busiest one. The free resources there change, but
        // no gang fits.
        let node = (number / 2) % NODES;
        let uid = busy[node].metadata.clone();
        hour.take_in(Look::InAnyCase, |index, _| index.delete_pod(&uid));
        busy[node] = hour.foreign(node, if number.is_multiple_of(2) { "7" } else { "6" });
        hour.work_until(hour.passed + CHANGE);
    }
    let at_end = (hour.kept(), resident());
    Counted { writes: hour.writes, kept: [at_half.0, at_end.0], resident: [at_half.1, at_end.1] }
}
