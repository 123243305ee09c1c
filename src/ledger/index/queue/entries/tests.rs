//! Which changes justify planning which queued jobs again.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::job::JobId;
use jiff::Timestamp;
use serde_json::json;
use switchyard_crds::labels;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::cluster::queue_order::Basis;
use switchyard_plan::cluster::{PlacementRules, WaitReason};
use switchyard_plan::objects::Defaults;

/// A cluster on which every node starts out full.
struct Fixture(Index);

impl Fixture {
    fn new(nodes: usize) -> Fixture {
        let mut fixture = Fixture(Index::default());
        for number in 0..nodes {
            fixture.node(&format!("n{number}"), json!({}));
            fixture.busy(number, "8");
        }
        fixture
    }

    fn node(&mut self, name: &str, labels: serde_json::Value) -> BTreeSet<Key> {
        let node = json!({
            "metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        let effect = self.0.apply_node(&serde_json::from_value(node).unwrap());
        self.0.wake(&effect.room)
    }

    /// A pod of another workload requests this many CPUs of a node. Returns the jobs that are
    /// woken.
    fn busy(&mut self, node: usize, cpu: &str) -> Vec<String> {
        let pod = json!({
            "metadata": {"name": format!("other-{node}"), "namespace": "o", "uid": format!("other-{node}")},
            "spec": {"nodeName": format!("n{node}"), "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
        });
        let effect = self.0.apply_pod(&serde_json::from_value(pod).unwrap());
        self.0.wake(&effect.room).into_iter().map(|key| key.name).collect()
    }

    /// Queues a job after a plan that found this many nodes. Returns the jobs that this wakes.
    fn enqueue(
        &mut self,
        name: &str,
        created: i64,
        nodes: u32,
        spec: serde_json::Value,
        waits: WaitReason,
    ) -> Vec<String> {
        let mut job = json!({
            "apiVersion": labels::API_VERSION, "kind": "TrainJob",
            "metadata": {"name": name, "namespace": "t", "uid": name, "creationTimestamp": Timestamp::from_second(created).unwrap()},
            "spec": {"trainer": {"framework": "Plain", "image": "i", "numNodes": nodes, "resourcesPerNode": {"limits": {"cpu": "5"}}}},
            "status": {"attempt": 1},
        });
        for (field, value) in spec.as_object().unwrap() {
            job["spec"][field] = value.clone();
        }
        self.0.apply_job(serde_json::from_value(job).unwrap());
        let (defaults, levels) = (Defaults::default(), Levels::default());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::UNIX_EPOCH };
        self.0.enqueue(&key(name), waits, rules).into_iter().map(|key| key.name).collect()
    }
}

fn key(name: &str) -> Key {
    Key { namespace: "t".into(), name: name.into() }
}

/// Regression test: each change in the cluster caused a plan of every queued job.
#[test]
fn a_changed_node_wakes_the_head_and_jobs_it_can_help() {
    let mut fixture = Fixture::new(4);
    let selects = |value: &str| json!({"template": {"spec": {"nodeSelector": {"disk": value}}}});
    fixture.enqueue("head", 0, 4, json!({}), WaitReason::Room { open: 0 });
    fixture.enqueue("one", 1, 1, json!({}), WaitReason::Room { open: 0 });
    fixture.enqueue("two", 2, 2, json!({}), WaitReason::Room { open: 0 });
    fixture.enqueue("selects", 3, 1, selects("fast"), WaitReason::Room { open: 0 });
    fixture.enqueue("fabric", 4, 1, json!({}), WaitReason::Fabric);
    assert_eq!(fixture.busy(0, "7"), ["fabric", "head"], "too little room for a pod");
    // The head has reserved all nodes against the jobs behind it.
    assert_eq!(fixture.busy(0, "0"), ["fabric", "head"]);
    fixture.0.leave_queue(&key("head"), &JobId { namespace: "t".into(), uid: "head".into() });
    fixture.busy(0, "8");
    assert_eq!(fixture.0.head(), Some(key("one")));
    assert_eq!(fixture.busy(1, "3"), ["fabric", "one"], "two nodes are missing");
    assert_eq!(fixture.busy(2, "3"), ["fabric", "one", "two"]);
    assert_eq!(fixture.busy(1, "8"), ["fabric", "one"]);
    assert_eq!(fixture.busy(3, "3"), ["fabric", "one", "two"], "the third and the fourth");
    fixture.busy(3, "8");
    fixture.busy(2, "8");
    assert_eq!(fixture.busy(0, "3"), ["fabric", "one"], "the other nodes are full again");
    let woken: Vec<String> = fixture.node("n9", json!({"disk": "fast"})).into_iter().map(|key| key.name).collect();
    assert_eq!(woken, ["fabric", "one", "selects", "two"]);
}

#[test]
fn when_the_head_leaves_the_next_job_is_reconciled() {
    let mut fixture = Fixture::new(2);
    fixture.enqueue("first", 0, 2, json!({}), WaitReason::Room { open: 0 });
    fixture.enqueue("second", 1, 2, json!({}), WaitReason::Room { open: 0 });
    fixture.enqueue("third", 2, 2, json!({}), WaitReason::Room { open: 0 });
    assert_eq!(fixture.0.queue.reservation.as_ref().unwrap().job.uid, "first");
    let gone = fixture.0.jobs[&key("first")].metadata.clone();
    assert!(fixture.0.delete_job(&gone).jobs.contains(&key("second")));
    // A job that can never be placed comes after those that can.
    let impossible = fixture.enqueue("zeroth", -1, 9, json!({}), WaitReason::Room { open: 0 });
    assert_eq!((impossible, fixture.0.head()), (Vec::new(), Some(key("second"))));
    let ignorable = fixture.enqueue("second", 1, 2, json!({}), WaitReason::Fabric);
    assert_eq!(ignorable, ["third"]);
}

impl Fixture {
    /// The reserved nodes and the start time, once a job behind the head is planned.
    fn held(&mut self, behind: &str, now: Timestamp) -> (Vec<String>, Option<Timestamp>) {
        let (defaults, levels) = (Defaults::default(), Levels::default());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now };
        let job = self.0.jobs[&key(behind)].clone();
        self.0.refresh_reservation(&job, rules);
        let held = self.0.queue.reservation.as_ref().unwrap();
        let mut nodes: Vec<String> = held.nodes.iter().map(|node| node.node_name.clone()).collect();
        nodes.sort();
        (nodes, held.start.map(|(at, _)| at))
    }
}

/// Regression test: the head waited for its first choice of nodes while others were free, and these
/// went to later jobs.
#[test]
fn the_reservation_moves_to_nodes_that_become_free() {
    let mut fixture = Fixture::new(4);
    fixture.enqueue("head", 0, 2, json!({}), WaitReason::Room { open: 0 });
    fixture.enqueue("late", 1, 1, json!({}), WaitReason::Room { open: 0 });
    assert_eq!(fixture.held("late", Timestamp::UNIX_EPOCH).0, ["n0", "n1"]);
    fixture.busy(3, "0");
    assert_eq!(fixture.held("late", Timestamp::UNIX_EPOCH).0, ["n0", "n3"], "ties prefer the reserved node");
    fixture.busy(2, "0");
    assert_eq!(
        fixture.held("late", Timestamp::UNIX_EPOCH),
        (vec!["n2".into(), "n3".into()], Some(Timestamp::UNIX_EPOCH))
    );
    assert_eq!(fixture.busy(1, "0"), ["head", "late"], "the node is no longer reserved");
}

/// When the start of the head is delayed, jobs that can now use the reserved nodes are woken.
#[test]
fn a_later_head_start_wakes_jobs_that_end_before_it() {
    let mut fixture = Fixture::new(1);
    fixture.node("n1", json!({}));
    let runs = json!({
        "apiVersion": labels::API_VERSION, "kind": "TrainJob", "metadata": {"name": "runs", "namespace": "t", "uid": "runs"},
        "spec": {"activeDeadlineSeconds": 100, "trainer": {"framework": "Plain", "image": "i"}},
        "status": {
            "attempt": 1, "placedTime": Timestamp::UNIX_EPOCH, "placement": {"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n0"}]},
            "conditions": [{"type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": Timestamp::UNIX_EPOCH}],
        },
    });
    let pod = json!({
        "metadata": {
            "name": "runs-1-0", "namespace": "t", "uid": "runs-1-0", "labels": {"training.switchyard.dev/job-uid": "runs"},
            "ownerReferences": [{"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": "runs", "uid": "runs", "controller": true}],
        },
        "spec": {"nodeName": "n0", "containers": [{"name": "c", "resources": {"requests": {"cpu": "5"}}}]},
    });
    fixture.busy(0, "0");
    fixture.0.apply_job(serde_json::from_value(runs.clone()).unwrap());
    let effect = fixture.0.apply_pod(&serde_json::from_value(pod).unwrap());
    fixture.0.wake(&effect.room);
    fixture.enqueue("head", 0, 2, json!({}), WaitReason::Room { open: 1 });
    fixture.enqueue("ends", 1, 1, json!({"activeDeadlineSeconds": 300}), WaitReason::Room { open: 0 });
    fixture.enqueue("never", 2, 1, json!({}), WaitReason::Room { open: 0 });
    assert_eq!(fixture.held("ends", Timestamp::UNIX_EPOCH).1, Some(Timestamp::from_second(100).unwrap()));
    let mut longer = runs;
    longer["spec"]["activeDeadlineSeconds"] = json!(400);
    fixture.0.apply_job(serde_json::from_value(longer).unwrap());
    let woken = fixture.enqueue("head", 0, 2, json!({}), WaitReason::Room { open: 1 });
    assert_eq!(woken, ["ends"]);
}

