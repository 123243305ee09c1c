//! Pods that cannot start, or that do not start without a reported reason.

use super::world::at;
use super::*;
use crate::cluster::blocker::{progress, warning};
use crate::cluster::containers::{InitContainer, InitState};
use crate::cluster::view::Progress;
use k8s_openapi::api::events::v1::Event;

/// A gang of one pod that is bound and has not started, with spare nodes.
fn bound(change: impl Fn(&mut PodView)) -> World {
    let mut world = World::new(1, json!({}));
    world.node("n1", "4");
    world.run();
    let pod = &mut world.pods[0];
    (pod.phase, pod.ready, pod.started, pod.bound) = (Phase::Pending, false, Some(at(0)), Some(at(0)));
    change(pod);
    world
}

fn since(second: Option<i64>, is_pulling: bool) -> Option<Progress> {
    Some(Progress { at: second.map(at), is_pulling })
}

fn waiting(container: &str, reason: &str) -> Waiting {
    Waiting { container: container.into(), reason: reason.into(), message: "no".into() }
}

fn loads(state: InitState) -> InitContainer {
    InitContainer { name: "load".into(), position: (1, 2), state }
}

/// Label for assertion messages, change of the pod, and when another attempt starts (`None` if
/// never).
type Case = (&'static str, fn(&mut PodView), Option<i64>);

/// Regression test: 63 nodes held idle GPUs for days because the driver on the 64th could not
/// prepare a claim.
#[test]
fn only_known_temporary_reasons_let_a_pod_wait_without_limit() {
    let cases: [Case; 11] = [
        ("no event at all", |pod| pod.progress = since(None, false), Some(600)),
        ("a kubelet that does not take the pod", |pod| (pod.started, pod.bound) = (None, Some(at(50))), Some(650)),
        ("a container was made at 100 s", |pod| pod.progress = since(Some(100), false), Some(700)),
        ("an image is pulled", |pod| pod.progress = since(Some(1), true), None),
        (
            "an init container runs",
            |pod| (pod.init, pod.progress) = (Some(loads(InitState::Running { since: None })), since(Some(1), false)),
            None,
        ),
        ("events cannot be read", |_| {}, None),
        (
            "a claim cannot be prepared",
            |pod| {
                (pod.warning, pod.progress) = (Some(waiting("", "FailedPrepareDynamicResources")), since(None, false))
            },
            Some(600),
        ),
        (
            "words of a device plugin, after progress",
            |pod| (pod.warning, pod.progress) = (Some(waiting("", "MyOwnWords")), since(Some(30), false)),
            Some(630),
        ),
        (
            "too many name servers, while an image is pulled",
            |pod| (pod.warning, pod.progress) = (Some(waiting("", "DNSConfigForming")), since(Some(1), true)),
            None,
        ),
        (
            "a sidecar that ends again and again",
            |pod| pod.waiting = Some(waiting("proxy", "CrashLoopBackOff")),
            Some(600),
        ),
        ("a network that cannot be made", |pod| pod.warning = Some(waiting("", "FailedCreatePodSandBox")), Some(300)),
    ];
    for (name, change, end) in cases {
        let mut world = bound(change);
        let last = end.map_or(1_000_000, |end| end - 1);
        world.now = last;
        world.run();
        assert_eq!(world.attempt(), 1, "{name}: {}", world.message());
        if let Some(end) = end {
            world.now = end;
            world.step();
            assert_eq!(world.attempt(), 2, "{name}: {}", world.message());
            let restarts = world.job.status.as_ref().unwrap().restarts.as_ref().unwrap();
            assert_eq!((restarts.infrastructure, restarts.application), (1, 0), "{name}");
            let failures = &world.job.status.as_ref().unwrap().node_failures;
            assert_eq!(!failures.is_empty(), world.pods[0].waiting.is_none(), "{name}: {failures:?}");
        }
    }
    let mut world = bound(|pod| pod.progress = since(None, false));
    world.now = 600;
    world.step();
    let says = "pod a-1-0 on node n0: it has not started, and its kubelet has reported nothing about it for 10 minutes";
    assert!(world.message().contains(says), "{}", world.message());
}

/// Regression test: with the controller's clock an hour ahead, each new pod counted as stuck at
/// once.
#[test]
fn a_clock_that_is_an_hour_off_does_not_make_a_pod_stuck() {
    for kubelet in [-3600, 3600] {
        let time = Some(at(kubelet));
        let mut world = bound(|pod| (pod.started, pod.bound, pod.progress) = (time, time, since(None, false)));
        world.now = 599;
        world.run();
        assert_eq!(world.attempt(), 1, "{kubelet}: {}", world.message());
    }
}

#[test]
fn the_progress_of_a_pod_is_read_from_its_events() {
    let event = |kind: &str, reason: &str, second: i64| -> Event {
        let event = json!({"metadata": {"name": "e"}, "eventTime": null, "type": kind, "reason": reason, "note": "no",
            "deprecatedLastTimestamp": at(second)});
        serde_json::from_value(event).unwrap()
    };
    let scheduled = event("Normal", "Scheduled", 0);
    let pulling = event("Normal", "Pulling", 5);
    let pulled = event("Normal", "Pulled", 5);
    let warned = event("Warning", "DNSConfigForming", 9);
    let read = |events: &[&Event]| Some(progress(&events.iter().map(|event| (*event).clone()).collect::<Vec<_>>()));
    assert_eq!(read(&[&scheduled]), since(None, false));
    assert_eq!(read(&[&scheduled, &pulling, &warned]), since(Some(5), true), "a warning does not end a pull");
    assert_eq!(read(&[&pulling, &pulled]), since(Some(5), false));
    assert!(warning(&[pulling, warned]).is_some());
}

/// A pod as its kubelet reports it, with container states by name.
fn reported(phase: &str, init: serde_json::Value, others: serde_json::Value) -> PodView {
    let statuses = |states: &serde_json::Value| -> Vec<serde_json::Value> {
        let states = states.as_object().unwrap();
        let status = |(name, state): (&String, &serde_json::Value)| {
            let is_running = state["state"].get("running").is_some();
            let mut status = json!({"name": name, "image": "", "imageID": "", "ready": is_running, "restartCount": 0});
            status.as_object_mut().unwrap().extend(state.as_object().unwrap().clone());
            status
        };
        states.iter().map(status).collect()
    };
    let native = json!([{"name": "load"}, {"name": "mesh", "restartPolicy": "Always"}]);
    let spec = json!({"containers": [{"name": "trainer"}], "initContainers": native});
    let bound = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": at(3)});
    let status = json!({"phase": phase, "conditions": [bound],
        "initContainerStatuses": statuses(&init), "containerStatuses": statuses(&others)});
    let pod = json!({"metadata": {"name": "a-1-0"}, "spec": spec, "status": status});
    PodView::of(&serde_json::from_value(pod).unwrap())
}

/// Regression test: the status said "0 of 2 pods run" for as long as it ran, and `logs` said
/// "PodInitializing".
#[test]
fn a_running_init_container_is_named_with_its_start() {
    let waits = json!({"state": {"waiting": {"reason": "PodInitializing"}}});
    let runs = json!({"state": {"running": {"startedAt": at(4)}}});
    let view = |init: &serde_json::Value| reported("Pending", json!({"load": init}), json!({"trainer": waits}));
    let loads = view(&runs);
    assert_eq!(loads.bound, Some(at(3)));
    assert_eq!(loads.logs(), Some("load"));
    assert_eq!((view(&waits).init, view(&waits).logs()), (None, None));
    let world = |init: Option<InitContainer>| {
        let mut world = bound(|_| {});
        world.pods[0].init = init;
        let summary =
            world.job.status.as_mut().unwrap().conditions.iter_mut().find(|c| c.type_ == conditions::SUCCEEDED);
        summary.unwrap().reason = "Starting".into();
        world.run();
        world.message()
    };
    let since = format!("0 of 1 pods run; pod a-1-0 on node n0: init container load has been running since {}", at(4));
    assert_eq!(world(loads.init), since);
    assert_eq!(world(None), "0 of 1 pods run");
    // A native sidecar runs as long as the trainer.
    assert_eq!(reported("Pending", json!({"mesh": runs}), json!({"trainer": waits})).init, None);
}

/// Regression test: five attempts were made, as if the node were at fault, and nothing named the
/// container.
#[test]
fn a_failed_init_container_is_named_and_counts_as_the_applications_failure() {
    let failed = |code: i32, reason: &str| {
        let state = json!({"terminated": {"exitCode": code, "reason": reason, "message": "begins\nno such bucket\n", "finishedAt": at(5)}});
        let waits = json!({"state": {"waiting": {"reason": "PodInitializing"}}});
        reported("Failed", json!({"load": {"state": state}}), json!({"trainer": waits}))
    };
    assert_eq!(failed(3, "Error").logs(), Some("load"));
    let world = |spec: serde_json::Value, end: PodView| {
        let mut world = World::new(1, spec);
        world.run();
        (world.pods[0].phase, world.pods[0].ready, world.pods[0].init) = (end.phase, false, end.init);
        world.run();
        let restarts = world.job.status.as_ref().unwrap().restarts.clone().unwrap_or_default();
        (world.message(), world.stage().to_owned(), (restarts.application, restarts.infrastructure))
    };
    let once = json!({"failurePolicy": {"maxRestarts": 0}});
    let (message, stage, _) = world(once, failed(3, "Error"));
    assert!(
        message.starts_with("pod a-1-0 on node n0: init container load failed with exit code 3: no such bucket; "),
        "{message}"
    );
    assert_eq!(stage, "Failed");
    let more = json!({"failurePolicy": {"maxRestarts": 2}});
    assert_eq!(world(more.clone(), failed(3, "Error")).2, (1, 0));
    assert_eq!(world(more, failed(137, "OOMKilled")).2, (0, 1), "as for the trainer");
    let rule =
        json!({"action": "RestartTrainJobAndIgnoreMaxRestarts", "onExitCodes": {"operator": "In", "values": [3]}});
    let by_rule = json!({"failurePolicy": {"maxRestarts": 0, "rules": [rule]}});
    let (message, stage, _) = world(by_rule, failed(3, "Error"));
    assert_eq!(stage, "Running", "a rule about its exit code counts: {message}");
}

/// Regression test: the pods were shown as not ready, and nothing named the container.
#[test]
fn a_sidecar_that_ended_is_named_and_the_trainer_counts_as_ready() {
    let runs = json!({"state": {"running": {"startedAt": at(4)}}});
    let ended = json!({"state": {"terminated": {"exitCode": 1}}});
    let again =
        json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 2}}});
    let details = |init: serde_json::Value, others: serde_json::Value| {
        let view = reported("Running", init, others);
        let mut world = World::new(2, json!({}));
        world.run();
        world.pods.iter_mut().for_each(|pod| (pod.sidecars, pod.ready) = (view.sidecars.clone(), view.ready));
        world.run();
        (world.message(), world.job.status.as_ref().unwrap().ready.clone().unwrap())
    };
    let (message, ready) = details(json!({}), json!({"trainer": runs, "shipper": ended}));
    assert_eq!(
        (message.as_str(), ready.as_str()),
        ("2 of 2 nodes train; sidecar shipper of pod a-1-0 ended with exit code 1, and 1 more sidecar", "2/2")
    );
    let (message, _) = details(json!({"mesh": again}), json!({"trainer": runs}));
    assert!(message.contains("sidecar mesh of pod a-1-0 ended with exit code 2 (CrashLoopBackOff)"), "{message}");
    assert_eq!(reported("Running", json!({"mesh": runs}), json!({"trainer": runs})).sidecars, []);
}

