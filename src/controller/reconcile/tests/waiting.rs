//! A day with hundreds of jobs that wait, with simulated clocks and without an API server.

use super::*;
use crate::queue::Schedule;
use jiff::ToSpan;
use k8s_openapi::api::core::v1::{Node, Pod};
use std::fmt::Write;
use switchyard_crds::labels;
use switchyard_plan::objects::{Object, observed_content};

const JOBS: usize = 500;
const NODES: usize = 6;
/// Between two changes of what is free.
const CHANGE: Duration = Duration::from_secs(200);
const HOUR: Duration = Duration::from_secs(3600);

/// A controller whose clock is told, and whose writes go through.
struct Hour {
    context: Context,
    epoch: Timestamp,
    start: Instant,
    passed: Duration,
    /// Resource version of the last write.
    version: u64,
    writes: usize,
    plans: usize,
}

impl Hour {
    /// With empty nodes.
    fn new() -> Hour {
        let (leader, leading) = election::channel(boot_time);
        leader.forever();
        let mut hour = Hour {
            context: context(leading),
            epoch: "2026-01-01T00:00:00Z".parse().unwrap(),
            start: Instant::now(),
            passed: Duration::ZERO,
            version: 0,
            writes: 0,
            plans: 0,
        };
        for node in 0..NODES {
            let node = json!({
                "metadata": {"name": format!("n{node}")},
                "status": {"allocatable": {"cpu": "8", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]},
            });
            let node: Node = serde_json::from_value(node).unwrap();
            hour.take_in(Look::InAnyCase, |index, _| index.apply_node(&node));
        }
        hour
    }

    /// Jobs with so many pods of 4 CPUs, one a second.
    fn apply_jobs(&mut self, numbers: std::ops::Range<usize>, nodes: impl Fn(usize) -> usize) {
        numbers.for_each(|number| self.apply_job(number, nodes(number), "4"));
    }

    fn apply_job(&mut self, number: usize, nodes: usize, cpu: &str) {
        let job = json!({
            "apiVersion": labels::API_VERSION, "kind": "TrainJob",
            "metadata": {"name": format!("j{number}"), "namespace": "t", "uid": format!("u{number}"),
                "creationTimestamp": self.epoch + (number as i64).seconds()},
            "spec": {"trainer": {"framework": "Plain", "image": "i", "numNodes": nodes,
                "resourcesPerNode": {"limits": {"cpu": cpu}}}},
        });
        let mut job: TrainJob = serde_json::from_value(job).unwrap();
        self.take_in(Look::IfWorthIt, |index, version| {
            job.metadata.resource_version = Some(version);
            index.apply_job(job)
        });
    }

    fn instant(&self) -> Instant {
        self.start + self.passed
    }

    /// What a watch shows.
    fn take_in(&mut self, look: Look, change: impl FnOnce(&mut Index, String) -> switchyard_ledger::index::Effect) {
        self.version += 1;
        let version = self.version.to_string();
        self.context.take_in(self.instant(), look, |index| change(index, version));
    }

