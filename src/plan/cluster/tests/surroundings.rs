//! What others do to a job: nodes that go silent, names that are taken, images that cannot start, sidecars.

use super::world::at;
use super::*;
use crate::cluster::hindrance::Trouble;
use crate::cluster::view::{Phase, Waiting};
use crate::eligible::Reach;

/// Nodes that the job remembers, and for what.
fn failures(world: &World) -> Vec<String> {
    let known = world.job.status.iter().flat_map(|status| &status.node_failures);
    let mut known: Vec<String> = known.map(|failure| format!("{} {}", failure.node_name, failure.reason)).collect();
    known.sort_unstable();
    known
}

/// Seen on real nodes: a kubelet that was stopped for half a minute had its job start from step 0, and a network rollout every job.
#[test]
fn a_node_that_is_not_ready_is_not_lost_and_one_that_is_silent_not_at_once() {
    let ready = |status: &str| {
        let condition = json!({"type": "Ready", "status": status, "lastTransitionTime": at(0).to_string()});
        NodeView::of(
            &serde_json::from_value(json!({"metadata": {"name": "n0"}, "status": {"conditions": [condition]}}))
                .unwrap(),
        )
    };
    let becomes = |world: &mut World, status: &str| {
        let next = ready(status);
        let node = world.nodes.get_mut("n0").unwrap();
        (node.facts.ready, node.silent_since) = (next.facts.ready, next.silent_since);
    };
    let mut world = World::new(2, json!({}));
    world.run();
    becomes(&mut world, "False");
    world.now = 3600;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1), "its containers go on");
    becomes(&mut world, "Unknown");
    world.now = 59;
    let waits = world.step();
    assert_eq!((world.attempt(), waits.wake), (1, Some(at(60))));
    assert!(world.message().contains("node n0 does not report since"), "{}", world.message());
    world.progress = Some(at(50));
    world.now = 100;
    assert_eq!(world.step().wake, Some(at(110)), "the ranks there must have sent something at 50 s");
    assert!(world.message().contains("the ranks make progress"), "{}", world.message());
    world.brake = Some("5 of 20 nodes stopped reporting within a minute".into());
    world.now = 3600;
    world.run();
    assert_eq!(world.attempt(), 1);
    assert!(world.message().contains("5 of 20 nodes stopped reporting"), "{}", world.message());
    world.nodes.get_mut("n0").unwrap().out_of_service = true;
    world.step();
    assert_eq!(world.attempt(), 2, "an administrator says so");
    assert!(world.message().contains("took it out of service"), "{}", world.message());
}

/// An eviction after 300 s ended the attempt, past the brake and the progress of the ranks.
#[test]
fn a_pod_that_is_evicted_from_a_silent_node_is_judged_by_the_silence() {
    let mut world = World::new(2, json!({}));
    world.run();
    let silent =
        |world: &mut World, since: Option<i64>| world.nodes.get_mut("n0").unwrap().silent_since = since.map(at);
    silent(&mut world, Some(0));
    world.pods[0].deleting = true;
    world.pods[0].disruption =
        Some(("DeletionByTaintManager".into(), "Taint manager: deleting due to NoExecute taint".into()));
    (world.now, world.progress) = (350, Some(at(340)));
    assert_eq!((world.step().wake, world.attempt()), (Some(at(400)), 1), "the ranks make progress");
    (world.now, world.progress, world.brake) = (3600, None, Some("5 of 20 nodes stopped reporting".into()));
    world.step();
    assert_eq!(world.attempt(), 1, "{}", world.message());
    world.brake = None;
    let mut reports_again =
        World { job: world.job.clone(), pods: world.pods.clone(), now: 3600, ..World::new(2, json!({})) };
    world.step();
    assert_eq!(world.attempt(), 2);
    assert!(world.message().contains("the node is lost"), "{}", world.message());
    silent(&mut reports_again, None);
    reports_again.step();
    assert_eq!(reports_again.attempt(), 2, "its kubelet ends it now");
    assert!(reports_again.message().contains("DeletionByTaintManager"), "{}", reports_again.message());
}

