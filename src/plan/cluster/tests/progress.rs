//! The condition `Progressing`: its content, and that it causes no extra writes.

use super::world::{World, at};
use crate::cluster::Reconciliation;
use serde_json::{Value, json};
use switchyard_crds::conditions;
use switchyard_worker_contract::event::Summary;

fn figures(step: u64, stuck: Value) -> Summary {
    let mut figures = json!({"step": step, "totalSteps": 900, "loss": 2.0, "itemsPerSecond": 10.0, "communicationPercent": 1.0,
        "inputPercent": 0.0});
    if !stuck.is_null() {
        figures["stuck"] = stuck;
    }
    serde_json::from_value(figures).unwrap()
}

/// A running job with its first figures.
fn training(spec: Value) -> World {
    let mut world = World::new(2, spec);
    world.run();
    assert_eq!(progressing(&world), None, "no step is known");
    world.summary = Some(figures(5, Value::Null));
    world.run();
    world
}

/// State, reason, message and transition time.
fn progressing(world: &World) -> Option<(String, String, String, i64)> {
    let condition = world.job.status.as_ref()?.condition(conditions::PROGRESSING)?.clone();
    let since = condition.last_transition_time.0.duration_since(at(0)).as_secs();
    Some((condition.status, condition.reason, condition.message, since))
}

fn expected(state: &str, reason: &str, message: &str, since: i64) -> Option<(String, String, String, i64)> {
    Some((state.into(), reason.into(), message.into(), since))
}

/// Plans at this second, applies the status write if there is one, and records its time.
fn reconcile(world: &mut World, second: i64) -> Reconciliation {
    world.now = second;
    let done = world.step();
    if done.status.is_some() {
        world.written = Some(at(second));
    }
    done
}

#[test]
fn steps_are_written_with_the_figures_only() {
    let mut world = training(json!({}));
    assert_eq!(progressing(&world), expected("True", "StepsMade", "step 5 of 900", 0));
    world.written = Some(at(0));
    let mut writes = 0;
    for second in 1..=100 {
        world.summary = Some(figures(5 + second as u64, Value::Null));
        writes += u32::from(reconcile(&mut world, second).status.is_some());
    }
    assert_eq!(writes, 10, "as many as figures without the condition");
    assert_eq!(progressing(&world), expected("True", "StepsMade", "step 105 of 900", 0));
    for second in 101..=200 {
        assert_eq!(reconcile(&mut world, second).status, None, "nothing is new");
    }
}

#[test]
fn the_first_figures_are_written_when_figures_are_due() {
    let mut world = World::new(2, json!({}));
    world.run();
    world.written = Some(at(0));
    world.summary = Some(figures(5, Value::Null));
    let done = reconcile(&mut world, 3);
    assert_eq!((done.status, done.wake), (None, Some(at(10))));
    reconcile(&mut world, 10);
    assert_eq!(progressing(&world), expected("True", "StepsMade", "step 5 of 900", 10));
}

#[test]
fn a_hung_rank_is_reported_at_once_and_only_once() {
    let mut world = training(json!({}));
    world.written = Some(at(0));
    let stuck = json!({"rank": 1, "nodeRank": 1, "operation": "forward", "step": 6, "index": 2, "since": 1_000_003, "ranks": 1});
    world.summary = Some(figures(5, stuck.clone()));
    assert!(reconcile(&mut world, 2).status.is_some(), "the figures were written 2 s ago");
    let message = "rank 1 on n1 has been hung since 1970-01-12T13:46:43Z in step 6: forward pass of micro-batch 2; \
                   the job keeps waiting";
    assert_eq!(progressing(&world), expected("False", "Hung", message, 2));
    for second in 3..=60 {
        assert_eq!(reconcile(&mut world, second).status, None);
    }
    let mut more = stuck;
    more["ranks"] = json!(2);
    world.summary = Some(figures(5, more));
    reconcile(&mut world, 61);
    assert!(progressing(&world).unwrap().2.contains("micro-batch 2 (2 ranks are hung); the job"));
    world.summary = Some(figures(5, Value::Null));
    reconcile(&mut world, 62);
    assert_eq!(
        progressing(&world),
        expected("True", "StepsMade", "step 5 of 900", 62),
        "it continues, within the same step"
    );
}

