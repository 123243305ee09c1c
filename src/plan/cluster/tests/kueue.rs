//! Gangs in a Kueue queue, which gates pods, relies on complete groups, and preempts them.

use super::World;
use crate::cluster::view::{Phase, PodView};
use crate::eligible::NodeRules;
use crate::kueue::last_message;
use k8s_openapi::api::events::v1::Event;
use serde_json::{Value, json};
use std::sync::Arc;
use switchyard_crds::{DeviceAllocation, conditions};

/// A job in a queue. [`gate`] emulates Kueue's webhook.
fn queued(nodes: u32) -> World {
    let template = json!({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}});
    World::new(nodes, json!({"template": template, "failurePolicy": {"maxRestarts": 3, "maxPreemptionRestarts": 3}}))
}

/// Sets or lifts Kueue's gate on all pods.
fn gate(world: &mut World, gate: Option<&str>) {
    world.pods.iter_mut().for_each(|pod| pod.other_gate = gate.map(str::to_owned));
}

const ADMISSION: Option<&str> = Some("kueue.x-k8s.io/admission");

/// Advances a job until its pods exist and Kueue holds them.
fn held(nodes: u32) -> World {
    let mut world = queued(nodes);
    world.step();
    world.step();
    gate(&mut world, ADMISSION);
    world.run();
    world
}

#[test]
fn a_gang_waits_for_kueue_and_shows_its_message() {
    let mut world = held(2);
    let group = world.pods[0].group.clone().unwrap();
    assert_eq!(group, "a-01234567-1");
    assert!(world.pods.iter().all(|pod| pod.group.as_ref() == Some(&group) && pod.gated), "{:?}", world.pods);
    assert_eq!(world.message(), "waiting for Kueue to admit Workload a-01234567-1");
    // Kueue reports in no event that it does not admit pods that name claims.
    world.job.status.as_mut().unwrap().device_allocation = Some(DeviceAllocation::Claims);
    world.run();
    assert!(world.message().contains("Kueue 0.18 and later admits no pods that name claims"), "{}", world.message());
    world.job.status.as_mut().unwrap().device_allocation = None;
    world.pods[0].admission = Some("insufficient unused quota for cpu".into());
    world.now = 100;
    world.run();
    assert_eq!(
        (world.stage(), world.message().as_str()),
        ("Queued", "waiting for Kueue: insufficient unused quota for cpu")
    );
    gate(&mut world, None);
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1));
    // Gates of other controllers are named, too.
    let mut world = World::new(1, json!({}));
    world.step();
    world.step();
    gate(&mut world, Some("example.com/quota"));
    world.run();
    assert_eq!(world.message(), "another scheduling gate holds pod a-1-0: example.com/quota");
}

/// A pod that Kueue preempts: Kueue sets the reason, deletes the pod, and keeps it until the group
/// has ended.
fn stop(pod: &mut PodView, message: &str) {
    (pod.stopped_by_queue, pod.deleting) = (Some(message.into()), true);
}

#[test]
fn eviction_by_kueue_is_a_preemption_and_releases_the_nodes() {
    let mut world = held(2);
    gate(&mut world, None);
    world.run();
    assert_eq!(world.stage(), "Running");
    world.now = 60;
    world.pods.iter_mut().for_each(|pod| stop(pod, "Preempted to accommodate a workload"));
    // The pods save their state and exit: the exit code of a stop is not an application failure.
    world.exit("a-1-1", 143, "");
    world.step();
    let status = world.job.status.clone().unwrap();
    let restarts = status.restarts.unwrap();
    assert_eq!((restarts.preemption, restarts.infrastructure, restarts.application), (1, 0, 0));
    assert_eq!((world.attempt(), status.placement), (2, None));
    let placed = world.job.status.as_ref().unwrap().condition(conditions::PLACED).unwrap();
    assert_eq!((placed.reason.as_str(), world.stage()), (conditions::PREEMPTED, "Restarting"));
    assert!(world.message().contains("stopped by Kueue: Preempted to accommodate a workload"), "{}", world.message());
    // It counts against the preemption budget.
    for _ in 0..3 {
        world.now += 700;
        // Kueue releases the pods once the group has ended.
        let attempt = world.attempt().unsigned_abs();
        world.pods.retain(|pod| pod.attempt == attempt);
        world.run();
        assert_eq!(world.stage(), "Running");
        world.pods.iter_mut().for_each(|pod| stop(pod, "again"));
        world.step();
    }
    assert!(world.message().contains("3 of 3 restarts within 24 h used (failurePolicy.maxPreemptionRestarts)"));
}

#[test]
fn a_pod_deleted_while_queued_leads_to_another_group() {
    let mut world = held(2);
    let pod = world.pods.iter_mut().find(|pod| pod.name == "a-1-0").unwrap();
    pod.deleting = true;
    world.step();
    assert_eq!(world.attempt(), 2, "its name is taken until all pods of its group have ended");
    assert_eq!(world.job.status.as_ref().unwrap().restarts.as_ref().unwrap().infrastructure, 1);
    // Without a queue the pod disappears at once and is recreated.
    let mut world = World::new(2, json!({}));
    world.step();
    world.step();
    gate(&mut world, Some("example.com/quota"));
    world.pods[0].deleting = true;
    world.run();
    assert_eq!(world.attempt(), 1);
}

