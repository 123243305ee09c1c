//! Nodes that go silent, are deleted, reject pods, or are avoided.

use super::world::at;
use super::*;
use crate::cluster::view::Phase;

/// Nodes that the job remembers, with the reasons.
fn failures(world: &World) -> Vec<String> {
    let known = world.job.status.iter().flat_map(|status| &status.node_failures);
    let mut known: Vec<String> = known.map(|failure| format!("{} {}", failure.node_name, failure.reason)).collect();
    known.sort_unstable();
    known
}

/// Seen on real nodes: a kubelet that was down for half a minute restarted its job from step 0, and
/// a network rollout restarted every job.
#[test]
fn not_ready_nodes_are_not_lost_and_silent_nodes_not_at_once() {
    let ready = |status: &str| {
        let condition = json!({"type": "Ready", "status": status, "lastTransitionTime": at(0).to_string()});
        NodeView::of(
            &serde_json::from_value(json!({"metadata": {"name": "n0"}, "status": {"conditions": [condition]}}))
                .unwrap(),
        )
    };
    let becomes = |world: &mut World, status: &str| {
        let next = ready(status);
        let node = world.nodes.get_mut("n0").unwrap();
        (node.facts.ready, node.silent_since) = (next.facts.ready, next.silent_since);
    };
    let mut world = World::new(2, json!({}));
    world.run();
    becomes(&mut world, "False");
    world.now = 3600;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1), "its containers keep running");
    becomes(&mut world, "Unknown");
    world.now = 59;
    let waits = world.step();
    assert_eq!((world.attempt(), waits.wake), (1, Some(at(60))));
    assert!(world.message().contains("node n0 has not reported since"), "{}", world.message());
    world.progress = Some(at(50));
    world.now = 100;
    assert_eq!(world.step().wake, Some(at(110)), "the ranks there must have sent something at 50 s");
    assert!(world.message().contains("the ranks make progress"), "{}", world.message());
    (world.now, world.progress_unread) = (200, true);
    assert_eq!((world.step().wake, world.attempt()), (Some(at(205)), 1), "a new leader has not read their logs yet");
    (world.mass_outage, world.progress_unread) =
        (Some("5 of 20 nodes stopped reporting within a minute".into()), false);
    world.now = 3600;
    world.run();
    assert_eq!(world.attempt(), 1);
    assert!(world.message().contains("5 of 20 nodes stopped reporting"), "{}", world.message());
    world.nodes.get_mut("n0").unwrap().out_of_service = true;
    world.step();
    assert_eq!(world.attempt(), 2, "an administrator declared it lost");
    assert!(world.message().contains("took it out of service"), "{}", world.message());
}

/// Regression test: an eviction after 300 s ended the attempt despite the mass outage and the
/// ranks' progress.
#[test]
fn eviction_from_a_silent_node_follows_the_node_grace_period() {
    let mut world = World::new(2, json!({}));
    world.run();
    let silent =
        |world: &mut World, since: Option<i64>| world.nodes.get_mut("n0").unwrap().silent_since = since.map(at);
    silent(&mut world, Some(0));
    world.pods[0].deleting = true;
    world.pods[0].disruption =
        Some(("DeletionByTaintManager".into(), "Taint manager: deleting due to NoExecute taint".into()));
    (world.now, world.progress) = (350, Some(at(340)));
    assert_eq!((world.step().wake, world.attempt()), (Some(at(400)), 1), "the ranks make progress");
    (world.now, world.progress, world.mass_outage) = (3600, None, Some("5 of 20 nodes stopped reporting".into()));
    world.step();
    assert_eq!(world.attempt(), 1, "{}", world.message());
    world.mass_outage = None;
    let mut reports_again =
        World { job: world.job.clone(), pods: world.pods.clone(), now: 3600, ..World::new(2, json!({})) };
    world.step();
    assert_eq!(world.attempt(), 2);
    assert!(world.message().contains("the node is lost"), "{}", world.message());
    silent(&mut reports_again, None);
    reports_again.step();
    assert_eq!(reports_again.attempt(), 2, "its kubelet stops it now");
    assert!(reports_again.message().contains("DeletionByTaintManager"), "{}", reports_again.message());
}

#[test]
fn a_node_that_is_silent_for_the_grace_period_is_lost() {
    let mut world = World::new(3, json!({}));
    world.node("n3", "4");
    world.run();
    let node = world.nodes.get_mut("n1").unwrap();
    (node.facts.ready, node.silent_since) = (false, Some(at(0)));
    world.now = 60;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
    let used: Vec<Option<&str>> = world.pods.iter().map(|pod| pod.node.as_deref()).collect();
    assert!(!used.contains(&Some("n1")), "{used:?}");
}

/// Regression test: `kubectl delete node` and a kubelet restart renew a node's labels, but its jobs
/// were restarted within the same second.
#[test]
fn a_node_registered_again_within_40_s_fails_nothing_and_loss_is_confirmed_with_the_server() {
    let mut world = World::new(2, json!({}));
    world.run();
    let node = world.nodes.remove("n1").unwrap();
    let none = world.step();
    assert_eq!((world.attempt(), none.wake), (1, Some(at(40))), "it has not been recorded as missing yet");
    world.missing.insert("n1".into(), at(0));
    world.now = 39;
    assert_eq!((world.step().wake, world.attempt()), (Some(at(40)), 1));
    assert!(world.message().contains("node n1 has been missing since"), "{}", world.message());
    let mut stays_away = World { job: world.job.clone(), pods: world.pods.clone(), ..World::new(2, json!({})) };
    world.nodes.insert("n1".into(), node);
    world.now = 50;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1));
    assert!(!world.message().contains("n1"), "{}", world.message());
    stays_away.nodes.remove("n1");
    stays_away.missing.insert("n1".into(), at(0));
    stays_away.now = 40;
    let gone = stays_away.step();
    assert_eq!((stays_away.attempt(), gone.premise), (2, Some(Premise::NodeGone("n1".into()))));
    let mut silent = World::new(1, json!({}));
    silent.run();
    (silent.nodes.get_mut("n0").unwrap().silent_since, silent.now) = (Some(at(0)), 60);
    let lost = silent.step();
    assert_eq!((silent.attempt(), lost.premise), (2, Some(Premise::NodeSilent("n0".into()))), "a watch may be late");
}