#[test]
fn a_node_that_is_silent_for_its_grace_is_lost() {
    let mut world = World::new(3, json!({}));
    world.node("n3", "4");
    world.run();
    let node = world.nodes.get_mut("n1").unwrap();
    (node.facts.ready, node.silent_since) = (false, Some(at(0)));
    world.now = 60;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 2));
    let used: Vec<Option<&str>> = world.pods.iter().map(|pod| pod.node.as_deref()).collect();
    assert!(!used.contains(&Some("n1")), "{used:?}");
}

/// `kubectl delete node` and a restart of the kubelet renew the labels of a node: its jobs were started again in the same second.
#[test]
fn a_node_that_is_registered_again_within_40_s_ends_nothing_and_the_server_is_asked_before_one_is_given_up() {
    let mut world = World::new(2, json!({}));
    world.run();
    let node = world.nodes.remove("n1").unwrap();
    let none = world.step();
    assert_eq!((world.attempt(), none.wake), (1, Some(at(40))), "nobody has noted yet that it is missing");
    world.missing.insert("n1".into(), at(0));
    world.now = 39;
    assert_eq!((world.step().wake, world.attempt()), (Some(at(40)), 1));
    assert!(world.message().contains("node n1 has not been registered since"), "{}", world.message());
    let mut stays_away = World { job: world.job.clone(), pods: world.pods.clone(), ..World::new(2, json!({})) };
    world.nodes.insert("n1".into(), node);
    world.now = 50;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1));
    assert!(!world.message().contains("n1"), "{}", world.message());
    stays_away.nodes.remove("n1");
    stays_away.missing.insert("n1".into(), at(0));
    stays_away.now = 40;
    let gone = stays_away.step();
    assert_eq!((stays_away.attempt(), gone.premise), (2, Some(Premise::NodeGone("n1".into()))));
    let mut silent = World::new(1, json!({}));
    silent.run();
    (silent.nodes.get_mut("n0").unwrap().silent_since, silent.now) = (Some(at(0)), 60);
    let lost = silent.step();
    assert_eq!((silent.attempt(), lost.premise), (2, Some(Premise::NodeSilent("n0".into()))), "a watch may be late");
}

/// Only the first was named, and the next attempts would have met the others one by one.
#[test]
fn all_nodes_that_are_lost_together_are_named_and_remembered() {
    let mut world = World::new(6, json!({}));
    world.run();
    for node in ["n1", "n2", "n4", "n5", "n0"] {
        world.nodes.get_mut(node).unwrap().silent_since = Some(at(0));
    }
    world.nodes.remove("n4");
    world.missing.insert("n4".into(), at(20));
    world.now = 60;
    world.step();
    let remembered = failures(&world);
    let expected = ["n0 NodeLost", "n1 NodeLost", "n2 NodeLost", "n4 NodeGone", "n5 NodeLost"];
    assert_eq!(remembered, expected);
    let lost = "the node is lost: it does not report to the cluster";
    let says = format!(
        "pod a-1-0 on node n0: {lost}; node n1: {lost}; node n2: {lost}; node n4: the node is gone; and 1 more node"
    );
    assert!(world.message().ends_with(&says), "{}", world.message());
}

