//! Jobs that compete for nodes, on clusters given as lists of objects.
#![allow(clippy::unwrap_used)]

mod backfill;
mod forecast;
mod reservation;
mod volumes;

use super::*;
use serde_json::json;
use switchyard_crds::validate::train_job;
use switchyard_plan::cluster::queue_policy::{PolicySettings, QueuePolicy};

fn node(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {
            "allocatable": {"cpu": "8", "pods": "10"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

/// A job with one pod per node, each requesting so much CPU that two do not fit on a node.
fn job(name: &str, nodes: usize, created: &str, status: Value) -> Value {
    json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
        "metadata": {"name": name, "namespace": "ns", "uid": name, "creationTimestamp": created},
        "spec": {"trainer": {
            "framework": "Plain", "image": "i", "numNodes": nodes, "resourcesPerNode": {"limits": {"cpu": "6"}},
        }},
        "status": status,
    })
}

fn placed(on: &[&str]) -> Value {
    let nodes: Vec<Value> =
        on.iter().enumerate().map(|(rank, node)| json!({"firstRank": rank, "nodeName": node})).collect();
    json!({
        "attempt": 1, "placement": {"reason": "test", "nodes": nodes},
        "conditions": [{
            "type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
        }],
    })
}

fn waiting() -> Value {
    json!({"attempt": 1, "conditions": [{
        "type": "Placed", "status": "False", "reason": "NoRoom", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]})
}

fn pod(job: &str, rank: usize, node: Option<&str>, priority: i32) -> Value {
    let name = format!("{job}-1-{rank}");
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": {"training.switchyard.dev/job-uid": job}, "ownerReferences": [{
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "name": job, "uid": job, "controller": true,
        }]},
        "spec": {
            "nodeName": node, "priority": priority,
            "containers": [{"name": "trainer", "image": "i", "resources": {"limits": {"cpu": "6"}}}],
        },
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }},
    })
}

fn cluster(items: &[Value]) -> Cluster {
    Cluster::of(items, Defaults::default(), Levels::default(), QueueSettings::default(), Timestamp::now()).unwrap()
}

fn fresh(name: &str, nodes: usize, spec: Value) -> TrainJob {
    let mut document = job(name, nodes, "2026-06-01T00:00:00Z", json!({}));
    document.as_object_mut().unwrap().remove("status");
    for (key, value) in spec.as_object().unwrap() {
        document["spec"][key] = value.clone();
    }
    let mut job = train_job(&document).unwrap();
    job.metadata.uid = Some(name.into());
    job.metadata.creation_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time("2026-06-01T00:00:00Z".parse().unwrap()));
    job
}

/// Three nodes with a small job running on the first, and a queued gang that needs all three.
fn gang_waits(priority: i32) -> Vec<Value> {
    let mut items: Vec<Value> = ["n1", "n2", "n3"].map(node).into();
    items.push(job("small", 1, "2026-01-01T00:00:00Z", placed(&["n1"])));
    items.push(pod("small", 0, Some("n1"), 0));
    items.push(job("gang", 3, "2026-01-02T00:00:00Z", waiting()));
    items.extend((0..3).map(|rank| pod("gang", rank, None, priority)));
    items
}

fn nodes(verdict: &PlacementVerdict) -> Vec<&str> {
    let placed = verdict.placement.as_ref().unwrap();
    placed.status.nodes.iter().map(|node| node.node_name.as_str()).collect()
}

/// The message about the job ahead.
fn ahead_message(verdict: &PlacementVerdict) -> String {
    verdict.ahead.as_ref().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn the_head_of_the_queue_reserves_its_nodes() {
    let late = cluster(&gang_waits(0)).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
    assert!(late.placement.is_err(), "two nodes are free but reserved");
    assert_eq!(ahead_message(&late), "3 nodes are reserved for ns/gang, which is ahead in the queue");
    let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 9});
    let mut items = gang_waits(0);
    items.push(class);
    let high = fresh("high", 1, json!({"template": {"spec": {"priorityClassName": "high"}}}));
    assert_eq!(
        nodes(&cluster(&items).explain(&high, PreviousPlacement::Ignored).unwrap()),
        ["n2"],
        "a job ahead is not delayed"
    );
}

#[test]
fn a_job_that_can_never_run_reserves_nothing() {
    let mut items = gang_waits(0);
    items.retain(|item| item["metadata"]["name"] != "n3");
    let late = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
    assert_eq!((nodes(&late), ahead_message(&late)), (vec!["n2"], String::new()));
}

