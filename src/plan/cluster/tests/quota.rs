//! Gangs of one namespace that share its quota.

use super::world::at;
use super::*;

const QUOTA: &str = "cannot create Pod a-1-2: pods \"a-1-2\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4";

/// A gang of three pods of which the quota admits two.
fn short() -> World {
    let mut world = World::new(3, json!({}));
    (0..2).for_each(|_| drop(world.step()));
    world.pods.pop();
    world.write_error = Some(WriteError::after(None, QUOTA.into(), true, at(0)));
    world
}

fn plan_only(world: &mut World) -> Reconciliation {
    let done = world.plan();
    if let Some(status) = &done.status {
        world.job.status = Some(status.clone());
    }
    done
}

/// Regression test: two gangs each held part of the quota and waited for the rest forever.
#[test]
fn a_gang_short_of_quota_yields_to_the_first_of_its_namespace() {
    let mut world = short();
    plan_only(&mut world);
    assert_eq!((world.attempt(), world.stage(), world.pods.len()), (1, "Placing", 2), "the first keeps its pods");
    world.quota_recipient = Some("b");
    let decision = plan_only(&mut world);
    assert_eq!((world.attempt(), world.stage(), decision.actions.len()), (2, "Queued", 0));
    let expected =
        format!("job b comes first for the namespace's quota: the pods are deleted, and recreated in 20 s; {QUOTA}");
    assert_eq!(world.message(), expected);
    assert_eq!(decision.events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["QuotaLeft"]);
    (world.write_error, world.quota_recipient) = (None, None);
    world.run();
    assert_eq!((world.pods.len(), world.message()), (0, expected), "the message stays until the retry");
    assert_eq!(world.job.status.as_ref().unwrap().restarts.as_ref().unwrap().total, 0, "no restart is counted");
    world.now = 20;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
}

/// Regression test: a gang of 64 that waited for days held its team's whole quota, and a one-node
/// job could not start on free nodes.
#[test]
fn a_gang_without_room_yields_its_quota_to_one_with_room() {
    let mut world = World::new(2, json!({}));
    world.node("n1", "1");
    world.run();
    assert_eq!((world.stage(), world.pods.len()), ("Queued", 2));
    let mut pauses = Vec::new();
    for attempt in 2..8 {
        world.quota_recipient = Some("small");
        world.step();
        assert_eq!((world.stage(), world.attempt()), ("Queued", attempt));
        let expected = "job small comes first for the namespace's quota: ";
        assert!(world.message().starts_with(expected), "{}", world.message());
        world.quota_recipient = None;
        world.run();
        assert_eq!(world.pods.len(), 0);
        let pause = world.plan().wake.unwrap().duration_since(at(world.now)).as_secs();
        pauses.push(pause);
        world.now += pause;
        world.run();
        assert_eq!((world.stage(), world.pods.len()), ("Queued", 2), "{}", world.message());
    }
    assert_eq!(pauses, [20, 40, 80, 120, 120, 120]);
}