#[test]
fn a_hang_that_ends_an_attempt_stays_the_reason_until_the_next_step() {
    let cause =
        "rank 1: stands still for 30 s, since 14:00:00 UTC, in step 6: forward pass of micro-batch 0 (process 42)";
    for (restarts, stage) in [(1, "Restarting"), (0, "Failed")] {
        let mut world = training(json!({"failurePolicy": {"maxRestarts": restarts}}));
        world.now = 40;
        world.exit("a-1-1", 10, cause);
        world.step();
        assert_eq!(world.stage(), stage);
        let (state, reason, message, since) = progressing(&world).unwrap();
        assert_eq!((state.as_str(), reason.as_str(), since), ("False", "Hung", 40));
        assert!(message.contains("pod a-1-1 on node n1") && message.contains(cause), "{message}");
        if restarts > 0 {
            world.summary = None;
            world.run();
            assert_eq!((world.stage(), progressing(&world).unwrap().1.as_str()), ("Running", "Hung"));
            world.summary = Some(figures(1, Value::Null));
            world.run();
            assert_eq!(progressing(&world), expected("True", "StepsMade", "step 1 of 900", 40));
        }
    }
}

#[test]
fn progress_is_false_after_failures_and_while_suspended() {
    let mut world = training(json!({"failurePolicy": {"maxRestarts": 1}}));
    world.exit("a-1-1", 5, "no");
    world.step();
    assert_eq!(
        progressing(&world).map(|expected| (expected.0, expected.1)),
        Some(("False".into(), "Restarting".into()))
    );
    let mut world = training(json!({}));
    world.job.spec.suspend = true;
    world.step();
    assert_eq!(
        progressing(&world).map(|expected| (expected.0, expected.1)),
        Some(("False".into(), "Suspended".into()))
    );
    let mut world = training(json!({}));
    world.exit("a-1-0", 0, "");
    world.exit("a-1-1", 0, "");
    world.step();
    assert_eq!(progressing(&world).map(|expected| (expected.0, expected.1)), Some(("False".into(), "Complete".into())));
}

/// Regression test: the status said "60 %, ETA 10 s" although training restarted at step 0.
#[test]
fn a_suspended_job_shows_only_figures_that_a_checkpoint_keeps() {
    let shown = |checkpoint: Value| {
        let mut world = training(json!({}));
        world.job.spec.checkpoint = serde_json::from_value(checkpoint).unwrap();
        world.summary.as_mut().unwrap().remaining_seconds = Some(10.0);
        world.run();
        let remaining = |world: &World| {
            let status = world.job.status.as_ref().unwrap();
            status.trainer_status.as_ref().map(|figures| (figures.step, figures.estimated_remaining_seconds))
        };
        assert_eq!(remaining(&world), Some((5, Some(10))));
        world.job.spec.suspend = true;
        world.summary = None;
        world.run();
        remaining(&world)
    };
    assert_eq!(shown(Value::Null), None);
    assert_eq!(shown(json!({"path": "/c", "periodSeconds": 60})), Some((5, None)));
}

/// Regression test: the event named the healthy pod that reported the failure.
#[test]
fn a_rank_that_another_pod_reports_is_named_first() {
    let message = |origin: u32| {
        let failure = json!({"rank": 0, "originRank": origin, "cause": "no sign of life for 10.0 s", "during": "", "exitCode": 4});
        let mut world = training(json!({"failurePolicy": {"maxRestarts": 1}}));
        world.exit("a-1-0", 4, &json!({"exitCode": 4, "failure": failure}).to_string());
        world.now += 10;
        let done = world.step();
        assert_eq!(done.events.len(), 1);
        assert!(world.message().ends_with(done.events[0].note.split_once(": ").unwrap().1), "{}", world.message());
        world.message()
    };
    assert_eq!(
        message(1),
        "attempt 2 starts: rank 1 on node n1: no sign of life for 10.0 s (reported by pod a-1-0 on node n0)"
    );
    assert_eq!(message(0), "attempt 2 starts: pod a-1-0 on node n0: rank 0: no sign of life for 10.0 s");
}

#[test]
fn a_job_without_steps_for_too_long_does_not_progress() {
    let mut world = training(json!({}));
    world.progress = Some(at(10));
    world.written = Some(at(10));
    let done = reconcile(&mut world, 60);
    assert_eq!((done.status, done.wake), (None, Some(at(910))), "10 minutes, and 5 until a log is read");
    assert!(reconcile(&mut world, 910).status.is_some());
    let message = "no step has been reported since step 5 at 1970-01-12T13:46:50Z";
    assert_eq!(progressing(&world), expected("False", "NoProgress", message, 910));
    assert_eq!(reconcile(&mut world, 2000).status, None, "once");
    (world.summary, world.progress) = (Some(figures(6, Value::Null)), Some(at(2001)));
    reconcile(&mut world, 2001);
    assert_eq!(progressing(&world), expected("True", "StepsMade", "step 6 of 900", 2001));
}
