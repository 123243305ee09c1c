//! Which changes justify planning which queued jobs again.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::job::JobId;
use jiff::Timestamp;
use serde_json::json;
use switchyard_crds::labels;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::cluster::turn::Basis;
use switchyard_plan::cluster::{PlacementRules, Waits};
use switchyard_plan::objects::Defaults;

/// A cluster on which every node starts out full.
struct Scene(Index);

impl Scene {
    fn new(nodes: usize) -> Scene {
        let mut scene = Scene(Index::default());
        for number in 0..nodes {
            scene.node(&format!("n{number}"), json!({}));
            scene.busy(number, "8");
        }
        scene
    }

    fn node(&mut self, name: &str, labels: serde_json::Value) -> BTreeSet<Key> {
        let node = json!({
            "metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        let effect = self.0.apply_node(&serde_json::from_value(node).unwrap());
        self.0.woken(&effect.room)
    }

    /// A pod of another workload requests this many CPUs of a node. Returns the jobs that are
    /// woken.
    fn busy(&mut self, node: usize, cpu: &str) -> Vec<String> {
        let pod = json!({
            "metadata": {"name": format!("other-{node}"), "namespace": "o", "uid": format!("other-{node}")},
            "spec": {"nodeName": format!("n{node}"), "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
        });
        let effect = self.0.apply_pod(&serde_json::from_value(pod).unwrap());
        self.0.woken(&effect.room).into_iter().map(|key| key.name).collect()
    }

    /// Queues a job after a plan that found this many nodes. Returns the jobs that this wakes.
    fn waits(&mut self, name: &str, created: i64, nodes: u32, spec: serde_json::Value, waits: Waits) -> Vec<String> {
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
        self.0.waits(&key(name), waits, rules).into_iter().map(|key| key.name).collect()
    }
}

fn key(name: &str) -> Key {
    Key { namespace: "t".into(), name: name.into() }
}

/// Regression test: each change in the cluster caused a plan of every queued job.
#[test]
fn a_node_wakes_the_head_and_those_whom_it_may_help() {
    let mut scene = Scene::new(4);
    let selects = |value: &str| json!({"template": {"spec": {"nodeSelector": {"disk": value}}}});
    scene.waits("head", 0, 4, json!({}), Waits::Room { open: 0 });
    scene.waits("one", 1, 1, json!({}), Waits::Room { open: 0 });
    scene.waits("two", 2, 2, json!({}), Waits::Room { open: 0 });
    scene.waits("selects", 3, 1, selects("fast"), Waits::Room { open: 0 });
    scene.waits("fabric", 4, 1, json!({}), Waits::Fabric);
    assert_eq!(scene.busy(0, "7"), ["fabric", "head"], "too little is free for a pod");
    // The head has reserved all nodes against the jobs behind it.
    assert_eq!(scene.busy(0, "0"), ["fabric", "head"]);
    scene.0.waits_no_more(&key("head"), &JobId { namespace: "t".into(), uid: "head".into() });
    scene.busy(0, "8");
    assert_eq!(scene.0.head(), Some(key("one")));
    assert_eq!(scene.busy(1, "3"), ["fabric", "one"], "two nodes are missing");
    assert_eq!(scene.busy(2, "3"), ["fabric", "one", "two"]);
    assert_eq!(scene.busy(1, "8"), ["fabric", "one"]);
    assert_eq!(scene.busy(3, "3"), ["fabric", "one", "two"], "the third and the fourth");
    scene.busy(3, "8");
    scene.busy(2, "8");
    assert_eq!(scene.busy(0, "3"), ["fabric", "one"], "the others are taken again");
    let woken: Vec<String> = scene.node("n9", json!({"disk": "fast"})).into_iter().map(|key| key.name).collect();
    assert_eq!(woken, ["fabric", "one", "selects", "two"]);
}

#[test]
fn when_the_head_goes_the_next_one_is_looked_at() {
    let mut scene = Scene::new(2);
    scene.waits("first", 0, 2, json!({}), Waits::Room { open: 0 });
    scene.waits("second", 1, 2, json!({}), Waits::Room { open: 0 });
    scene.waits("third", 2, 2, json!({}), Waits::Room { open: 0 });
    assert_eq!(scene.0.reservation.as_ref().unwrap().job.uid, "first");
    let gone = scene.0.jobs[&key("first")].metadata.clone();
    assert!(scene.0.delete_job(&gone).jobs.contains(&key("second")));
    // A job that can never be placed comes after those that can.
    let impossible = scene.waits("zeroth", -1, 9, json!({}), Waits::Room { open: 0 });
    assert_eq!((impossible, scene.0.head()), (Vec::new(), Some(key("second"))));
    let aside = scene.waits("second", 1, 2, json!({}), Waits::Fabric);
    assert_eq!(aside, ["third"]);
}

impl Scene {
    /// The reserved nodes and the start time, once a job behind the head is planned.
    fn held(&mut self, behind: &str, now: Timestamp) -> (Vec<String>, Option<Timestamp>) {
        let (defaults, levels) = (Defaults::default(), Levels::default());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now };
        let job = self.0.jobs[&key(behind)].clone();
        self.0.float(&job, rules);
        let held = self.0.reservation.as_ref().unwrap();
        let mut nodes: Vec<String> = held.nodes.iter().map(|node| node.node_name.clone()).collect();
        nodes.sort();
        (nodes, held.start.map(|(at, _)| at))
    }
}

/// Regression test: the head waited for its first choice of nodes while others were free, and these
/// went to later jobs.
#[test]
fn the_reservation_floats_to_the_nodes_that_become_free() {
    let mut scene = Scene::new(4);
    scene.waits("head", 0, 2, json!({}), Waits::Room { open: 0 });
    scene.waits("late", 1, 1, json!({}), Waits::Room { open: 0 });
    assert_eq!(scene.held("late", Timestamp::UNIX_EPOCH).0, ["n0", "n1"]);
    scene.busy(3, "0");
    assert_eq!(
        scene.held("late", Timestamp::UNIX_EPOCH).0,
        ["n0", "n3"],
        "of two that are equal, the one that is held"
    );
    scene.busy(2, "0");
    assert_eq!(
        scene.held("late", Timestamp::UNIX_EPOCH),
        (vec!["n2".into(), "n3".into()], Some(Timestamp::UNIX_EPOCH))
    );
    assert_eq!(scene.busy(1, "0"), ["head", "late"], "a node that nobody holds any more");
}

/// When the start of the head is delayed, jobs that can now use the reserved nodes are woken.
#[test]
fn a_head_that_begins_later_wakes_those_that_end_before_it() {
    let mut scene = Scene::new(1);
    scene.node("n1", json!({}));
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
    scene.busy(0, "0");
    scene.0.apply_job(serde_json::from_value(runs.clone()).unwrap());
    let effect = scene.0.apply_pod(&serde_json::from_value(pod).unwrap());
    scene.0.woken(&effect.room);
    scene.waits("head", 0, 2, json!({}), Waits::Room { open: 1 });
    scene.waits("ends", 1, 1, json!({"activeDeadlineSeconds": 300}), Waits::Room { open: 0 });
    scene.waits("never", 2, 1, json!({}), Waits::Room { open: 0 });
    assert_eq!(scene.held("ends", Timestamp::UNIX_EPOCH).1, Some(Timestamp::from_second(100).unwrap()));
    let mut longer = runs;
    longer["spec"]["activeDeadlineSeconds"] = json!(400);
    scene.0.apply_job(serde_json::from_value(longer).unwrap());
    let woken = scene.waits("head", 0, 2, json!({}), Waits::Room { open: 1 });
    assert_eq!(woken, ["ends"]);
}

/// Queues a job through its status only. Returns whether it waits like another job.
fn told(scene: &mut Scene, name: &str, created: i64, nodes: u32, spec: serde_json::Value) -> bool {
    scene.waits(name, created, nodes, spec, Waits::Room { open: 0 });
    scene.0.waiting.remove(&key(name));
    let mut job = (*scene.0.jobs[&key(name)]).clone();
    let placed = json!({"type": "Placed", "status": "False", "reason": "NoRoom", "message": "", "lastTransitionTime": Timestamp::UNIX_EPOCH});
    job.status.as_mut().unwrap().conditions = vec![serde_json::from_value(placed).unwrap()];
    scene.0.apply_job(job);
    like_another(scene, name)
}

fn like_another(scene: &mut Scene, name: &str) -> bool {
    let (defaults, levels) = (Defaults::default(), Levels::default());
    let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::UNIX_EPOCH };
    scene.0.waits_like_another(&key(name), rules)
}

#[test]
fn a_job_waits_like_one_ahead_of_it_that_asks_the_same_and_found_too_few_nodes() {
    let mut scene = Scene::new(4);
    let selects = json!({"template": {"spec": {"nodeSelector": {"disk": "fast"}}}});
    scene.waits("head", 1, 2, json!({}), Waits::Room { open: 1 });
    assert!(told(&mut scene, "two", 2, 2, json!({})), "one node has room");
    assert!(!told(&mut scene, "one", 3, 1, json!({})), "which is enough for this one");
    assert!(!told(&mut scene, "selects", 4, 2, selects), "it asks for other nodes");
    assert!(!told(&mut scene, "suspended", 5, 2, json!({"suspend": true})));
    assert!(!like_another(&mut scene, "two"), "once: then it is planned");
    assert!(scene.0.is_worth_a_plan(&key("two")));
    assert_eq!(scene.held("two", Timestamp::UNIX_EPOCH).0, ["n0", "n1"]);
    scene.busy(3, "0");
    assert!(!told(&mut scene, "three", 6, 2, json!({})), "another node has room now");
    assert!(told(&mut scene, "four", 7, 3, json!({})), "two are too few for this one");
    let mut scene = Scene::new(4);
    scene.waits("impossible", 1, 9, json!({}), Waits::Room { open: 1 });
    assert!(!told(&mut scene, "first", 2, 2, json!({})), "that one stands in nobody's way");
    assert!(!told(&mut scene, "earlier", 1, 3, json!({})), "it comes before the other");
}

/// Reserved nodes count as room only for jobs that end before the head can start.
#[test]
fn a_job_that_may_use_what_the_head_holds_waits_like_none_that_may_not() {
    let mut scene = Scene::new(3);
    scene.busy(0, "0");
    scene.waits("head", 0, 3, json!({}), Waits::Room { open: 1 });
    scene.waits("long", 1, 1, json!({}), Waits::Room { open: 0 });
    scene.0.reservation.as_mut().unwrap().start = Some((Timestamp::from_second(100).unwrap(), Basis::Limits));
    assert!(told(&mut scene, "longer", 2, 1, json!({})));
    assert!(!told(&mut scene, "short", 3, 1, json!({"activeDeadlineSeconds": 60})));
}

/// Regression test: a limit of a minute put a job at the head of the queue, and it stayed there
/// after its limit was raised to a month.
#[test]
fn a_job_whose_limit_is_raised_while_it_waits_loses_the_nodes_that_it_holds() {
    let mut scene = Scene::new(2);
    scene.0.lateness.at = Timestamp::from_second(10_000).unwrap();
    let room = Waits::Room { open: 0 };
    scene.waits("short", 9000, 2, json!({"activeDeadlineSeconds": 300}), room);
    scene.waits("old", 1000, 2, json!({}), room);
    assert_eq!((scene.0.head(), scene.0.reservation.is_some()), (Some(key("short")), true));
    let mut raised = (*scene.0.jobs[&key("short")]).clone();
    raised.spec.active_deadline_seconds = Some(200);
    scene.0.apply_job(raised.clone());
    assert_eq!(scene.0.head(), Some(key("short")), "a lower limit takes nothing from others");
    raised.spec.active_deadline_seconds = Some(2_592_000);
    let freed = scene.0.apply_job(raised).room;
    assert_eq!((scene.0.head(), scene.0.reservation.is_none()), (Some(key("old")), true));
    assert_eq!(freed, BTreeSet::from(["n0".to_string(), "n1".to_string()]));
}