/// Queues a job through its status only. Returns whether it waits like another job.
fn enqueue_by_status(fixture: &mut Fixture, name: &str, created: i64, nodes: u32, spec: serde_json::Value) -> bool {
    fixture.enqueue(name, created, nodes, spec, WaitReason::Room { open: 0 });
    fixture.0.queue.entries.remove(&key(name));
    let mut job = (*fixture.0.jobs[&key(name)]).clone();
    let placed = json!({"type": "Placed", "status": "False", "reason": "NoRoom", "message": "", "lastTransitionTime": Timestamp::UNIX_EPOCH});
    job.status.as_mut().unwrap().conditions = vec![serde_json::from_value(placed).unwrap()];
    fixture.0.apply_job(job);
    enqueue_unplanned(fixture, name)
}

fn enqueue_unplanned(fixture: &mut Fixture, name: &str) -> bool {
    let (defaults, levels) = (Defaults::default(), Levels::default());
    let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::UNIX_EPOCH };
    fixture.0.enqueue_unplanned(&key(name), rules)
}

#[test]
fn a_job_like_one_ahead_that_found_too_few_nodes_is_enqueued_unplanned() {
    let mut fixture = Fixture::new(4);
    let selects = json!({"template": {"spec": {"nodeSelector": {"disk": "fast"}}}});
    fixture.enqueue("head", 1, 2, json!({}), WaitReason::Room { open: 1 });
    assert!(enqueue_by_status(&mut fixture, "two", 2, 2, json!({})), "one node has room");
    assert!(!enqueue_by_status(&mut fixture, "one", 3, 1, json!({})), "which is enough for this one");
    assert!(!enqueue_by_status(&mut fixture, "selects", 4, 2, selects), "it needs other nodes");
    assert!(!enqueue_by_status(&mut fixture, "suspended", 5, 2, json!({"suspend": true})));
    assert!(!enqueue_unplanned(&mut fixture, "two"), "only once, then it is planned");
    assert!(fixture.0.needs_planning(&key("two")));
    assert_eq!(fixture.held("two", Timestamp::UNIX_EPOCH).0, ["n0", "n1"]);
    fixture.busy(3, "0");
    assert!(!enqueue_by_status(&mut fixture, "three", 6, 2, json!({})), "another node has room now");
    assert!(enqueue_by_status(&mut fixture, "four", 7, 3, json!({})), "two are too few for this one");
    let mut fixture = Fixture::new(4);
    fixture.enqueue("impossible", 1, 9, json!({}), WaitReason::Room { open: 1 });
    assert!(!enqueue_by_status(&mut fixture, "first", 2, 2, json!({})), "a hopeless job blocks no other");
    assert!(!enqueue_by_status(&mut fixture, "earlier", 1, 3, json!({})), "it is ahead of the other");
}