/// A restarting gang must be admitted by Kueue again. Until then its nodes are available to
/// admitted gangs.
#[test]
fn a_restarting_gang_holds_no_node_while_it_waits_for_kueue() {
    let mut world = held(2);
    gate(&mut world, None);
    world.run();
    world.exit("a-1-1", 9, "");
    world.step();
    world.step();
    assert!(world.pods.iter().filter(|pod| pod.attempt == 2).all(|pod| pod.group.as_deref() == Some("a-01234567-2")));
    let reason =
        |world: &World| world.job.status.as_ref().unwrap().condition(conditions::PLACED).unwrap().reason.clone();
    assert_eq!(reason(&world), conditions::RESTARTING);
    world.pods.retain(|pod| pod.attempt == 2 && pod.phase == Phase::Pending);
    gate(&mut world, ADMISSION);
    world.run();
    assert_eq!((world.stage(), reason(&world).as_str()), ("Queued", conditions::GATED));
}

fn recorded<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).unwrap()
}

/// The objects are recorded from a real Kueue (`tests/benches/kueue.rs`; its version:
/// docs/results/kueue.json).
#[test]
fn recorded_kueue_objects_are_parsed() {
    let held = PodView::of(&recorded(include_str!("recorded/held-pod.json")));
    assert!(held.gated && held.waits_for_kueue(), "{held:?}");
    let workload: Value = recorded(include_str!("recorded/workload.json"));
    let sets = workload["spec"]["podSets"].as_array().unwrap();
    assert_eq!((sets.len(), &sets[0]["name"], &sets[0]["count"]), (1, &json!("main"), &json!(2)), "one role");
    assert_eq!(
        workload["status"]["resourceRequests"][0]["resources"]["nvidia.com/gpu"], "2",
        "requests that Kueue charges"
    );
    let events: Vec<Event> = recorded(include_str!("recorded/events.json"));
    let message = last_message(&events).unwrap();
    assert_eq!(workload["status"]["conditions"][0]["message"], message);
    assert!(message.contains("insufficient unused quota for nvidia.com/gpu"), "{message}");
    assert_eq!(last_message(&[]), None);
    let stopped = PodView::of(&recorded(include_str!("recorded/stopped-pod.json")));
    let why = stopped.stopped_by_queue.unwrap();
    assert!(stopped.deleting && why.starts_with("Preempted to accommodate a workload"), "{why}");
}

/// Nodes with host labels, where node `full` has too few CPUs, and an admitted gang whose pods
/// Kueue's topology-aware scheduling has pinned to hosts.
fn pinned(hosts: &[&str], full: &str) -> World {
    let mut world = held(hosts.len() as u32);
    world.node("n9", "4");
    world.node(full, "1");
    for node in world.nodes.values_mut() {
        let label = ("kubernetes.io/hostname".to_string(), format!("host-{}", node.facts.name));
        node.facts.labels = Arc::new([label].into());
    }
    for (pod, host) in world.pods.iter_mut().zip(hosts) {
        let selector = [("kubernetes.io/hostname".to_string(), format!("host-{host}"))].into();
        pod.rules = Some(Arc::new(NodeRules { selector, ..NodeRules::default() }));
    }
    gate(&mut world, None);
    world.run();
    world
}

/// Finding 4: each rule applied to all pods, so no gang of two nodes ever started.
#[test]
fn a_gang_pinned_by_kueue_runs_on_those_hosts_in_pod_order() {
    let world = pinned(&["n9", "n0"], "n1");
    assert_eq!(world.stage(), "Running", "{}", world.message());
    let placement = world.job.status.as_ref().unwrap().placement.as_ref().unwrap();
    assert_eq!(placement.nodes.iter().map(|node| node.node_name.as_str()).collect::<Vec<_>>(), ["n9", "n0"]);
}

#[test]
fn an_unsatisfiable_pin_is_named_without_blaming_the_manifest() {
    let world = pinned(&["n9", "n0"], "n0");
    assert_eq!(world.stage(), "Queued");
    let message = world.message();
    assert!(message.starts_with("1 of 2 needed nodes have room for cpu 2"), "{message}");
    assert!(message.contains("; pod 1 is pinned to host-n0: cpu: 1 free, 2 requested"), "{message}");
    assert!(!message.contains("template"), "{message}");
    // Kueue may assign two pods of a gang to one host, but each pod of a gang needs its own node.
    let world = pinned(&["n9", "n9"], "n1");
    let message = "1 of 2 needed nodes have room for cpu 2; all pods are pinned to host-n9, and each pod of a gang needs its own node";
    assert!(world.message().starts_with(message), "{}", world.message());
}

/// Letter I: the selector of one patched pod applied to the whole gang, and the refusal blamed the
/// template.
#[test]
fn a_selector_of_one_pod_counts_for_that_pod_alone() {
    let mut world = held(2);
    world.pods[1].rules = Some(Arc::new(NodeRules {
        selector: [("disk".to_string(), "ssd".to_string())].into(),
        ..NodeRules::default()
    }));
    gate(&mut world, None);
    world.run();
    assert_eq!(world.stage(), "Queued");
    let message = world.message();
    assert_eq!(
        message,
        "by their rules after admission, 1 pod (1) accepts 0 of the nodes with room, and each pod of a gang needs its own node"
    );
    let node = world.nodes.get_mut("n0").unwrap();
    node.facts.labels = Arc::new([("disk".to_string(), "ssd".to_string())].into());
    world.run();
    let placement = world.job.status.as_ref().unwrap().placement.as_ref().unwrap();
    assert_eq!((placement.nodes[0].node_name.as_str(), placement.nodes[1].node_name.as_str()), ("n1", "n0"));
}