/// Ten attempts within minutes went to the node that refused the pod, while others were free.
#[test]
fn a_node_that_refuses_a_pod_is_left_and_is_the_last_resort_afterwards() {
    let refuse = |world: &mut World, node: &str| {
        let pod = world.pods.iter_mut().filter(|pod| pod.node.as_deref() == Some(node)).next_back().unwrap();
        let message =
            "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu";
        (pod.phase, pod.ready, pod.reason) =
            (Phase::Failed, false, Some(("UnexpectedAdmissionError".into(), message.into())));
    };
    let used = |world: &World| {
        let placement = world.job.status.as_ref().unwrap().placement.clone().unwrap();
        let mut used: Vec<String> = placement.nodes.into_iter().map(|node| node.node_name).collect();
        used.sort_unstable();
        used
    };
    let mut world = World::new(2, json!({}));
    world.node("n2", "4");
    world.run();
    refuse(&mut world, "n0");
    world.run();
    assert_eq!(
        (world.stage(), world.attempt(), used(&world)),
        ("Running", 2, vec!["n1".to_string(), "n2".to_string()])
    );
    assert_eq!(failures(&world), ["n0 UnexpectedAdmissionError"]);
    let reason = world.job.status.as_ref().unwrap().placement.as_ref().unwrap().reason.clone();
    let why =
        "1 node is not asked: n0 (a pod of this job could not start there: UnexpectedAdmissionError: Allocate failed";
    assert!(reason.contains(why), "{reason}");
    // The other nodes are not enough: it waits, says why, and asks again later.
    world.now = 30;
    refuse(&mut world, "n2");
    (0..9).for_each(|_| drop(world.step()));
    world.now = 40;
    world.run();
    assert_eq!((world.stage(), world.attempt()), ("Queued", 3));
    assert!(world.message().contains("could not start there: UnexpectedAdmissionError"), "{}", world.message());
    assert_eq!(world.plan().wake, Some(at(60)));
    world.now = 60;
    world.run();
    assert_eq!((world.stage(), used(&world)), ("Running", vec!["n0".to_string(), "n1".to_string()]));
    // Once it may be used again, it is the last choice.
    let mut world = World::new(1, json!({"failurePolicy": {"maxRestarts": 1}}));
    world.node("n1", "9");
    world.run();
    refuse(&mut world, "n0");
    world.run();
    world.now = 600;
    world.exit("a-2-0", 9, "");
    world.nodes.get_mut("n1").unwrap().facts.ready = false;
    world.run();
    assert_eq!((world.stage(), used(&world)), ("Running", vec!["n0".to_string()]));
}

/// A claim of the right name that is somebody else's was taken for ours, and the pods waited for it for ever.
#[test]
fn a_claim_of_somebody_else_is_told_and_no_gate_is_lifted() {
    let mut world = World::new(1, json!({}));
    (0..3).for_each(|_| drop(world.step()));
    assert!(world.job.status.as_ref().unwrap().is(conditions::PLACED));
    world.job.status.as_mut().unwrap().device_allocation = Some(DeviceAllocation::Claims);
    let theirs = ObjectView { uid: "theirs".into(), owned: false, deleting: false, content: json!({}) };
    world.objects.insert((Kind::ResourceClaim, "a-1-0".into()), theirs);
    world.run();
    assert!(
        world.message().contains("ResourceClaim a-1-0 exists and does not belong to this job"),
        "{}",
        world.message()
    );
    assert!(world.pods.iter().all(|pod| pod.gated));
    world.objects.remove(&(Kind::ResourceClaim, "a-1-0".to_string()));
    world.run();
    assert_eq!(world.stage(), "Running");
}

/// Seen on real nodes: 301 s for each of 11 attempts.
#[test]
fn an_image_that_must_not_run_is_not_tried_again() {
    for (message, is_permanent) in [
        ("container has runAsNonRoot and image will run as root", true),
        ("container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root", true),
        ("container's runAsUser breaks non-root policy", true),
        ("configmap \"texxt\" not found", false),
    ] {
        let mut world = World::new(1, json!({}));
        world.run();
        world.pods[0].phase = Phase::Pending;
        let reason = "CreateContainerConfigError".into();
        world.pods[0].waiting = Some(Waiting { container: "trainer".into(), reason, message: message.into() });
        world.pods[0].started = Some(at(0));
        world.run();
        assert_eq!(world.stage() == "Failed", is_permanent, "{message}: {}", world.message());
        assert!(!is_permanent || world.message().contains("spec.template.spec.securityContext.runAsUser"));
    }
}

