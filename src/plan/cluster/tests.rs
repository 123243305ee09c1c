//! Life cycle of a job, from handwritten snapshots.

mod kueue;
mod large;
mod limits;
mod nodes;
mod progress;
mod provisioning;
mod quota;
mod refused;
mod replacement;
mod roles;
mod scheduler;
mod starting;
mod surroundings;
mod tampered;
mod world;

use super::levels::Levels;
use super::view::{Phase, PodView, Waiting};
use super::*;
use crate::objects::Defaults;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use proptest::prelude::*;
use serde_json::json;
use switchyard_crds::DeviceAllocation;
use world::at;

pub(super) use world::World;

#[test]
fn a_decision_writes_the_status_and_nothing_else() {
    let mut world = World::new(2, json!({}));
    let first = world.step();
    assert!(
        first.actions.is_empty() && first.status.is_some(),
        "the attempt is written before its objects are created"
    );
    let second = world.step();
    let kinds: Vec<&str> =
        second.actions.iter().map(|a| if let Action::Create(o) = a { o.kind().name() } else { "-" }).collect();
    assert_eq!(kinds, ["PodDisruptionBudget", "Service", "NetworkPolicy", "Pod", "Pod"]);
    let place = world.step();
    assert!(place.actions.is_empty(), "the placement is written before a gate is lifted");
    assert!(world.pods.iter().all(|pod| pod.gated));
    let lift = world.step();
    assert!(lift.actions.iter().all(|action| matches!(action, Action::Release { .. })) && lift.actions.len() == 2);
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1));
}

#[test]
fn a_gang_waits_as_a_whole_and_names_the_short_resource() {
    let mut world = World::new(2, json!({}));
    world.node("n1", "1");
    world.run();
    assert_eq!(world.stage(), "Queued");
    assert!(world.message().starts_with("1 of 2 needed nodes have room for cpu 2"), "{}", world.message());
    assert!(world.pods.iter().all(|pod| pod.gated), "no pod takes resources");
    world.node("n1", "4");
    world.run();
    assert_eq!(world.stage(), "Running");
}

/// Regression test: the job chose the device plugin, which did not exist either, and waited for it
/// forever.
#[test]
fn a_job_created_before_the_driver_gets_its_gpus_by_claims() {
    let limits = json!({"cpu": "2", "nvidia.com/gpu": 1});
    let trainer = json!({"framework": "Plain", "image": "i", "numNodes": 1, "resourcesPerNode": {"limits": limits}});
    let mut world = World::new(1, json!({"trainer": trainer}));
    world.run();
    let mechanism = |world: &World| world.job.status.as_ref().and_then(|status| status.device_allocation);
    assert_eq!((world.stage(), mechanism(&world)), ("Queued", Some(DeviceAllocation::DevicePlugin)));
    world.nodes.get_mut("n0").unwrap().offered = Some(0b1);
    let decided = world.step();
    assert_eq!((world.attempt(), mechanism(&world)), (2, Some(DeviceAllocation::Claims)));
    assert!(world.message().starts_with("the nodes now provide GPUs by Claims: the pods are recreated; "));
    assert_eq!((decided.actions.len(), decided.events.len()), (0, 1));
    world.run();
    assert!(world.pods.iter().all(|pod| pod.attempt == 2), "{:?}", world.pods);
    // While no node provides GPUs by either mechanism, nothing is recreated.
    world.nodes.get_mut("n0").unwrap().offered = None;
    world.run();
    assert_eq!((world.stage(), world.attempt(), mechanism(&world)), ("Queued", 2, Some(DeviceAllocation::Claims)));
    // If the mechanisms alternate, as with drivers that keep restarting, retries back off.
    let gpu = [(switchyard_crds::names::GPU_RESOURCE.to_string(), Quantity("1".into()))];
    let gpu = crate::resources::of_quantities(&gpu.into());
    for (attempt, pause) in [(3, 10), (4, 20), (5, 40)] {
        let node = world.nodes.get_mut("n0").unwrap();
        let by_plugin = attempt % 2 == 1;
        node.offered = (!by_plugin).then_some(0b1);
        node.allocatable = if by_plugin { node.allocatable.plus(&gpu) } else { node.allocatable.less(&gpu) };
        world.step();
        assert_eq!(world.attempt(), attempt, "{}", world.message());
        assert!(world.message().contains(&format!("the pods are recreated in {pause} s; ")), "{}", world.message());
        assert_eq!(world.step().wake, Some(at(world.now + pause)));
        world.now += pause;
        world.run();
        assert_eq!((world.stage(), world.attempt()), ("Queued", attempt));
    }
}

