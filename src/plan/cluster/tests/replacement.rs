//! Pods of an older attempt that end slowly, or whose end is never reported.

use super::world::at;
use super::*;
use crate::cluster::view::Deletion;

const GRACE: i64 = 45;

/// Two running pods. The first fails, and the second ends slowly.
fn failed(gang_policy: serde_json::Value) -> World {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 9}, "gangPolicy": gang_policy}));
    world.run();
    world.ends_after = Some(GRACE);
    world.now = 100;
    world.exit("a-1-0", 7, "");
    world.run();
    world
}

fn old(world: &mut World) -> &mut PodView {
    world.pods.iter_mut().find(|pod| pod.name == "a-1-1").unwrap()
}

fn starts(world: &World) -> bool {
    world.pods.iter().any(|pod| pod.attempt == 2 && !pod.gated)
}

/// Regression test: two rank 0 processes wrote to the same checkpoint directory.
#[test]
fn no_gate_is_lifted_while_a_pod_of_an_older_attempt_may_run() {
    let mut world = failed(json!({}));
    assert_eq!((world.stage(), world.attempt(), starts(&world)), ("Restarting", 2, false));
    assert_eq!(world.pods.iter().filter(|pod| pod.attempt == 2 && pod.gated).count(), 2, "they exist");
    let expected = format!(
        "attempt 2 starts once pod a-1-1 of attempt 1 on node n1 has ended, or at {}, 30 s after the end of its grace period",
        at(100 + GRACE + 30)
    );
    assert_eq!(world.message(), expected);
    world.now = 100 + GRACE + 29;
    assert_eq!(world.step().wake, Some(at(world.now + 1)));
    assert!(!starts(&world));
    old(&mut world).phase = Phase::Failed;
    world.run();
    assert_eq!((world.stage(), world.message().as_str()), ("Running", "2 of 2 nodes train"));
}

#[test]
fn the_wait_for_a_silent_kubelet_is_bounded_and_shown_in_the_status() {
    let mut world = failed(json!({}));
    world.now = 100 + GRACE + 30;
    let placed = world.step();
    let warned: Vec<&EventDraft> = placed.events.iter().filter(|event| event.reason == "OldPodMayRun").collect();
    let expected = format!(
        "pod a-1-1 of attempt 1 on node n1 may still run; attempt 2 no longer waits for it since {}, 30 s after the end of its \
         grace period",
        at(world.now)
    );
    assert_eq!(warned, [&EventDraft::warning("OldPodMayRun", expected.clone())]);
    assert_eq!(world.message(), format!("0 of 2 pods run; {expected}"));
    world.run();
    assert_eq!((world.stage(), world.message()), ("Running", format!("2 of 2 nodes train; {expected}")));
    world.pods.retain(|pod| pod.attempt == 2);
    world.run();
    assert_eq!(world.message(), "2 of 2 nodes train");
}

#[test]
fn on_a_silent_node_the_wait_is_the_node_grace_period() {
    let mut world = failed(json!({}));
    let node = world.nodes.get_mut("n1").unwrap();
    (node.silent_since, node.facts.ready) = (Some(at(90)), false);
    world.node("n2", "4");
    world.now = 159;
    world.step();
    let expected = format!("or at {}, 60 s after it was deleted: node n1 has not reported since {}", at(160), at(90));
    assert!(world.message().ends_with(&expected), "{}", world.message());
    // Other nodes are silent too, so the network is the likely cause, and the pod keeps training.
    (world.now, world.mass_outage) = (1000, Some("5 of 20 nodes stopped reporting within a minute".into()));
    assert_eq!(world.step().wake, Some(at(1060)));
    assert!(
        world.message().ends_with("has ended: 5 of 20 nodes stopped reporting within a minute"),
        "{}",
        world.message()
    );
    let mut taken_out = world.clone();
    taken_out.nodes.get_mut("n1").unwrap().out_of_service = true;
    let mut deleted = world.clone();
    deleted.nodes.remove("n1");
    world.mass_outage = None;
    for (mut world, why) in [
        (world, "60 s after it was deleted: node n1 has not reported since"),
        (taken_out, "when it was deleted: an administrator took node n1 out of service"),
        (deleted, "60 s after it was deleted: node n1 is gone"),
    ] {
        world.run();
        assert!(starts(&world) && world.message().contains(why), "{}", world.message());
    }
}

#[test]
fn a_resumed_job_waits_for_its_suspended_pods() {
    let mut world = World::new(1, json!({}));
    world.run();
    world.ends_after = Some(GRACE);
    world.job.spec.suspend = true;
    world.run();
    world.job.spec.suspend = false;
    world.run();
    assert_eq!((world.stage(), world.attempt(), starts(&world)), ("Placing", 2, false));
    assert!(world.message().starts_with("attempt 2 starts once pod a-1-0 of attempt 1 on node n0 has ended"));
    world.pods.retain(|pod| pod.attempt == 2);
    world.run();
    assert_eq!(world.stage(), "Running");
}

#[test]
fn frameworks_without_file_fencing_wait_for_termination_by_default() {
    let spec = |framework: &str, replacement: Option<&str>| {
        let mut world = World::new(1, json!({}));
        let framework = serde_json::from_value(json!(framework)).unwrap();
        world.job.spec.trainer.framework = framework;
        world.job.spec.gang_policy.replacement =
            replacement.map(|replacement| serde_json::from_value(json!(replacement)).unwrap());
        format!("{:?}", world.job.spec.replacement())
    };
    assert_eq!(spec("Switchyard", None), "Immediate");
    assert_eq!(spec("Switchyard", Some("AfterTermination")), "AfterTermination");
    for framework in ["Torch", "Paddle", "Horovod", "MPI", "JAX", "TensorFlow", "Plain"] {
        assert_eq!(spec(framework, None), "AfterTermination", "{framework}");
    }
    let world = failed(json!({"replacement": "Immediate"}));
    assert_eq!((world.stage(), world.message().as_str()), ("Running", "2 of 2 nodes train"), "alongside pod a-1-1");
}

#[test]
fn a_pod_can_run_until_its_containers_end_or_it_is_deleted_unbound() {
    let deletion = Some(Deletion { requested: at(0), due: at(30) });
    let bound = PodView { node: Some("n0".into()), ..PodView::default() };
    for (pod, can_run) in [
        (PodView { gated: true, ..PodView::default() }, true),
        (PodView { deleting: true, ..PodView::default() }, true),
        (PodView { deleting: true, deletion, ..PodView::default() }, false),
        (bound.clone(), true),
        (PodView { deletion, ..bound.clone() }, true),
        (PodView { deletion, stopped: Some(at(1)), ..bound.clone() }, false),
        (PodView { phase: Phase::Succeeded, ..bound }, false),
    ] {
        assert_eq!(pod.can_run(), can_run, "{pod:?}");
    }
}
