//! An API server that refuses objects that the pods of a placed gang need to start.

use super::world::at;
use super::*;
use crate::cluster::queue_order::{QueuePosition, Slowdown};

const QUOTA: &str = "cannot create ResourceClaim a-1-0: resourceclaims is forbidden: exceeded quota: none, requested: devices=1, used: devices=0, \
                     limited: devices=0";

/// A gang with GPUs by claims that has just been placed. None of its claims exists.
fn placed(spec: serde_json::Value) -> World {
    let mut world = World::new(1, spec);
    (0..3).for_each(|_| drop(world.step()));
    assert!(world.job.status.as_ref().unwrap().is(conditions::PLACED));
    world.job.status.as_mut().unwrap().device_allocation = Some(DeviceAllocation::Claims);
    world
}

fn refusal(since: i64) -> Option<WriteError> {
    Some(WriteError::after(None, QUOTA.into(), true, at(since)))
}

/// Plans, while the server refuses every create.
fn refused(world: &mut World) -> Reconciliation {
    let done = world.plan();
    if let Some(status) = &done.status {
        world.job.status = Some(status.clone());
    }
    done
}

fn condition(world: &World, kind: &str) -> (String, String, String) {
    let found = world.job.status.as_ref().unwrap().condition(kind).unwrap().clone();
    (found.status, found.reason, found.message)
}

/// Regression test: a tenant without any device quota held 512 GPUs for a day.
#[test]
fn a_gang_with_refused_claims_releases_its_nodes_after_10_s_with_growing_backoff() {
    let mut world = placed(json!({"gangPolicy": {"scheduleTimeoutSeconds": 86_400}}));
    world.write_error = refusal(0);
    assert_eq!(refused(&mut world).wake, Some(at(10)));
    world.now = 9;
    refused(&mut world);
    assert_eq!((world.attempt(), world.message()), (1, QUOTA.to_string()), "the server may still accept it");
    world.now = 10;
    let back = refused(&mut world);
    let premise = Some(Premise::Unbound("a-1-0".into()));
    assert_eq!((world.attempt(), back.actions.len(), back.premise), (2, 0, premise));
    assert_eq!(world.job.status.as_ref().unwrap().placement, None);
    let expected = format!("the API server refuses objects that the pods need: {QUOTA}");
    let expected_condition = |state: &str, reason: &str| (state.to_string(), reason.to_string(), expected.clone());
    assert_eq!(condition(&world, conditions::PLACED), expected_condition("False", "Refused"));
    assert_eq!(condition(&world, conditions::OBJECTS_REFUSED), expected_condition("True", "Refused"));
    assert_eq!(world.message(), format!("attempt 2 follows: {expected}"));
    assert_eq!(back.events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["GangRolledBack"]);
    assert_eq!(world.job.status.as_ref().unwrap().restarts.as_ref().unwrap().total, 0, "no restart is counted");
    // One of its claims was accepted. It counts against the quota, which another job may need.
    let object = ObjectView { uid: "made".into(), owned: true, deleting: false, content: json!({}) };
    world.objects.insert((Kind::ResourceClaim, "a-1-0".into()), object);
    world.write_error = None;
    let deleted = world.step().actions;
    let is_claim =
        |action: &Action| matches!(action, Action::Delete { kind: Kind::ResourceClaim, name, .. } if name == "a-1-0");
    assert!(deleted.iter().any(is_claim), "{deleted:?}");
    for (attempt, pause) in [(2, 20), (3, 40), (4, 80), (5, 160), (6, 300), (7, 300)] {
        world.write_error = None;
        assert_eq!(world.step().wake, Some(at(world.now + pause)), "before attempt {attempt}");
        world.now += pause;
        (0..2).for_each(|_| drop(world.step()));
        assert!(world.job.status.as_ref().unwrap().is(conditions::PLACED), "{}", world.message());
        world.write_error = refusal(world.now);
        world.now += 10;
        refused(&mut world);
        assert_eq!(world.attempt(), attempt + 1);
    }
    // The administrator raises the quota.
    world.write_error = None;
    world.now += 300;
    world.run();
    assert_eq!(world.stage(), "Running");
    let (state, reason, _) = condition(&world, conditions::OBJECTS_REFUSED);
    assert_eq!((state.as_str(), reason.as_str()), ("False", "Accepted"));
}

#[test]
fn a_claim_name_conflict_releases_the_nodes_and_the_next_attempt_has_another_name() {
    let mut world = placed(json!({}));
    let theirs = ObjectView { uid: "theirs".into(), owned: false, deleting: false, content: json!({}) };
    world.objects.insert((Kind::ResourceClaim, "a-1-0".into()), theirs);
    assert_eq!(world.step().wake, Some(at(10)));
    world.now = 10;
    world.step();
    assert_eq!(world.attempt(), 2);
    let expected = "attempt 2 follows: the API server refuses objects that the pods need: ResourceClaim a-1-0 exists and does not belong to this job";
    assert!(world.message().starts_with(expected), "{}", world.message());
    world.now = 30;
    world.run();
    assert_eq!(world.stage(), "Running");
}

#[test]
fn an_unreachable_server_is_not_a_refusal() {
    let mut world = placed(json!({}));
    let text = "cannot create ResourceClaim a-1-0: the API server did not respond within 15 s";
    world.write_error = Some(WriteError::after(None, text.into(), false, at(0)));
    world.now = 30;
    refused(&mut world);
    assert_eq!((world.attempt(), world.message()), (1, text.to_string()));
    world.write_error = None;
    world.run();
    assert_eq!(world.stage(), "Running");
}

#[test]
fn no_gang_holds_nodes_longer_than_the_configured_timeout() {
    let mut world = World::new(2, json!({"gangPolicy": {"scheduleTimeoutSeconds": 86_400}}));
    (world.longest_schedule_timeout, world.scheduler_is_known) = (SignedDuration::from_secs(120), true);
    (0..4).for_each(|_| drop(world.step()));
    world.pods.iter_mut().for_each(|pod| (pod.node, pod.phase, pod.ready) = (None, Phase::Pending, false));
    world.now = 119;
    world.step();
    assert_eq!(world.attempt(), 1);
    world.now = 120;
    world.step();
    assert_eq!(world.attempt(), 2);
    assert!(world.message().contains("2 of 2 pods not scheduled within 120 s"), "{}", world.message());
}

#[test]
fn a_refused_job_comes_last_for_an_hour() {
    let mut world = placed(json!({}));
    world.write_error = refusal(0);
    world.now = 10;
    refused(&mut world);
    let mut other = world.job.clone();
    (other.metadata.name, other.status) = (Some("b".into()), None);
    let is_first = |second: i64| {
        let slowdown = Slowdown { at: at(second), ..Slowdown::default() };
        let position = |job: &TrainJob, priority| QueuePosition::of(job, priority, 0, slowdown);
        position(&world.job, 100).with_reservation() < position(&other, 0)
    };
    assert_eq!([10, 3609, 3610].map(is_first), [false, false, true]);
}
