//! A scheduler that refuses, fails on the way, says nothing, or responds too late.

use super::world::at;
use super::*;
use crate::cluster::avoidance::{NodeFault, UNSCHEDULABLE, record_faults};
use crate::cluster::view::{Phase, Unschedulable};

/// Seen on real nodes: the same node was retried every 310 s forever, and its GPUs were held 97 %
/// of the time.
#[test]
fn a_refused_gang_is_rolled_back_and_another_node_tried() {
    let mut world = World::new(2, json!({}));
    world.node("n2", "4");
    let refuse = |world: &mut World, nodes: &[&str]| {
        (0..4).for_each(|_| drop(world.step()));
        let now = at(world.now);
        for pod in world.pods.iter_mut().filter(|pod| pod.node.as_deref().is_some_and(|node| nodes.contains(&node))) {
            let message =
                "0/3 nodes are available: 1 node(s) didn't match pod anti-affinity rules. preemption: no".into();
            (pod.node, pod.phase, pod.ready) = (None, Phase::Pending, false);
            pod.unschedulable = Some(Unschedulable { message, since: Some(now) });
        }
    };
    refuse(&mut world, &["n0"]);
    assert_eq!(world.step().wake, Some(at(10)));
    world.now = 9;
    world.step();
    assert_eq!(world.attempt(), 1, "the scheduler may still bind it");
    world.now = 10;
    let back = world.step();
    let premise = Some(Premise::Unbound("a-1-0".into()));
    assert_eq!(
        (world.attempt(), back.actions.len(), back.premise),
        (2, 0, premise),
        "it may be bound without the cache showing it"
    );
    let expected = "the scheduler refuses 1 of 2 pods: pod a-1-0 on node n0: 0/3 nodes are available: 1 node(s) didn't match pod \
                anti-affinity rules. (spec.template.spec.affinity.podAntiAffinity)";
    assert_eq!(world.message(), format!("attempt 2 follows: {expected}"));
    world.run();
    let used = |world: &World| world.pods.iter().filter_map(|pod| pod.node.clone()).collect::<Vec<_>>();
    assert_eq!((world.stage(), used(&world)), ("Running", vec!["n1".to_string(), "n2".to_string()]));
    assert_eq!(world.job.status.as_ref().unwrap().restarts.as_ref().unwrap().total, 0, "no restart is counted");
    // A job that no other node can take waits, quotes the scheduler, and retries later.
    let mut world = World::new(1, json!({}));
    refuse(&mut world, &["n0"]);
    world.now = 10;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Queued", 2));
    assert!(
        world.message().contains("1 node cannot be used: the scheduler refused it: 0/3 nodes"),
        "{}",
        world.message()
    );
    assert_eq!(world.plan().wake, Some(at(70)));
    world.now = 70;
    world.run();
    assert_eq!(world.stage(), "Running");
}

/// Regression test: a claim that cannot be reserved is an error and not a lack of room. The gang
/// held its nodes for 300 s with "the scheduler gives no reason".
#[test]
fn a_scheduler_error_counts_as_a_refusal() {
    let on = |node: Option<&str>, reason: &str| {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": reason, "message": "running PreBind plugin: no"});
        let spec = json!({"containers": [], "nodeName": node});
        let pod = json!({"metadata": {"name": "a-1-0"}, "spec": spec, "status": {"conditions": [condition]}});
        PodView::of(&serde_json::from_value(pod).unwrap()).unschedulable.map(|why| why.message)
    };
    assert_eq!(on(None, "SchedulerError").as_deref(), Some("running PreBind plugin: no"));
    assert_eq!(on(None, "SchedulingGated"), None);
    // Seen with a killed API server: kube-scheduler retries the binding, gets "already assigned to
    // node", and patches the pod's status with that.
    assert_eq!(on(Some("n0"), "SchedulerError"), None);
}