#[test]
fn a_peer_failure_is_not_the_root_cause() {
    let mut world = World::new(3, json!({"failurePolicy": {"maxRestarts": 1}}));
    world.run();
    world.now = 10;
    world.exit("a-1-0", 4, "");
    let looks = world.plan();
    assert!(looks.status.is_none_or(|status| status.attempt == Some(1)), "wait for the failure that the peer reports");
    world.exit("a-1-2", 7, "disk on fire");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
    world.now = 20;
    world.exit("a-2-1", 7, "disk on fire");
    world.run();
    assert_eq!(world.stage(), "Failed");
    assert!(
        world.message().contains("pod a-2-1 on node n1: exit code 7: disk on fire; 1 of 1 restarts used"),
        "{}",
        world.message()
    );
}

#[test]
fn pauses_between_attempts_grow_and_survive_a_controller_restart() {
    let mut world = World::new(1, json!({"failurePolicy": {"maxRestarts": 9}}));
    world.run();
    let mut pauses = Vec::new();
    for attempt in 1..=6 {
        world.now += 1;
        world.exit(&format!("a-{attempt}-0"), 9, "");
        world.run();
        let not_before = world.job.status.as_ref().unwrap().attempt_time.clone().unwrap().0;
        pauses.push(not_before.duration_since(at(world.now)).as_secs());
        world.now += pauses.last().unwrap();
        world.run();
        assert_eq!(world.stage(), "Running");
    }
    assert_eq!(pauses, [0, 10, 20, 40, 80, 160]);
    world.now += 1000;
    world.exit("a-7-0", 9, "");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 8), "an attempt that lasted needs no pause");
}

/// Found by G5: with a stale cache that did not show that pods had succeeded, the controller
/// deleted them and their logs when the job was complete.
#[test]
fn a_pod_that_may_have_ended_is_deleted_only_in_its_observed_version() {
    let mut world = World::new(2, json!({}));
    world.run();
    world.pods.iter_mut().for_each(|pod| pod.version = Some("7".into()));
    let old = world.pods.clone();
    world.exit("a-1-0", 0, "");
    world.exit("a-1-1", 0, "");
    world.run();
    assert_eq!(world.stage(), "Complete");
    world.pods = old;
    let actions = world.plan().actions;
    let as_seen = |action: &Action| matches!(action, Action::Delete { kind: Kind::Pod, version: Some(version), .. } if version == "7");
    assert!(actions.len() >= 2 && actions.iter().filter(|action| as_seen(action)).count() == 2, "{actions:?}");
}

/// Measured on a real kubelet: a delete between the end of the containers and the final phase
/// created the next attempt a second later, and lost the logs of ranks that had only failed as a
/// consequence.
#[test]
fn a_pod_whose_containers_have_ended_gets_time_to_report_its_phase() {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 1}}));
    for attempt in 1..=2 {
        world.run();
        world.now += 20;
        let (failed, follows) = (format!("a-{attempt}-1"), format!("a-{attempt}-0"));
        world.exit(&failed, 7, "disk on fire");
        let stopped = Some(at(world.now));
        let pod = world.pods.iter_mut().find(|pod| pod.name == follows).unwrap();
        (pod.ready, pod.stopped) = (false, stopped);
        let done = (0..8).map(|_| world.step()).last().unwrap();
        assert!(world.pods.iter().any(|pod| pod.name == follows), "{follows} is deleted");
        assert_eq!(done.wake, stopped.map(|at| at.saturating_add(SignedDuration::from_secs(10)).unwrap()));
        // The wait for a silent kubelet is bounded.
        world.now += 10;
        world.run();
        assert!(world.pods.iter().all(|pod| pod.name != follows), "{follows} was never deleted");
    }
    assert_eq!(world.stage(), "Failed");
}