#[test]
fn only_as_many_nodes_are_reserved_as_needed() {
    let mut items = gang_waits(0);
    items.extend(["n4", "n5"].map(node));
    items.push(job("other", 2, "2026-01-01T00:00:00Z", placed(&["n4", "n5"])));
    items.extend(["n4", "n5"].iter().enumerate().map(|(rank, node)| pod("other", rank, Some(node), 0)));
    let late = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
    assert_eq!(ahead_message(&late), "3 nodes are reserved for ns/gang, which is ahead in the queue");
    // A sixth node is not reserved.
    items.push(node("n6"));
    items.push(node("n7"));
    let late = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
    assert_eq!(nodes(&late), ["n7"], "the gang has n2, n3 and n6");
}

#[test]
fn the_fewest_jobs_of_the_lowest_priority_are_preempted() {
    let mut items: Vec<Value> = ["n1", "n2", "n3", "n4"].map(node).into();
    let mut runs = |name: &str, on: &[&str], priority: i32, created: &str| {
        items.push(job(name, on.len(), created, placed(on)));
        items.extend(on.iter().enumerate().map(|(rank, node)| pod(name, rank, Some(node), priority)));
    };
    runs("lowest", &["n1"], 1, "2026-01-01T00:00:00Z");
    runs("middle-old", &["n2"], 5, "2026-01-01T00:00:00Z");
    runs("middle-young", &["n3"], 5, "2026-01-02T00:00:00Z");
    runs("high", &["n4"], 9, "2026-01-01T00:00:00Z");
    let class = |name: &str, value: i32| json!({"kind": "PriorityClass", "metadata": {"name": name}, "value": value});
    items.extend([class("seven", 7), class("low", 0)]);
    let explain = |nodes: usize, class: &str, policy: &str| {
        let spec = json!({
            "template": {"spec": {"priorityClassName": class}}, "topologyPolicy": {"preemption": policy},
        });
        cluster(&items).explain(&fresh("new", nodes, spec), PreviousPlacement::Ignored).unwrap()
    };
    assert_eq!(explain(1, "seven", "LowerPriority").victims, ["ns/lowest"]);
    let mut two = explain(2, "seven", "LowerPriority").victims;
    two.sort();
    assert_eq!(two, ["ns/lowest", "ns/middle-young"]);
    assert!(explain(4, "seven", "LowerPriority").victims.is_empty(), "preemption would not help");
    assert!(explain(1, "seven", "Never").victims.is_empty());
    assert!(explain(1, "low", "LowerPriority").victims.is_empty());
}

#[test]
fn a_restarting_gang_keeps_its_gpus_until_it_finds_no_placement() {
    let mut restarting = placed(&["n1", "n2"]);
    restarting["attempt"] = 2.into();
    restarting["placement"]["nodes"][0]["gpus"] = json!(["GPU-a"]);
    restarting["conditions"][0]["status"] = "False".into();
    restarting["conditions"][0]["reason"] = "Restarting".into();
    let mut items: Vec<Value> = ["n1", "n2"].map(node).into();
    items.push(json!({
        "kind": "GPUTopology", "metadata": {"name": "n1"}, "spec": {},
        "status": {"gpuCount": 1, "gpus": [{"index": 0, "uuid": "GPU-a"}]},
    }));
    items.push(job("gang", 2, "2026-01-01T00:00:00Z", restarting));
    assert_eq!(cluster(&items).nodes()["n1"].taken, 1);
    let last = items.len() - 1;
    items[last]["status"]["conditions"][0]["reason"] = "NoRoom".into();
    assert_eq!(cluster(&items).nodes()["n1"].taken, 0);
}

#[test]
fn invalid_objects_are_named() {
    let wrong = json!({"kind": "Node", "metadata": {"name": "n1"}, "spec": {"taints": 7}});
    let error =
        Cluster::of(&[wrong], Defaults::default(), Levels::default(), QueueSettings::default(), Timestamp::now())
            .err()
            .unwrap();
    assert!(error.starts_with("items[0] (Node n1): invalid type: integer `7`"), "{error}");
    let report = json!({"kind": "GPUTopology", "metadata": {"name": "n1"}, "status": {"gpus": 7}});
    let cluster = cluster(&[node("n1"), report]);
    assert!(matches!(&cluster.nodes()["n1"].machine, Some(Err(_))), "an invalid report affects only its node");
}

