//! Limits that change while a job runs.

use super::*;
use crate::cluster::clock::{exceeds_placed_limit, promised_end};
use world::at;

#[test]
fn the_placed_limit_counts_until_the_job_is_queued_again() {
    let limit = |world: &World| world.job.status.as_ref().unwrap().placed_limit_seconds;
    let mut world = World::new(1, json!({"activeDeadlineSeconds": 600, "failurePolicy": {"maxRestarts": 9}}));
    world.run();
    assert_eq!((world.stage(), limit(&world)), ("Running", Some(600)));
    let promise = |world: &World, second: i64| (promised_end(&world.job), exceeds_placed_limit(&world.job, at(second)));
    assert_eq!(promise(&world, 600), (Some(at(600)), false), "it is stopped then");
    world.job.spec.active_deadline_seconds = Some(10_000);
    assert_eq!(promise(&world, 599), (Some(at(600)), false));
    assert_eq!(promise(&world, 600), (Some(at(600)), true));
    world.now = 700;
    world.run();
    assert_eq!((world.stage(), limit(&world)), ("Running", Some(600)), "the deadline is the raised one");
    // A restart after a failure keeps the nodes, and the limit they were granted with.
    world.exit("a-1-0", 5, "");
    world.run();
    assert_eq!((world.stage(), world.attempt(), limit(&world)), ("Running", 2, Some(600)));
    world.job.spec.active_deadline_seconds = Some(60);
    assert_eq!(promise(&world, 0).0, Some(at(60)), "a lower limit counts at once");
    world.job.spec.active_deadline_seconds = None;
    assert_eq!(promise(&world, 600), (Some(at(600)), true));
    // A job that gave up its nodes has been queued again with the current limit.
    world.job.spec.suspend = true;
    world.run();
    world.job.spec.suspend = false;
    world.run();
    assert_eq!((world.stage(), limit(&world)), ("Running", None));
    assert_eq!(promise(&world, 100_000), (None, false));
}

#[test]
fn dedicated_parameter_servers_are_refused() {
    let servers = json!({"mode": "ParameterServer", "parameterServer": {"servers": 1, "placement": "Dedicated"}});
    let engine = json!({
        "model": {"type": "MLP", "mlp": {"hiddenSizes": [8]}}, "batchSizePerProcess": 1, "steps": 1,
        "data": {"format": "Synthetic", "image": {"height": 2, "width": 2, "channels": 1}, "classes": 2, "samples": 99},
        "communication": servers,
    });
    let mut world = World::new(1, json!({"trainer": {"image": "i"}, "engine": engine}));
    world.run();
    let failed = world.job.status.as_ref().unwrap().condition(conditions::FAILED).unwrap();
    assert_eq!(failed.reason, conditions::INVALID_SPEC);
    assert_eq!(
        failed.message,
        "spec.engine.communication.parameterServer.placement: got Dedicated; expected Ranks in a cluster: servers \
         have no pods of their own yet"
    );
    assert!(world.pods.is_empty());
}