/// Regression test: a job with a nonexistent scheduler held nodes for 300 of every 310 s, and
/// nothing reported why its pods did not run.
#[test]
fn a_gang_without_a_scheduler_response_is_reported_and_rolled_back() {
    let mut world = World::new(2, json!({"template": {"spec": {"schedulerName": "nobody"}}}));
    let let_go = |world: &mut World| {
        (0..4).for_each(|_| drop(world.step()));
        let pods = world.pods.iter_mut().filter(|pod| pod.node.is_some());
        pods.for_each(|pod| (pod.node, pod.phase, pod.ready) = (None, Phase::Pending, false));
    };
    let_go(&mut world);
    assert_eq!(world.step().wake, Some(at(10)));
    world.now = 10;
    assert_eq!(world.step().wake, Some(at(60)));
    let why =
        "pod a-1-0: no scheduler has reported on it: is there one named nobody (spec.template.spec.schedulerName)?";
    assert_eq!(world.message(), format!("0 of 2 pods run; {why}"));
    for (attempt, pause) in [(1, 20), (2, 40), (3, 80), (4, 160), (5, 300), (6, 300)] {
        let placed = world.now;
        world.now = if attempt == 1 { 60 } else { placed + 60 };
        world.step();
        assert_eq!(world.attempt(), attempt + 1);
        assert!(world.message().contains("2 of 2 pods not scheduled within 60 s: pod a-"), "{}", world.message());
        assert_eq!(world.step().wake, Some(at(world.now + pause)), "in attempt {attempt}");
        world.now += pause;
        let_go(&mut world);
    }
    // The scheduler has reported on one pod of the gang, so it may still report on the others.
    let bound = world.pods.iter_mut().find(|pod| pod.attempt == 7).unwrap();
    bound.node = Some("n0".into());
    world.now += 60;
    world.step();
    assert_eq!(world.attempt(), 7);
}

/// Regression test: after an API server outage, kube-scheduler's watches took most of a minute to
/// recover, and gangs were rolled back that it then bound.
#[test]
fn a_known_scheduler_gets_the_full_schedule_timeout() {
    let mut world = World::new(2, json!({"template": {"spec": {"schedulerName": "bins"}}}));
    world.scheduler_is_known = true;
    (0..4).for_each(|_| drop(world.step()));
    world.pods.iter_mut().for_each(|pod| (pod.node, pod.phase, pod.ready) = (None, Phase::Pending, false));
    world.now = 60;
    assert_eq!(world.step().wake, Some(at(300)));
    let why = "pod a-1-0: the scheduler bins has not reported on it yet";
    assert_eq!(world.message(), format!("0 of 2 pods run; {why}"));
    world.now = 300;
    let decision = world.step();
    assert!(world.message().contains(&format!("2 of 2 pods not scheduled within 300 s: {why}")), "{}", world.message());
    assert_eq!((world.attempt(), decision.premise), (2, Some(Premise::Unbound("a-1-0".into()))));
}

/// Regression test: if nodes were also unusable for several other reasons, the scheduler's message
/// was omitted.
#[test]
fn scheduler_refusals_are_listed_before_general_exclusions() {
    let mut world = World::new(1, json!({}));
    for (node, key) in (1..=8).zip(["a", "a", "b", "b", "c", "c", "d", "d"]) {
        world.node(&format!("n{node}"), "4");
        let taint = json!({"key": key, "effect": "NoSchedule"});
        world.nodes.get_mut(&format!("n{node}")).unwrap().facts.taints = vec![serde_json::from_value(taint).unwrap()];
    }
    let fault =
        NodeFault { node: "n0".into(), reason: UNSCHEDULABLE.into(), message: "0/9 nodes are available: no".into() };
    world.step();
    record_faults(&mut world.job.status.as_mut().unwrap().node_failures, [fault], at(0));
    world.run();
    let expected = "no node has room for cpu 2; 1 node cannot be used: the scheduler refused it: 0/9 nodes are available: no; \
                2 nodes cannot be used: ";
    assert!(world.message().starts_with(expected), "{}", world.message());
}