/// Otherwise a tenant could idle a whole cluster with `numNodes` set to all nodes and a fabric that
/// no node has.
#[test]
fn a_job_that_must_not_start_on_its_nodes_reserves_none() {
    for (mode, holds) in [("Auto", true), ("Required", false)] {
        let mut items: Vec<Value> = ["n1", "n2"].map(node).into();
        for item in &mut items {
            item["status"]["allocatable"]["nvidia.com/gpu"] = json!("8");
        }
        items.extend([job("runs", 1, "2026-01-01T00:00:00Z", placed(&["n1"])), pod("runs", 0, Some("n1"), 0)]);
        let mut all = job("all", 2, "2026-01-02T00:00:00Z", waiting());
        all["spec"]["trainer"]["framework"] = json!("Torch");
        all["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] = json!("8");
        all["spec"]["fabric"] = json!({"mode": mode});
        items.push(all);
        items.extend([pod("all", 0, None, 0), pod("all", 1, None, 0)]);
        let verdict = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
        assert_eq!((verdict.ahead.is_some(), verdict.placement.is_err()), (holds, holds), "{mode}: {verdict:?}");
    }
}

/// A cluster in which the gang preempts the small job. `change` edits the objects first.
fn preempting(change: impl Fn(&mut Vec<Value>)) -> Cluster {
    let mut items = gang_waits(9);
    items[5]["spec"]["topologyPolicy"] = json!({"preemption": "LowerPriority"});
    change(&mut items);
    cluster(&items)
}

fn preempted_by(cluster: &Cluster, namespace: &str) -> Option<String> {
    cluster.index.job_states[&JobId { namespace: namespace.into(), uid: "small".into() }].preempted_by.clone()
}

#[test]
fn a_never_preempting_class_does_not_preempt_unless_it_is_a_gang_class() {
    assert_eq!(preempted_by(&preempting(|_| {}), "ns").as_deref(), Some("ns/gang (priority 9)"));
    let mut never = preempting(|items| {
        for pod in &mut items[6..9] {
            (pod["spec"]["preemptionPolicy"], pod["spec"]["priorityClassName"]) = (json!("Never"), json!("polite"));
        }
    });
    assert_eq!(preempted_by(&never, "ns"), None);
    never.index.queue.configure(|queue| queue.gang_classes = ["polite".into()].into());
    never.fill_queue();
    assert_eq!(preempted_by(&never, "ns").as_deref(), Some("ns/gang (priority 9)"));
}

/// The running job is preemptible and has run for hours.
#[test]
fn the_queue_policy_of_the_controller_decides() {
    let mut items = gang_waits(0);
    items[3]["spec"]["queue"] = json!({"preemptible": "Always"});
    let by = |policy: QueuePolicy| {
        let queue = QueueSettings {
            policy: PolicySettings { policy, ..PolicySettings::default() },
            ..QueueSettings::default()
        };
        let cluster = Cluster::of(&items, Defaults::default(), Levels::default(), queue, Timestamp::now()).unwrap();
        let small = JobId { namespace: "ns".into(), uid: "small".into() };
        let state = &cluster.index.job_states[&small];
        (state.preempted_by.is_some(), state.preemption_gain > 0)
    };
    assert_eq!(by(QueuePolicy::FirstComeFirstServed), (false, false));
    assert_eq!(by(QueuePolicy::LeastAttainedService), (true, true));
}

/// Regression test: the status of a tenant's job named the projects of other tenants.
#[test]
fn jobs_of_other_namespaces_are_not_named() {
    let mut cluster = preempting(|items| {
        for item in &mut items[3..5] {
            item["metadata"]["namespace"] = json!("theirs");
        }
    });
    assert_eq!(preempted_by(&cluster, "theirs").as_deref(), Some("ns/gang (priority 9)"), "the reader has all objects");
    cluster.index.queue.configure(|queue| queue.names_others = false);
    let small = JobId { namespace: "theirs".into(), uid: "small".into() };
    cluster.index.job_states.get_mut(&small).unwrap().preempted_attempt = None;
    cluster.fill_queue();
    assert_eq!(preempted_by(&cluster, "theirs").as_deref(), Some("a job of another namespace (priority 9)"));
    let ahead = |cluster: &mut Cluster, namespace: &str| {
        let mut late = fresh("late", 1, json!({}));
        late.metadata.namespace = Some(namespace.into());
        cluster.explain(&late, PreviousPlacement::Ignored).unwrap().ahead.map(|ahead| ahead.name)
    };
    assert_eq!(ahead(&mut cluster, "theirs").as_deref(), Some("a job of another namespace"));
    assert_eq!(ahead(&mut cluster, "ns").as_deref(), Some("ns/gang"));
}
