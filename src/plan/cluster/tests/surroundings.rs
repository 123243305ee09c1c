//! Interference from outside: names that are taken, images that cannot start, sidecars.

use super::world::at;
use super::*;
use crate::cluster::blocker::WriteError;
use crate::cluster::view::{Phase, Waiting};
use crate::eligible::Reach;

/// Regression test: another owner's claim with the right name was taken for ours, and the pods
/// waited for it forever.
#[test]
fn a_claim_of_another_owner_is_reported_and_no_gate_is_lifted() {
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

/// Seen on real nodes: each of 11 attempts took 301 s.
#[test]
fn an_image_that_must_not_run_is_not_retried() {
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

/// While an init container cannot start, the trainer's state only says that the pod is
/// initializing.
#[test]
fn the_container_that_blocks_the_trainer_is_reported() {
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
    let expected_waiting = |container: &str, reason: &str| Some((container.to_string(), reason.to_string()));
    assert_eq!(of(waiting("PodInitializing"), waiting("ErrImagePull")), expected_waiting("init", "ErrImagePull"));
    assert_eq!(of(waiting("PodInitializing"), json!({"running": {}})), expected_waiting("trainer", "PodInitializing"));
    assert_eq!(
        of(waiting("InvalidImageName"), waiting("ErrImagePull")),
        expected_waiting("trainer", "InvalidImageName")
    );
    assert_eq!(of(json!({"running": {}}), waiting("CrashLoopBackOff")), None, "the trainer runs");
}

/// Seen on real nodes: next to a proxy that never ends, a job stayed at 100 % and `Running`
/// forever.
#[test]
fn a_job_ends_with_its_trainers_regardless_of_sidecars() {
    let mut world = World::new(2, json!({"failurePolicy": {"maxRestarts": 1}}));
    world.run();
    let end = |world: &mut World, name: &str, code: i32| {
        world.exit(name, code, "");
        // Another container of the pod keeps running.
        world.pods.iter_mut().find(|pod| pod.name == name).unwrap().phase = Phase::Running;
    };
    world.now = 20;
    end(&mut world, "a-1-0", 0);
    world.run();
    assert_eq!((world.stage(), world.message()), ("Running", "1 of 2 nodes train, 1 is done".into()));
    end(&mut world, "a-1-1", 9);
    world.run();
    assert_eq!(world.attempt(), 2, "{}", world.message());
    assert!(world.pods.iter().any(|pod| pod.name == "a-1-0"), "its other containers have a few seconds");
    world.now = 40;
    world.run();
    assert!(world.pods.iter().all(|pod| pod.attempt == 2));
    // A container that fails next to a trainer that has succeeded does not fail the pod.
    end(&mut world, "a-2-0", 0);
    end(&mut world, "a-2-1", 0);
    world.pods.iter_mut().for_each(|pod| pod.phase = if pod.name == "a-2-1" { Phase::Failed } else { pod.phase });
    world.run();
    assert_eq!(world.stage(), "Complete");
    world.now = 60;
    world.run();
    assert_eq!(world.pods.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(), ["a-2-1"], "its log stays");
}

/// Seen on real nodes: the kubelet reported ten times that a ConfigMap was missing, but the status
/// said ContainerCreating forever.
#[test]
fn kubelet_errors_are_reported_with_the_field_to_change_and_have_a_limit() {
    let mount = "MountVolume.SetUp failed for volume \"text\" : configmap \"texxt\" not found";
    let network = "Failed to create pod sandbox: plugin type=\"bridge\" failed (add): no IP addresses available";
    let small =
        "Failed to create pod sandbox: runc create failed: container init was OOM-killed (memory limit too low?)";
    for (reason, message, expected, end) in [
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
        let actual = world.message();
        assert!(actual.contains(&format!("{reason}: {message}")) && actual.contains(expected), "{actual}");
        assert_eq!(world.stage() == "Failed", end == 0, "{actual}");
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

/// Regression test: a pod that the API server does not accept was recreated forever.
#[test]
fn an_invalid_pod_fails_the_job_and_a_missing_object_has_a_limit() {
    let invalid = "Pod \"a-1-0\" is invalid: spec.containers[0].volumeMounts[0].name: Not found: \"nope\"";
    let account = "pods \"a-1-0\" is forbidden: error looking up service account ns/x: serviceaccount \"x\" not found";
    let quota = "pods \"a-1-0\" is forbidden: exceeded quota: q, requested: cpu=2, used: cpu=3, limited: cpu=4";
    let silent = "the API server did not respond within 10 s";
    for (why, expected, end) in [
        (invalid, "the fields are under spec.template", 0),
        (account, "create the ServiceAccount, or correct spec.template.spec.serviceAccountName", 300),
        (quota, "or lower spec.trainer.numNodes or resourcesPerNode", i64::MAX),
        (silent, "did not respond", i64::MAX),
    ] {
        let mut world = World::new(1, json!({}));
        world.step();
        world.write_error = Some(WriteError::after(None, format!("cannot create Pod a-1-0: {why}"), true, at(0)));
        for (now, is_over) in [(0, end <= 0), (299, end <= 299), (300, end <= 300)] {
            world.now = now;
            let status = world.plan().status.or(world.job.status.clone()).unwrap();
            world.job.status = Some(status);
            assert_eq!(world.stage(), if is_over { "Failed" } else { "Placing" }, "{now} {}", world.message());
            assert!(world.message().contains(why) && world.message().contains(expected), "{}", world.message());
        }
    }
}

/// Seen on real nodes: each leader change restarted the five minutes.
#[test]
fn the_limit_for_a_missing_object_survives_a_change_of_leader() {
    let refused = |pod: &str| {
        format!("cannot create Pod {pod}: pods \"{pod}\" is forbidden: violates PodSecurity \"restricted\"")
    };
    let mut world = World::new(2, json!({}));
    world.step();
    let recorded = |world: &World| WriteError::from_status(world.job.status.as_ref().unwrap());
    let mut quota = World { job: world.job.clone(), ..World::new(2, json!({})) };
    world.write_error = Some(WriteError::after(None, refused("a-1-0"), true, at(7)));
    world.now = 7;
    world.job.status = world.plan().status;
    let new_leader = WriteError::after(recorded(&world).as_ref(), refused("a-1-1"), true, at(200));
    assert_eq!((new_leader.since, new_leader.text.as_str()), (at(7), refused("a-1-1").as_str()));
    world.write_error =
        Some(WriteError::after(recorded(&world).as_ref(), format!("{}: other words", refused("a-1-0")), true, at(300)));
    (world.now, world.written) = (306, Some(at(8)));
    assert_eq!(world.plan().wake, Some(at(307)));
    world.now = 307;
    world.job.status = world.plan().status;
    assert_eq!(world.stage(), "Failed");
    quota.write_error = Some(WriteError::after(None, "cannot create Pod a-1-0: exceeded quota: q".into(), true, at(7)));
    quota.job.status = quota.plan().status;
    assert_eq!((quota.stage(), recorded(&quota)), ("Placing", None), "no time limit applies");
    // The pods can be created again.
    let mut made = World::new(1, json!({}));
    made.step();
    made.write_error = Some(WriteError::after(None, refused("a-1-0"), true, at(0)));
    made.job.status = made.plan().status;
    assert!(recorded(&made).is_some());
    made.write_error = None;
    made.run();
    assert_eq!((made.stage(), recorded(&made)), ("Running", None));
}

/// Seen on real nodes: the status of an attempt that started at step 0 showed the previous
/// attempt's step, percentage and remaining time.
#[test]
fn without_a_checkpoint_figures_of_the_previous_attempt_are_dropped() {
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

/// Seen on real nodes: a drain was refused for as long as the job ran, and nothing on the job said
/// so.
#[test]
fn a_job_leaves_a_cordoned_node_with_a_checkpoint_or_reports_it() {
    let cordon = |world: &mut World| world.nodes.get_mut("n0").unwrap().facts.unschedulable = true;
    let mut world = World::new(2, json!({}));
    world.node("n2", "4");
    world.run();
    cordon(&mut world);
    let step = world.step();
    assert_eq!((world.stage(), world.attempt()), ("Running", 1), "it is protected");
    assert!(world.message().contains("node n0 is cordoned: a drain waits"), "{}", world.message());
    assert_eq!(step.events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["NodeCordoned"]);
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
    assert_eq!(world.attempt(), 1, "it would return to the same node forever");
}

/// Regression test: the gang held each node without the volume for 10 s, and after six nodes tried
/// the first one again.
#[test]
fn a_gang_waits_for_its_volume_rules_and_follows_them() {
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