/// Regression test: the scheduler does not report on this pod. The gang held its nodes for up to a
/// day, and again after 10 s.
#[test]
fn a_gang_whose_pods_name_a_claim_that_does_not_exist_waits_without_nodes() {
    let claims = json!([{"name": "x", "resourceClaimName": "nope"}]);
    let mut world = World::new(1, json!({"template": {"spec": {"resourceClaims": claims}}}));
    world.run();
    assert_eq!(world.stage(), "Placing", "nothing is decided before it is read");
    let read = |world: &mut World, absent: &[&str]| {
        let rules = std::sync::Arc::make_mut(world.pods[0].rules.as_mut().unwrap());
        (rules.reach, rules.absent) = (Some(Vec::new()), absent.iter().map(ToString::to_string).collect());
    };
    let absent = "ResourceClaim nope does not exist: create it in the job's namespace, or correct its name in \
                  spec.template.spec.resourceClaims";
    read(&mut world, &[absent]);
    world.run();
    assert_eq!((world.stage(), world.message().as_str()), ("Queued", absent));
    assert!(!world.job.status.as_ref().unwrap().is(conditions::PLACED) && world.plan().wait_reason.is_none());
    read(&mut world, &[]);
    world.run();
    assert_eq!(world.stage(), "Running");
}
