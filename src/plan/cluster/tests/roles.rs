//! Jobs with roles: their pods, counts, completion and failures.

use super::world::at;
use super::*;
use serde_json::Value;
use switchyard_crds::{RoleCounts, labels};

/// A chief, two workers and an evaluator without which the job continues. The job is complete when
/// the chief is.
fn roles() -> Value {
    let limits = |cpu: &str| json!({"limits": {"cpu": cpu}});
    json!({
        "trainer": {"framework": "Plain", "image": "i"},
        "roles": [
            {"name": "chief", "resourcesPerNode": limits("1")},
            {"name": "worker", "replicas": 2, "resourcesPerNode": limits("2")},
            {"name": "eval", "resourcesPerNode": limits("1"), "onFailure": "Ignore"},
        ],
        "successPolicy": {"role": "chief"},
        "failurePolicy": {"maxRestarts": 3},
    })
}

fn running(spec: Value) -> World {
    let mut world = World::new(2, spec);
    world.run();
    assert_eq!(world.stage(), "Running", "{}", world.message());
    world
}

fn counts(world: &World) -> Vec<(String, [i32; 4])> {
    let of = |role: &RoleCounts| {
        let counts = &role.counts;
        (role.name.clone(), [counts.desired, counts.ready, counts.succeeded, counts.failed])
    };
    world.job.status.as_ref().unwrap().roles.iter().map(of).collect()
}

#[test]
fn all_roles_are_one_gang_with_counts_per_role() {
    let mut world = World::new(2, roles());
    (0..2).for_each(|_| drop(world.step()));
    let made = world.pods.iter().map(|pod| (pod.name.as_str(), pod.requests.get("cpu"))).collect::<Vec<_>>();
    assert_eq!(made, [("a-1-0", 1000), ("a-1-1", 2000), ("a-1-2", 2000), ("a-1-3", 1000)]);
    world.run();
    let counted = [("chief", [1, 1, 0, 0]), ("worker", [2, 2, 0, 0]), ("eval", [1, 1, 0, 0])];
    assert_eq!(counts(&world), counted.map(|(name, counts)| (name.to_string(), counts)));
    assert_eq!(world.job.status.as_ref().unwrap().ready.as_deref(), Some("4/4"));
    let nodes = &world.job.status.as_ref().unwrap().placement.as_ref().unwrap().nodes;
    assert_eq!(nodes.iter().map(|node| node.first_rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
    // Workers take different nodes with four cores each; the others share them.
    assert_ne!(nodes[1].node_name, nodes[2].node_name);
    let used = |name: &str| -> i64 {
        let own = world.pods.iter().zip(nodes).filter(|(_, node)| node.node_name == name);
        own.map(|(pod, _)| pod.requests.get("cpu")).sum()
    };
    assert!(used("n0") <= 4000 && used("n1") <= 4000, "{nodes:?}");
}

#[test]
fn pods_have_their_role_and_index_as_labels() {
    let world = World::new(2, roles());
    let valid = crate::validate(&world.job).unwrap();
    let label = |rank: u32| {
        let made = objects::pod(&world.job, &valid, &crate::objects::Defaults::default(), 1, rank);
        let own = made.metadata.labels.unwrap();
        (own[labels::ROLE].clone(), own[labels::ROLE_INDEX].clone())
    };
    let expected = [("chief", "0"), ("worker", "0"), ("worker", "1"), ("eval", "0")];
    let expected = expected.map(|(role, index)| (role.to_string(), index.to_string()));
    assert_eq!((0..4).map(label).collect::<Vec<_>>(), expected);
}

/// A role that lacks room keeps the whole gang from starting.
#[test]
fn the_gang_waits_for_room_for_every_role() {
    let mut spec = roles();
    spec["roles"][2]["resourcesPerNode"]["limits"]["cpu"] = json!("3");
    let mut world = World::new(2, spec);
    world.run();
    assert_eq!(world.stage(), "Queued");
    assert!(world.message().starts_with("role eval: no node has room for cpu 3"), "{}", world.message());
    assert!(world.pods.iter().all(|pod| pod.gated && pod.node.is_none()));
    world.node("n2", "3");
    world.run();
    assert_eq!(world.stage(), "Running", "{}", world.message());
}

#[test]
fn the_awaited_role_completes_the_job_and_the_others_are_stopped() {
    let mut world = running(roles());
    world.exit("a-1-1", 0, "");
    world.run();
    assert_eq!(world.stage(), "Running", "a worker is not awaited");
    world.exit("a-1-0", 0, "");
    world.run();
    assert_eq!((world.stage(), world.message().as_str()), ("Complete", "role chief is done in attempt 1"));
    let left: Vec<&str> = world.pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(left, ["a-1-0", "a-1-1"], "only pods that have ended stay, for their logs");
    assert_eq!(counts(&world)[1], ("worker".to_string(), [2, 0, 1, 0]));
}

#[test]
fn without_a_success_policy_all_roles_are_awaited() {
    let mut spec = roles();
    spec["successPolicy"] = Value::Null;
    spec["roles"][2]["onFailure"] = json!("RestartJob");
    let mut world = running(spec);
    for name in ["a-1-0", "a-1-1", "a-1-2"] {
        world.exit(name, 0, "");
        world.run();
        assert_eq!(world.stage(), "Running");
    }
    world.exit("a-1-3", 0, "");
    world.run();
    assert_eq!((world.stage(), world.message().as_str()), ("Complete", "all 4 nodes are done in attempt 1"));
}

#[test]
fn training_continues_without_a_role_whose_failures_are_ignored() {
    let mut world = running(roles());
    world.exit("a-1-3", 1, "out of ideas");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1));
    assert_eq!(counts(&world)[2], ("eval".to_string(), [1, 0, 0, 1]));
    // The same if it is deleted, or its node is lost.
    world.pods.retain(|pod| pod.name != "a-1-3");
    world.now += 1000;
    world.run();
    assert_eq!((world.stage(), world.attempt(), world.pods.len()), ("Running", 1, 3));
    world.exit("a-1-0", 0, "");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Complete", 1));
}

#[test]
fn any_other_failure_restarts_all_roles() {
    let mut world = running(roles());
    world.exit("a-1-0", 1, "");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
    assert_eq!(world.pods.iter().filter(|pod| pod.attempt == 2 && pod.ready).count(), 4);
    assert_eq!(world.job.status.as_ref().unwrap().restarts.as_ref().unwrap().application, 1);
}

/// A worker whose chief has ended fails to reach it, and its end may be observed first.
#[test]
fn a_failure_next_to_the_end_of_the_awaited_role_does_not_restart_the_job() {
    let mut world = running(roles());
    world.exit("a-1-1", 1, "connection refused");
    let decided = world.step();
    assert_eq!((world.attempt(), decided.wake), (1, Some(at(3))));
    world.exit("a-1-0", 0, "");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Complete", 1));
    // Without that end, the failure counts.
    let mut world = running(roles());
    world.exit("a-1-1", 1, "connection refused");
    world.run();
    assert_eq!(world.attempt(), 1);
    world.now += 3;
    let decided = world.step();
    assert_eq!((world.stage(), world.attempt()), ("Restarting", 2));
    assert!(decided.events[0].note.contains("pod a-1-1 on node n"), "{:?}", decided.events);
}