/// While an init container cannot start, the trainer says no more than that the pod is initialized.
#[test]
fn the_container_that_keeps_the_trainer_from_starting_is_told() {
    let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "m"}});
    let of = |trainer: serde_json::Value, init: serde_json::Value| {
        let pod = json!({"metadata": {"name": "a-1-0"}, "status": {
            "containerStatuses": [
                {"name": "side", "state": waiting("PodInitializing"), "image": "", "imageID": "", "ready": false, "restartCount": 0},
                {"name": "trainer", "state": trainer, "image": "", "imageID": "", "ready": false, "restartCount": 0},
            ],
            "initContainerStatuses": [{"name": "init", "state": init, "image": "", "imageID": "", "ready": false, "restartCount": 0}],
        }});
        PodView::of(&serde_json::from_value(pod).unwrap()).waiting.map(|waiting| (waiting.container, waiting.reason))
    };
    let told = |container: &str, reason: &str| Some((container.to_string(), reason.to_string()));
    assert_eq!(of(waiting("PodInitializing"), waiting("ErrImagePull")), told("init", "ErrImagePull"));
    assert_eq!(of(waiting("PodInitializing"), json!({"running": {}})), told("trainer", "PodInitializing"));
    assert_eq!(of(waiting("InvalidImageName"), waiting("ErrImagePull")), told("trainer", "InvalidImageName"));
    assert_eq!(of(json!({"running": {}}), waiting("CrashLoopBackOff")), None, "the trainer runs");
}

/// Seen on real nodes: beside a proxy that never ends, a job stood at 100 % and `Running` for ever.
#[test]
fn a_job_ends_with_its_trainers_whatever_runs_beside_them() {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 1}}));
    world.run();
    let end = |world: &mut World, name: &str, code: i32| {
        world.exit(name, code, "");
        // Another container of the pod goes on.
        world.pods.iter_mut().find(|pod| pod.name == name).unwrap().phase = Phase::Running;
    };
    world.now = 20;
    end(&mut world, "a-1-0", 0);
    world.run();
    assert_eq!((world.stage(), world.message()), ("Running", "1 of 2 nodes train, 1 are done".into()));
    end(&mut world, "a-1-1", 9);
    world.run();
    assert_eq!(world.attempt(), 2, "{}", world.message());
    assert!(world.pods.iter().any(|pod| pod.name == "a-1-0"), "its other containers have a few seconds");
    world.now = 40;
    world.run();
    assert!(world.pods.iter().all(|pod| pod.attempt == 2));
    // A container that fails beside a trainer that has ended well does not make it fail.
    end(&mut world, "a-2-0", 0);
    end(&mut world, "a-2-1", 0);
    world.pods.iter_mut().for_each(|pod| pod.phase = if pod.name == "a-2-1" { Phase::Failed } else { pod.phase });
    world.run();
    assert_eq!(world.stage(), "Complete");
    world.now = 60;
    world.run();
    assert_eq!(world.pods.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(), ["a-2-1"], "its log stays");
}

/// Seen on real nodes: the kubelet said ten times that a ConfigMap was missing, and the status said ContainerCreating for ever.
#[test]
fn what_a_kubelet_says_of_a_pod_is_told_with_the_field_to_change_and_has_a_limit() {
    let mount = "MountVolume.SetUp failed for volume \"text\" : configmap \"texxt\" not found";
    let network = "Failed to create pod sandbox: plugin type=\"bridge\" failed (add): no IP addresses available";
    let small =
        "Failed to create pod sandbox: runc create failed: container init was OOM-killed (memory limit too low?)";
    for (reason, message, says, end) in [
        (
            "FailedMount",
            mount,
            "create ConfigMap texxt in the job's namespace, or correct its name in spec.template.spec.volumes",
            300,
        ),
        ("FailedCreatePodSandBox", small, "raise spec.trainer.resourcesPerNode.limits.memory", 0),
        ("FailedCreatePodSandBox", network, "no IP addresses available", i64::MAX),
        ("NodeNotSchedulable", "whatever", "whatever", i64::MAX),
    ] {
        let mut world = World::new(1, json!({}));
        world.run();
        let warning = Waiting { container: String::new(), reason: reason.into(), message: message.into() };
        let pod = &mut world.pods[0];
        (pod.phase, pod.ready, pod.started, pod.warning) = (Phase::Pending, false, Some(at(0)), Some(warning));
        let placed = world.job.status.as_mut().unwrap();
        placed
            .conditions
            .iter_mut()
            .filter(|c| c.type_ == conditions::SUCCEEDED)
            .for_each(|c| c.reason = "Starting".into());
        world.now = 5;
        world.step();
        let told = world.message();
        assert!(told.contains(&format!("{reason}: {message}")) && told.contains(says), "{told}");
        assert_eq!(world.stage() == "Failed", end == 0, "{told}");
        world.now = 299;
        world.run();
        assert_eq!((world.attempt(), world.stage() == "Failed"), (1, end == 0), "{}", world.message());
        world.now = 300;
        world.run();
        assert_eq!(world.stage() == "Failed", end <= 300, "{}", world.message());
        let is_tried_again = reason == "FailedCreatePodSandBox" && end == i64::MAX;
        assert_eq!(world.attempt(), if is_tried_again { 2 } else { 1 }, "{}", world.message());
    }
}