#[test]
fn setting_the_clock_back_delays_nothing() {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 9}, "activeDeadlineSeconds": 60}));
    world.run();
    world.now -= 3600;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1), "running pods are not affected");
    world.exit("a-1-0", 9, "");
    world.run();
    world.exit("a-2-0", 9, "");
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Restarting", 3), "a pause");
    world.now -= 3600;
    world.run();
    assert_eq!(world.stage(), "Running", "the pause does not become an hour");
    world.exit("a-3-0", 4, "");
    world.now -= 3600;
    world.run();
    assert_eq!(world.attempt(), 4, "neither does the wait for the root cause");
    world.now += 20;
    world.run();
    assert_eq!(world.stage(), "Running");
    let since = at(world.now + 3600);
    world.nodes.get_mut("n0").unwrap().silent_since = Some(since);
    world.step();
    assert_eq!(world.attempt(), 5, "neither does the wait for a lost node");
}

/// Regression test: a job with a limit of an hour that waited for two hours was stopped before it
/// was placed.
#[test]
fn time_in_the_queue_does_not_count_for_the_deadline() {
    let mut world = World::new(1, json!({"activeDeadlineSeconds": 60, "failurePolicy": {"maxRestarts": 9}}));
    world.node("n0", "1");
    world.run();
    world.now = 600;
    world.run();
    assert_eq!(world.stage(), "Queued");
    world.node("n0", "4");
    world.run();
    assert_eq!(world.stage(), "Running");
    assert_eq!(world.plan().wake, Some(at(660)));
    world.now = 630;
    world.exit("a-1-0", 9, "");
    world.run();
    world.now = 659;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2), "time before a restart counts");
    world.now = 660;
    world.run();
    assert_eq!(world.stage(), "Failed");
    assert!(world.message().contains("more than 60 s (spec.activeDeadlineSeconds)"), "{}", world.message());
}

/// A job placed by an earlier controller version has no `placedTime`.
#[test]
fn without_placed_time_the_deadline_counts_from_the_start() {
    let mut world = World::new(1, json!({"activeDeadlineSeconds": 60}));
    world.run();
    world.job.status.as_mut().unwrap().placed_time = None;
    world.now = 60;
    world.run();
    assert_eq!(world.stage(), "Failed");
}

#[test]
fn a_job_never_ends_before_its_start() {
    let mut world = World::new(1, json!({"ttlSecondsAfterFinished": 10}));
    world.run();
    world.now -= 3600;
    world.exit("a-1-0", 0, "");
    world.run();
    let status = world.job.status.clone().unwrap();
    assert_eq!((world.stage(), status.completion_time), ("Complete", status.start_time));
    world.now += 3610;
    assert!(matches!(&world.plan().actions[..], [Action::Delete { kind: Kind::TrainJob, .. }]));
}

#[test]
fn an_attempt_below_that_of_a_pod_is_corrected() {
    let mut world = World::new(1, json!({}));
    world.run();
    world.pods[0].attempt = 5;
    world.job.status.as_mut().unwrap().attempt = Some(2);
    world.step();
    assert_eq!(world.attempt(), 5);
}

/// Regression test: the attempt number overflowed, and the status was rejected every 5 s from then
/// on, under every leader.
#[test]
fn a_job_at_the_last_attempt_number_fails_with_the_reason() {
    let mut world = World::new(1, json!({}));
    world.run();
    world.job.status.as_mut().unwrap().attempt = Some(i32::MAX);
    world.run();
    assert_eq!(world.stage(), "Failed");
    assert!(
        world.message().starts_with("status.attempt: got 2147483647; expected less than 99999"),
        "{}",
        world.message()
    );
    // At 100,000, the longest pod name would exceed the limit of a host name.
    let mut longest = World::new(1, json!({})).job;
    longest.metadata.name = Some("a".repeat(50));
    let valid = validate(&longest).unwrap();
    let name = valid.pod_name(LAST_ATTEMPT, switchyard_crds::MAX_NODES as u32 - 1);
    assert!(name.len() <= 63 && ownership::position(&name).is_some(), "{name}");
    assert_eq!(ownership::position("a-100000-0"), None);
}