/// Regression test: only the first lost node was named, and the next attempts would have run into
/// the others one by one.
#[test]
fn nodes_lost_together_are_all_named_and_recorded() {
    let mut world = World::new(6, json!({}));
    world.run();
    for node in ["n1", "n2", "n4", "n5", "n0"] {
        world.nodes.get_mut(node).unwrap().silent_since = Some(at(0));
    }
    world.nodes.remove("n4");
    world.missing.insert("n4".into(), at(20));
    world.now = 60;
    world.step();
    let remembered = failures(&world);
    let expected = ["n0 NodeLost", "n1 NodeLost", "n2 NodeLost", "n4 NodeGone", "n5 NodeLost"];
    assert_eq!(remembered, expected);
    let lost = "the node is lost: it stopped reporting to the cluster";
    let expected = format!(
        "pod a-1-0 on node n0: {lost}; node n1: {lost}; node n2: {lost}; node n4: the node is gone; and 1 more node"
    );
    assert!(world.message().ends_with(&expected), "{}", world.message());
}

/// Regression test: ten attempts within minutes went to the node that rejected the pod, while
/// others were free.
#[test]
fn a_node_that_refuses_a_pod_is_avoided_and_then_a_last_resort() {
    let refuse = |world: &mut World, node: &str| {
        let pod = world.pods.iter_mut().rfind(|pod| pod.node.as_deref() == Some(node)).unwrap();
        let message =
            "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu";
        (pod.phase, pod.ready, pod.reason) =
            (Phase::Failed, false, Some(("UnexpectedAdmissionError".into(), message.into())));
    };
    let used = |world: &World| {
        let placement = world.job.status.as_ref().unwrap().placement.clone().unwrap();
        let mut used: Vec<String> = placement.nodes.into_iter().map(|node| node.node_name).collect();
        used.sort_unstable();
        used
    };
    let mut world = World::new(2, json!({}));
    world.node("n2", "4");
    world.run();
    refuse(&mut world, "n0");
    world.run();
    assert_eq!(
        (world.stage(), world.attempt(), used(&world)),
        ("Running", 2, vec!["n1".to_string(), "n2".to_string()])
    );
    assert_eq!(failures(&world), ["n0 UnexpectedAdmissionError"]);
    let reason = world.job.status.as_ref().unwrap().placement.as_ref().unwrap().reason.clone();
    let why =
        "1 node is avoided: n0 (a pod of this job could not start there: UnexpectedAdmissionError: Allocate failed";
    assert!(reason.contains(why), "{reason}");
    // The other nodes are not enough: the job waits, says why, and retries later.
    world.now = 30;
    refuse(&mut world, "n2");
    (0..9).for_each(|_| drop(world.step()));
    world.now = 40;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Queued", 3));
    assert!(world.message().contains("could not start there: UnexpectedAdmissionError"), "{}", world.message());
    assert_eq!(world.plan().wake, Some(at(60)));
    world.now = 60;
    world.run();
    assert_eq!((world.stage(), used(&world)), ("Running", vec!["n0".to_string(), "n1".to_string()]));
    // Once the node may be used again, it is the last choice.
    let mut world = World::new(1, json!({"failurePolicy": {"maxRestarts": 1}}));
    world.node("n1", "9");
    world.run();
    refuse(&mut world, "n0");
    world.run();
    world.now = 600;
    world.exit("a-2-0", 9, "");
    world.nodes.get_mut("n1").unwrap().facts.ready = false;
    world.run();
    assert_eq!((world.stage(), used(&world)), ("Running", vec!["n0".to_string()]));
}

/// A network rollout interrupts each node, one after the other: first NotReady, then silent for
/// less than the grace period.
#[test]
fn a_rollout_over_a_hundred_nodes_fails_no_job() {
    let mut world = World::new(100, json!({}));
    world.run();
    for number in 0..100 {
        let name = format!("n{number}");
        let away = |world: &mut World, ready: bool, silent: bool| {
            let since = silent.then(|| at(world.now));
            let node = world.nodes.get_mut(&name).unwrap();
            (node.facts.ready, node.silent_since) = (ready, since);
        };
        away(&mut world, false, false);
        world.now += 300;
        world.run();
        away(&mut world, false, true);
        world.now += 59;
        world.run();
        away(&mut world, true, false);
        world.run();
    }
    let restarts = world.job.status.clone().unwrap().restarts.unwrap();
    assert_eq!((world.stage(), world.attempt(), restarts.total), ("Running", 1, 0));
}

#[test]
fn two_bad_nodes_of_a_gang_of_64_are_both_named() {
    let mut world = World::new(64, json!({}));
    world.run();
    for node in ["n7", "n41"] {
        world.nodes.get_mut(node).unwrap().silent_since = Some(at(0));
    }
    world.now = 60;
    world.step();
    assert_eq!(failures(&world), ["n41 NodeLost", "n7 NodeLost"]);
    for node in ["node n7:", "node n41:"] {
        assert!(world.message().contains(node), "{}", world.message());
    }
}