/// A pod that the API server does not accept was created again and again for ever.
#[test]
fn a_pod_that_the_server_will_never_accept_ends_the_job_and_one_that_lacks_something_has_a_limit() {
    let invalid = "Pod \"a-1-0\" is invalid: spec.containers[0].volumeMounts[0].name: Not found: \"nope\"";
    let account = "pods \"a-1-0\" is forbidden: error looking up service account ns/x: serviceaccount \"x\" not found";
    let quota = "pods \"a-1-0\" is forbidden: exceeded quota: q, requested: cpu=2, used: cpu=3, limited: cpu=4";
    let silent = "the API server did not answer within 10 s";
    for (why, says, end) in [
        (invalid, "the fields are those below spec.template", 0),
        (account, "create the ServiceAccount, or correct spec.template.spec.serviceAccountName", 300),
        (quota, "or lower spec.trainer.numNodes or resourcesPerNode", i64::MAX),
        (silent, "did not answer", i64::MAX),
    ] {
        let mut world = World::new(1, json!({}));
        world.step();
        world.trouble = Some(Trouble::after(None, format!("cannot create Pod a-1-0: {why}"), at(0)));
        for (now, is_over) in [(0, end <= 0), (299, end <= 299), (300, end <= 300)] {
            world.now = now;
            let status = world.plan().status.or(world.job.status.clone()).unwrap();
            world.job.status = Some(status);
            assert_eq!(world.stage(), if is_over { "Failed" } else { "Placing" }, "{now} {}", world.message());
            assert!(world.message().contains(why) && world.message().contains(says), "{}", world.message());
        }
    }
}

/// Seen on real nodes: the status of an attempt that began at step 0 showed step, percent and time left of the one before.
#[test]
fn an_attempt_without_a_checkpoint_does_not_show_the_figures_of_the_one_before() {
    for (checkpoint, kept) in [(json!(null), false), (json!({"path": "/c", "everySteps": 5}), true)] {
        let mut world = World::new(1, json!({"failurePolicy": {"maxRestarts": 1}}));
        world.run();
        world.job.spec.checkpoint = serde_json::from_value(checkpoint).unwrap();
        let figures = json!({"step": 7, "totalSteps": 9, "progressPercentage": 77});
        world.job.status.as_mut().unwrap().trainer_status = serde_json::from_value(figures).unwrap();
        world.exit("a-1-0", 5, "");
        world.step();
        assert_eq!(world.attempt(), 2);
        assert_eq!(world.job.status.as_ref().unwrap().trainer_status.is_some(), kept);
    }
}