/// Reserved nodes count as room only for jobs that end before the head can start.
#[test]
fn a_job_that_can_use_the_reservation_is_planned() {
    let mut fixture = Fixture::new(3);
    fixture.busy(0, "0");
    fixture.enqueue("head", 0, 3, json!({}), WaitReason::Room { open: 1 });
    fixture.enqueue("long", 1, 1, json!({}), WaitReason::Room { open: 0 });
    fixture.0.queue.reservation.as_mut().unwrap().start = Some((Timestamp::from_second(100).unwrap(), Basis::Limits));
    assert!(enqueue_by_status(&mut fixture, "longer", 2, 1, json!({})));
    assert!(!enqueue_by_status(&mut fixture, "short", 3, 1, json!({"activeDeadlineSeconds": 60})));
}

/// Regression test: a limit of a minute put a job at the head of the queue, and it stayed there
/// after its limit was raised to a month.
#[test]
fn raising_the_limit_of_a_queued_job_drops_its_reservation() {
    let mut fixture = Fixture::new(2);
    fixture.0.queue.slowdown.at = Timestamp::from_second(10_000).unwrap();
    let room = WaitReason::Room { open: 0 };
    fixture.enqueue("short", 9000, 2, json!({"activeDeadlineSeconds": 300}), room);
    fixture.enqueue("old", 1000, 2, json!({}), room);
    assert_eq!((fixture.0.head(), fixture.0.queue.reservation.is_some()), (Some(key("short")), true));
    let mut raised = (*fixture.0.jobs[&key("short")]).clone();
    raised.spec.active_deadline_seconds = Some(200);
    fixture.0.apply_job(raised.clone());
    assert_eq!(fixture.0.head(), Some(key("short")), "a lower limit harms no other job");
    raised.spec.active_deadline_seconds = Some(2_592_000);
    let freed = fixture.0.apply_job(raised).room;
    assert_eq!((fixture.0.head(), fixture.0.queue.reservation.is_none()), (Some(key("old")), true));
    assert_eq!(freed, BTreeSet::from(["n0".to_string(), "n1".to_string()]));
}