    /// A pod of somebody else, which takes most of a node.
    fn foreign(&mut self, node: usize, cpu: &str) -> Pod {
        let pod = json!({
            "metadata": {"name": format!("other-{node}"), "namespace": "o", "uid": format!("other-{node}-{}", self.version)},
            "spec": {"nodeName": format!("n{node}"), "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
            "status": {"phase": "Running"},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.take_in(Look::InAnyCase, |index, _| index.apply_pod(&pod));
        pod
    }

    /// Does what is due until then.
    fn work_until(&mut self, end: Duration) {
        loop {
            let next = self.context.queue.with(|schedule| schedule.next_due());
            let Some(next) = next.filter(|next| *next <= self.start + end) else { break };
            self.passed = next.saturating_duration_since(self.start).max(self.passed);
            let now = self.instant();
            let Some((key, look)) = self.context.queue.with(|schedule| schedule.pop(now)) else { break };
            let is_worth_it = look == Look::InAnyCase || self.context.index().is_worth_a_plan(&key);
            if is_worth_it && !self.context.is_put_off(&key, now) {
                self.reconcile(&key);
            }
            self.context.queue.with(|schedule| schedule.done(&key));
        }
        self.passed = end;
    }

    fn reconcile(&mut self, key: &Key) {
        self.plans += 1;
        let now = self.epoch + jiff::SignedDuration::try_from(self.passed).unwrap();
        let planned = self.context.plan(key, now, self.instant());
        let Ok(Some(Planned { job, id, plan, .. })) = planned else { panic!("the cache is behind") };
        if let Some(wake) = plan.wake {
            let wait = Duration::try_from(wake.duration_since(now)).unwrap_or_default();
            self.context.queue.add(key.clone(), self.instant() + wait);
        }
        for action in plan.actions {
            let object = match action {
                Action::Create(object) => object,
                // There is no scheduler, so nothing would come of it.
                Action::Release { .. } => continue,
                action => panic!("{action:?}"),
            };
            self.take_in(Look::InAnyCase, |index, version| match object {
                Object::Pod(mut pod) => {
                    pod.metadata.uid = Some(format!("uid-{version}"));
                    index.apply_pod(&pod)
                }
                object => {
                    let content = observed_content(&object.content());
                    index.apply_object(object.kind(), object.metadata(), content)
                }
            });
        }
        if let Some(status) = plan.status {
            self.writes += 1;
            if let Some(family) = self.context.index().families.get_mut(&id) {
                family.status_written = Some(now);
                family.own.says(status.attempt.unwrap_or(0).unsigned_abs(), &words_of(&status));
            }
            let mut next = (*job).clone();
            next.status = Some(status);
            self.take_in(Look::IfWorthIt, |index, version| {
                index.wrote_status(key, &version);
                next.metadata.resource_version = Some(version);
                index.apply_job(next)
            });
        }
    }

    /// How many bytes what is kept has, written down. Nothing is kept of that: it would be in the resident memory.
    fn kept(&self) -> usize {
        let mut bytes = Bytes(0);
        write!(bytes, "{:?}", self.context.index()).unwrap();
        bytes.0
    }
}

struct Bytes(usize);

impl Write for Bytes {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 += text.len();
        Ok(())
    }
}

/// What some hours cost.
struct Counted {
    writes: usize,
    /// [`Hour::kept`] after half of the time, and at its end.
    kept: [usize; 2],
    /// Resident memory of this process in KiB, at the same times.
    resident: [u64; 2],
}

impl Counted {
    /// By how much what is kept may have grown: a twentieth.
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

/// Five hundred jobs wrote their statuses once a minute each, and every pod that ended anywhere had all of them planned. `cargo xtask bench
/// cluster-size` plays a day, which takes minutes, and reads the line that is printed.
#[tokio::test]
async fn hundreds_that_wait_cost_one_write_a_second_at_most_and_no_memory() {
    let count = std::env::var("SWITCHYARD_SIMULATED_HOURS").map_or(1, |hours| hours.parse().unwrap());
    let counted = hours(count);
    let seconds = count * HOUR.as_secs();
    assert!(counted.writes as u64 <= seconds, "{} writes in {seconds} s", counted.writes);
    assert!(counted.writes > JOBS, "what is free is told to each, also behind the head: {} writes", counted.writes);
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

/// Each node that became free had all jobs planned that it was enough for, and each status that was written its job once more. In a cluster of
/// 10,000 nodes that was 6 s of work for each node.
#[tokio::test]
async fn a_node_that_becomes_free_is_planned_for_by_the_head_and_by_whom_it_helps() {
    let mut hour = Hour::new();
    let busy: Vec<Pod> = (0..NODES).map(|node| hour.foreign(node, "6")).collect();
    hour.apply_jobs(0..JOBS, |_| 1);
    hour.work_until(Duration::from_secs(1));
    assert_eq!(hour.context.index().waiting.len(), JOBS);
    assert!(hour.plans <= 3 * JOBS + NODES, "for the attempt, the pods and the place of each: {}", hour.plans);
    for (node, pod) in busy.iter().enumerate() {
        hour.plans = 0;
        hour.take_in(Look::InAnyCase, |index, _| index.delete_pod(&pod.metadata));
        hour.work_until(hour.passed + Duration::from_secs(1));
        assert_eq!(hour.context.index().waiting.len(), JOBS - 2 * (node + 1), "a node has room for two pods");
        assert!(hour.plans <= 10, "{} plans for one node", hour.plans);
    }
}

/// A new leader planned the whole queue before it came to the job that had just been applied: with 500 jobs and 10,000 nodes that took 5 s.
#[tokio::test]
async fn a_new_leader_comes_to_a_job_that_finds_a_place_before_it_plans_the_whole_queue() {
    let mut hour = Hour::new();
    for node in 0..NODES - 1 {
        hour.foreign(node, "6");
    }
    let big = |number| 2 + number % 3;
    hour.apply_jobs(0..JOBS, big);
    hour.work_until(Duration::from_secs(1));
    assert_eq!(hour.context.index().waiting.len(), JOBS);
    // Nothing of the last leader's plans is known to the next one.
    let last = hour.context.index().reservation.take();
    let held: Vec<String> = last.iter().flat_map(|held| held.takers()).collect();
    held.iter().for_each(|taker| drop(hour.context.index().usage.set_share(taker, None)));
    hour.context.index().waiting.clear();
    hour.apply_job(JOBS, 1, "1");
    hour.context.queue.with(Schedule::clear);
    let keys = hour.context.index().all_in_order(hour.epoch);
    keys.into_iter().for_each(|key| hour.context.queue.add(key, hour.instant()));
    hour.plans = 0;
    // Its pods are made, seen, and get their place.
    hour.work_until(hour.passed + PUT_OFF * 10);
    let (placed, waiting) = {
        let index = hour.context.index();
        let last = &index.jobs[&Key { namespace: "t".into(), name: format!("j{JOBS}") }];
        (switchyard_ledger::job::placement_of(last).is_some(), index.waiting.len())
    };
    assert_eq!((placed, waiting), (true, JOBS));
    assert!(hour.plans <= 20, "{} plans", hour.plans);
    // What was put off is done then: each job knows the new one, and is planned once.
    hour.plans = 0;
    hour.work_until(hour.passed + PUT_OFF * 2 * JOBS as u32);
    assert!((JOBS - 20..=JOBS + 10).contains(&hour.plans), "{} plans", hour.plans);
}

/// Some hours with changes of what is free, after one in which all jobs arrive.
fn hours(count: u64) -> Counted {
    let mut hour = Hour::new();
    let mut busy: Vec<Pod> = (0..NODES).map(|node| hour.foreign(node, "6")).collect();
    hour.apply_jobs(0..JOBS, |number| if number == 0 { NODES - 1 } else { 2 + number % 3 });
    hour.work_until(HOUR);
    assert_eq!(hour.context.index().waiting.len(), JOBS);
    hour.writes = 0;
    let changes = (count * HOUR.as_secs() / CHANGE.as_secs()) as usize;
    let mut at_half = (0, 0);
    for number in 0..changes {
        if number == changes / 2 {
            at_half = (hour.kept(), resident());
        }
        // The head holds all nodes but the one that is used most: what is free there differs, and no gang fits.
        let node = (number / 2) % NODES;
        let uid = busy[node].metadata.clone();
        hour.take_in(Look::InAnyCase, |index, _| index.delete_pod(&uid));
        busy[node] = hour.foreign(node, if number.is_multiple_of(2) { "7" } else { "6" });
        hour.work_until(hour.passed + CHANGE);
    }
    let at_end = (hour.kept(), resident());
    Counted { writes: hour.writes, kept: [at_half.0, at_end.0], resident: [at_half.1, at_end.1] }
}