#[test]
fn an_invalid_image_name_is_not_retried() {
    let mut world = World::new(1, json!({"failurePolicy": {"maxRestarts": 9}}));
    world.run();
    world.pods[0].phase = Phase::Pending;
    world.pods[0].waiting =
        Some(Waiting { container: "trainer".into(), reason: "InvalidImageName".into(), message: "no".into() });
    world.run();
    let failed = world.job.status.as_ref().unwrap().condition(conditions::FAILED).unwrap().clone();
    assert_eq!(failed.reason, conditions::PERMANENT_FAILURE);
    assert!(failed.message.contains("set spec.trainer.image to"), "{}", failed.message);
}

#[test]
fn figures_are_written_every_ten_seconds_and_stages_at_once() {
    let mut world = World::new(2, json!({}));
    world.run();
    world.pods[0].ready = false;
    let pods: Vec<&PodView> = world.pods.iter().collect();
    let defaults = Defaults { worker_image: "worker:1".into(), ..Defaults::default() };
    let levels = Levels::default();
    let mut snapshot = JobSnapshot {
        job: &world.job,
        pods: &pods,
        objects: &world.objects,
        nodes: &world.nodes,
        missing: &BTreeMap::new(),
        rules: PlacementRules { defaults: &defaults, levels: &levels, now: at(3) },
        actual: &BTreeMap::new(),
        ahead: None,
        unlabelled: &BTreeMap::new(),
        cooldown_until: None,
        forecast: None,
        queue_length: 1,
        preempted_by: None,
        write_error: None,
        summary: None,
        log_observations: &world.log_observations,
        status_written: Some(at(0)),
        avoided_nodes: &BTreeMap::new(),
        quota_recipient: None,
        avoidance_ends: None,
        restricted: false,
        provisioning_class: None,
        silence: Silence {
            grace: SignedDuration::from_secs(60),
            mass_outage: None,
            outage_ended: None,
            progress: None,
            progress_unread: false,
        },
        scheduler_is_known: true,
        longest_schedule_timeout: SignedDuration::from_mins(10),
    };
    let waits = plan(&snapshot);
    assert_eq!((waits.status, waits.wake), (None, Some(at(10))));
    snapshot.rules.now = at(10);
    assert!(plan(&snapshot).status.is_some());
    snapshot.rules.now = at(-3600);
    assert!(plan(&snapshot).status.is_some(), "setting the clock back does not stop status writes");
    snapshot.rules.now = at(3);
    let mut held = world.job.clone();
    held.spec.suspend = true;
    snapshot.job = &held;
    let suspended = plan(&snapshot).status;
    assert!(suspended.as_ref().is_some_and(|status| status.nodes.as_ref().is_some_and(|nodes| nodes.active > 0)));
    let held = TrainJob { status: suspended, ..held.clone() };
    snapshot.job = &held;
    snapshot.pods = &[];
    snapshot.rules.now = at(4);
    let freed = plan(&snapshot).status;
    assert!(
        freed.is_some_and(|status| status.nodes.is_some_and(|nodes| nodes.active == 0)),
        "free resources are reported"
    );
}

/// Regression test: 500 queued jobs wrote their status with every pod exit in the cluster.
#[test]
fn waiting_messages_are_written_once_a_minute_per_job_and_once_a_second_in_total() {
    let mut world = World::new(2, json!({}));
    world.node("n1", "1");
    world.run();
    assert_eq!(world.stage(), "Queued");
    world.written = Some(at(0));
    world.node("n1", "1500m");
    world.now = 59;
    let waits = world.plan();
    assert_eq!((waits.status.is_none(), waits.wake), (true, Some(at(60))), "only the message changes");
    world.now = 60;
    assert!(world.plan().status.is_some());
    world.queue_length = 500;
    assert_eq!(world.plan().wake, Some(at(500)), "queued jobs together write once a second");
    world.now = 500;
    assert!(world.plan().status.is_some());
    world.now = 5;
    world.node("n1", "4");
    assert!(world.plan().status.is_some_and(|status| status.is(conditions::PLACED)), "a placement is written at once");
}

