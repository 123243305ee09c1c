//! Pods whose labels or gates are changed by other clients.

use super::*;
use switchyard_crds::labels;

/// Removes the labels of a pod.
fn strip(world: &mut World, name: &str) {
    let position = world.pods.iter().position(|pod| pod.name == name).unwrap();
    world.unlabelled.push(world.pods.remove(position));
}

fn labelled(actions: &[Action]) -> Vec<(String, BTreeMap<String, String>)> {
    let pods = actions.iter().filter_map(|action| match action {
        Action::Repair(Object::Pod(pod)) => Some(pod.metadata.clone()),
        _ => None,
    });
    pods.map(|metadata| (metadata.name.unwrap(), metadata.labels.unwrap())).collect()
}

/// Regression test: the job said "Running, 1 of 2 nodes train" forever, and under the next leader a
/// finished training started again.
#[test]
fn lost_pod_labels_are_restored_without_a_failure() {
    let mut world = World::new(2, json!({}));
    world.run();
    strip(&mut world, "a-1-1");
    let repaired = world.step();
    let [(name, set)] = &labelled(&repaired.actions)[..] else { panic!("{:?}", repaired.actions) };
    let expected = [
        ("app.kubernetes.io/managed-by", "switchyard"),
        (labels::ATTEMPT, "1"),
        (labels::JOB_NAME, "a"),
        (labels::JOB_UID, "0123456789"),
        (labels::NODE_RANK, "1"),
        (labels::RANK, "1"),
    ];
    let expected = expected.map(|(label, value)| (label.to_string(), value.to_string()));
    assert_eq!((name.as_str(), set), ("a-1-1", &BTreeMap::from(expected)));
    assert_eq!((world.stage(), world.attempt()), ("Running", 1), "no pod was deleted");
    world.exit("a-1-0", 0, "");
    world.exit("a-1-1", 0, "");
    strip(&mut world, "a-1-1");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Complete", 1));
}

#[test]
fn an_unlabelled_pod_is_neither_recreated_nor_ignored_by_the_next_attempt() {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 9}}));
    (0..2).for_each(|_| drop(world.step()));
    strip(&mut world, "a-1-0");
    let repaired = world.step();
    assert_eq!((labelled(&repaired.actions).len(), repaired.actions.len()), (1, 1), "{:?}", repaired.actions);
    world.run();
    world.ends_after = Some(30);
    world.exit("a-1-0", 7, "");
    world.step();
    strip(&mut world, "a-1-1");
    world.run();
    assert!(world.message().starts_with("attempt 2 starts once pod a-1-1 of attempt 1"), "{}", world.message());
    // A name that this job has not used yet is forged.
    world.unlabelled.push(PodView { name: "a-3-0".into(), ..PodView::default() });
    assert!(labelled(&world.step().actions).is_empty());
}

/// Regression test: the pod trained alone, and the job was reported as complete.
#[test]
fn a_pod_ungated_by_another_client_does_not_run_without_its_gang() {
    let mut world = World::new(2, json!({}));
    world.node("n1", "1");
    world.run();
    assert_eq!(world.stage(), "Queued");
    let alone = world.pods.iter_mut().find(|pod| pod.name == "a-1-0").unwrap();
    (alone.gated, alone.node, alone.phase) = (false, Some("n0".into()), Phase::Running);
    let decided = world.step();
    let expected = "pod a-1-0 was started on node n0 without its gang, because another client removed its scheduling gate \
                training.switchyard.dev/gang: attempt 2 follows in 20 s";
    assert_eq!((world.attempt(), world.message().as_str()), (2, expected));
    assert_eq!(decided.events, [EventDraft::warning("GateRemoved", expected.into())]);
    assert_eq!(world.job.status.as_ref().unwrap().restarts.as_ref().unwrap().total, 0, "no restart is counted");
    world.run();
    assert!(world.pods.iter().all(|pod| pod.attempt == 2), "the lone pod is deleted");
    world.node("n1", "4");
    world.now = 20;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
    // An emptied status says nothing about gates: the gang is running.
    world.job.status.as_mut().unwrap().conditions.clear();
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
}
