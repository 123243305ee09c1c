//! Pods that cannot start, or of which nobody says why they do not.

use super::world::at;
use super::*;
use crate::cluster::hindrance::{progress, warning};
use crate::cluster::view::Progress;
use k8s_openapi::api::events::v1::Event;

/// A gang of one pod that is on its node and has not started, with spare nodes.
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

fn says(container: &str, reason: &str) -> Waiting {
    Waiting { container: container.into(), reason: reason.into(), message: "no".into() }
}

/// A name for the message, a change of the pod, and when another attempt begins; `None`: never.
type Case = (&'static str, fn(&mut PodView), Option<i64>);

/// 63 nodes held idle GPUs for days because the driver on the 64th could not prepare a claim.
#[test]
fn a_pod_that_does_not_start_is_waited_for_without_end_only_for_reasons_that_are_known_to_pass() {
    let cases: [Case; 11] = [
        ("no event at all", |pod| pod.progress = since(None, false), Some(600)),
        ("a kubelet that does not take the pod", |pod| (pod.started, pod.bound) = (None, Some(at(50))), Some(650)),
        ("a container was made at 100 s", |pod| pod.progress = since(Some(100), false), Some(700)),
        ("an image is pulled", |pod| pod.progress = since(Some(1), true), None),
        ("an init container runs", |pod| (pod.initializes, pod.progress) = (true, since(Some(1), false)), None),
        ("events cannot be read", |_| {}, None),
        (
            "a claim cannot be prepared",
            |pod| (pod.warning, pod.progress) = (Some(says("", "FailedPrepareDynamicResources")), since(None, false)),
            Some(600),
        ),
        (
            "words of a device plugin, after progress",
            |pod| (pod.warning, pod.progress) = (Some(says("", "MyOwnWords")), since(Some(30), false)),
            Some(630),
        ),
        (
            "too many name servers, while an image is pulled",
            |pod| (pod.warning, pod.progress) = (Some(says("", "DNSConfigForming")), since(Some(1), true)),
            None,
        ),
        ("a sidecar that ends again and again", |pod| pod.waiting = Some(says("proxy", "CrashLoopBackOff")), Some(600)),
        ("a network that cannot be made", |pod| pod.warning = Some(says("", "FailedCreatePodSandBox")), Some(300)),
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
    let says = "pod a-1-0 on node n0: it has not started, and its kubelet has reported nothing of it for 10 minutes";
    assert!(world.message().contains(says), "{}", world.message());
}

/// With a controller's clock that is an hour ahead, each new pod counted as stuck at once.
#[test]
fn a_clock_that_is_an_hour_off_makes_no_pod_stuck() {
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

#[test]
fn a_running_init_container_is_seen() {
    let container = |state: serde_json::Value| json!({"name": "load", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
    let view = |state: serde_json::Value| {
        let condition = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": at(3)});
        let status =
            json!({"phase": "Pending", "initContainerStatuses": [container(state)], "conditions": [condition]});
        let pod = json!({"metadata": {"name": "a-1-0"}, "spec": {"containers": []}, "status": status});
        let view = PodView::of(&serde_json::from_value(pod).unwrap());
        (view.initializes, view.bound)
    };
    assert_eq!(view(json!({"running": {"startedAt": at(4)}})), (true, Some(at(3))));
    assert_eq!(view(json!({"waiting": {"reason": "PodInitializing"}})), (false, Some(at(3))));
}

/// Its scheduler says nothing of such a pod: the gang held its nodes for up to a day, and again after 10 s.
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
    assert!(!world.job.status.as_ref().unwrap().is(conditions::PLACED) && world.plan().waits.is_none());
    read(&mut world, &[]);
    world.run();
    assert_eq!(world.stage(), "Running");
}