/// Seen on real nodes: a drain was refused for as long as the job ran, and nothing said so on the job.
#[test]
fn a_cordoned_node_is_left_with_a_checkpoint_or_kept_and_the_job_says_so() {
    let cordon = |world: &mut World| world.nodes.get_mut("n0").unwrap().facts.unschedulable = true;
    let mut world = World::new(2, json!({}));
    world.node("n2", "4");
    world.run();
    cordon(&mut world);
    let told = world.step();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1), "it is protected");
    assert!(world.message().contains("node n0 is cordoned: a drain waits"), "{}", world.message());
    assert_eq!(told.events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["NodeCordoned"]);
    assert!(world.step().events.is_empty(), "once");

    let mut world = World::new(2, json!({"gangPolicy": {"disruption": "Checkpoint"}}));
    world.node("n2", "4");
    world.run();
    cordon(&mut world);
    let left = world.step();
    assert_eq!((world.attempt(), left.actions.len()), (2, 0));
    assert!(world.message().contains("pod a-1-0 on node n0: the node is cordoned"), "{}", world.message());
    let restarts = world.job.status.as_ref().unwrap().restarts.clone().unwrap();
    assert_eq!((restarts.preemption, restarts.infrastructure, restarts.total), (1, 0, 1));
    world.run();
    let mut used: Vec<&str> = world.pods.iter().filter_map(|pod| pod.node.as_deref()).collect();
    used.sort_unstable();
    assert_eq!((world.stage(), used), ("Running", vec!["n1", "n2"]));

    let everything = json!([{"operator": "Exists"}]);
    let mut world = World::new(
        1,
        json!({
            "gangPolicy": {"disruption": "Checkpoint"}, "template": {"spec": {"tolerations": everything}},
        }),
    );
    world.run();
    cordon(&mut world);
    world.run();
    assert_eq!(world.attempt(), 1, "it would come back to the same node for ever");
}

/// Each node without the volume was asked for 10 s, and after six of them the first one again.
#[test]
fn a_gang_waits_until_its_volumes_are_read_and_goes_where_they_are() {
    let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    let mut world = World::new(1, json!({"template": {"spec": {"volumes": volumes}}}));
    world.node("n1", "4");
    world.run();
    assert_eq!(world.stage(), "Placing", "nothing is decided before they are read");
    let read = |world: &mut World, node: &str| {
        let term = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]});
        let nodes = serde_json::from_value(json!({"nodeSelectorTerms": [term]})).unwrap();
        let rules = world.pods[0].rules.as_mut().unwrap();
        std::sync::Arc::make_mut(rules).reach = Some(vec![Reach { claim: "data".into(), nodes }]);
    };
    read(&mut world, "elsewhere");
    world.run();
    let why = "2 nodes cannot be used: PersistentVolumeClaim data has no volume there (spec.template.spec.volumes)";
    assert!(world.stage() == "Queued" && world.message().contains(why), "{}", world.message());
    let change = "smallest change that fits: template.spec.volumes: without PersistentVolumeClaim data";
    assert!(world.message().contains(change), "{}", world.message());
    read(&mut world, "n1");
    world.run();
    assert_eq!((world.stage(), world.pods[0].node.as_deref()), ("Running", Some("n1")));
}

/// A rollout of the network takes each node away for a while, one after the other: not ready first, then silent for less than its grace.
#[test]
fn a_rollout_over_a_hundred_nodes_ends_no_job() {
    let mut world = World::new(100, json!({}));
    world.run();
    for number in 0..100 {
        let name = format!("n{number}");
        let away = |world: &mut World, ready: bool, silent: bool| {
            let since = silent.then(|| at(world.now));
            let node = world.nodes.get_mut(&name).unwrap();
            (node.facts.ready, node.silent_since) = (ready, since);
        };
        away(&mut world, false, false);
        world.now += 300;
        world.run();
        away(&mut world, false, true);
        world.now += 59;
        world.run();
        away(&mut world, true, false);
        world.run();
    }
    let restarts = world.job.status.clone().unwrap().restarts.unwrap();
    assert_eq!((world.stage(), world.attempt(), restarts.total), ("Running", 1, 0));
}

#[test]
fn two_bad_nodes_of_a_gang_of_64_are_both_named() {
    let mut world = World::new(64, json!({}));
    world.run();
    for node in ["n7", "n41"] {
        world.nodes.get_mut(node).unwrap().silent_since = Some(at(0));
    }
    world.now = 60;
    world.step();
    assert_eq!(failures(&world), ["n41 NodeLost", "n7 NodeLost"]);
    for node in ["node n7:", "node n41:"] {
        assert!(world.message().contains(node), "{}", world.message());
    }
}