#[test]
fn a_decision_based_on_an_absent_pod_names_it() {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 3}}));
    world.run();
    world.pods.pop();
    let decision = world.plan();
    assert_eq!(
        (decision.premise, decision.status.map(|s| s.attempt)),
        (Some(Premise::Absent("a-1-1".into())), Some(Some(2)))
    );
    world.run();
    world.exit("a-2-0", 9, "");
    let decision = world.plan();
    assert_eq!((decision.premise, decision.status.map(|s| s.attempt)), (None, Some(Some(3))));
}

/// Events that may happen to a job's pods.
#[derive(Debug, Clone)]
enum Incident {
    Exit(usize, i32),
    Vanish(usize),
    LoseNode(usize),
    Suspend(bool),
    Later(i64),
    Step,
}

fn incident() -> impl Strategy<Value = Incident> {
    prop_oneof![
        (0_usize..4, prop_oneof![Just(0), Just(3), Just(4), Just(9), Just(137)])
            .prop_map(|(pod, code)| Incident::Exit(pod, code)),
        (0_usize..4).prop_map(Incident::Vanish),
        (0_usize..4).prop_map(Incident::LoseNode),
        any::<bool>().prop_map(Incident::Suspend),
        (1_i64..400).prop_map(Incident::Later),
        // Clock corrections.
        prop_oneof![Just(-3600), Just(3600)].prop_map(Incident::Later),
        Just(Incident::Step),
        Just(Incident::Step),
        Just(Incident::Step),
    ]
}

proptest! {
    // Each case is a whole life cycle.
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// End states are final, attempts and counters never decrease, and a decision comes without
    /// actions.
    #[test]
    fn any_sequence_of_incidents(nodes in 1_u32..4, restarts in 0_i32..3, incidents in prop::collection::vec(incident(), 0..60)) {
        let mut world = World::new(nodes, json!({"failurePolicy": {"maxRestarts": restarts, "maxInfrastructureRestarts": 2}}));
        let mut before = (0, 0);
        for incident in incidents {
            match incident {
                Incident::Exit(pod, code) if pod < world.pods.len() && !world.pods[pod].is_over() && !world.pods[pod].gated => {
                    let name = world.pods[pod].name.clone();
                    world.exit(&name, code, "");
                }
                Incident::Vanish(pod) if pod < world.pods.len() => drop(world.pods.remove(pod)),
                Incident::LoseNode(node) => {
                    let lost = at(world.now);
                    if let Some(node) = world.nodes.get_mut(&format!("n{node}")) {
                        (node.silent_since, node.facts.ready) = (Some(lost), false);
                    }
                }
                Incident::Suspend(suspend) => world.job.spec.suspend = suspend,
                Incident::Later(seconds) => world.now += seconds,
                _ => {}
            }
            let was_over = is_over(&world.job);
            let old = world.job.status.clone();
            let done = world.step();
            if was_over {
                let makes = |a: &Action| matches!(a, Action::Create(_) | Action::Repair(_) | Action::Release { .. });
                prop_assert!(!done.actions.iter().any(makes), "created after the end");
                prop_assert_eq!(&world.job.status, &old);
            }
            if let Some(status) = &done.status {
                let now = (status.attempt.unwrap_or(0), status.restarts.as_ref().map_or(0, |restarts| restarts.total));
                prop_assert!(now >= before, "{now:?} after {before:?}");
                let ended = status.completion_time.as_ref().map(|time| time.0);
                prop_assert!(ended.is_none_or(|ended| ended >= status.start_time.as_ref().unwrap().0), "ends before its start");
                let decided = old.as_ref().and_then(|old| old.attempt) != status.attempt;
                prop_assert!(!decided || done.actions.is_empty(), "a new attempt together with actions");
                before = now;
            }
            let ready = world.pods.iter().filter(|pod| !pod.gated).map(|pod| pod.attempt).collect::<std::collections::BTreeSet<_>>();
            prop_assert!(ready.len() <= 2, "pods of more than the last two attempts: {ready:?}");
        }
    }
}
