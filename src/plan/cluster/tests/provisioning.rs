//! Gangs that request nodes from the cluster autoscaler. The test emulates the autoscaler: it sets
//! conditions and adds nodes.

use super::World;
use crate::cluster::{Action, Reconciliation};
use crate::objects::Kind;
use serde_json::{Value, json};
use std::sync::Arc;
use switchyard_crds::{DeviceAllocation, conditions};

const CLASS: &str = "best-effort-atomic-scale-up.autoscaling.x-k8s.io";
const REQUEST: (Kind, &str) = (Kind::ProvisioningRequest, "a-1");

/// A job of two pods that waits for a second node.
fn short(spec: Value) -> World {
    let mut world = World::new(2, spec);
    world.nodes.remove("n1");
    world.provisioning_class = Some(CLASS);
    world
}

fn has_request(world: &World) -> bool {
    world.objects.contains_key(&(REQUEST.0, REQUEST.1.to_string()))
}

fn set_conditions(world: &mut World, conditions: &Value) {
    let view = world.objects.get_mut(&(REQUEST.0, REQUEST.1.to_string())).unwrap();
    view.content["status"] = json!({"conditions": conditions});
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": super::at(0)})
}

/// State and reason of the condition `NodesRequested`.
fn requested_condition(world: &World) -> Option<(String, String)> {
    let found = world.job.status.as_ref().unwrap().condition(conditions::NODES_REQUESTED)?;
    Some((found.status.clone(), found.reason.clone()))
}

fn kinds(done: &Reconciliation, is: fn(&Action) -> Option<Kind>) -> Vec<Kind> {
    done.actions.iter().filter_map(is).collect()
}

#[test]
fn a_gang_short_of_nodes_requests_them_once_and_shows_the_autoscalers_message() {
    let mut world = short(json!({}));
    world.run();
    assert!(
        has_request(&world) && world.objects.contains_key(&(Kind::PodTemplate, "a-1".into())),
        "{:?}",
        world.objects
    );
    assert_eq!(world.stage(), "Queued");
    let message = world.message();
    assert!(
        message.ends_with("; ProvisioningRequest a-1 requests 2 nodes: the autoscaler has not responded yet"),
        "{message}"
    );
    assert_eq!(requested_condition(&world), Some(("Unknown".into(), "Requested".into())));
    // A message of the autoscaler is written at once, however recent the last status write is.
    world.written = Some(super::at(0));
    set_conditions(
        &mut world,
        &json!([
            condition("Accepted", "True", "Accepted", "it is accepted"),
            condition("Provisioned", "False", "CapacityIsNotFound", "Capacity is not found, it is tried later."),
        ]),
    );
    world.run();
    assert_eq!(requested_condition(&world), Some(("Unknown".into(), "CapacityIsNotFound".into())));
    assert!(
        world.message().ends_with("requests 2 nodes: Provisioned is False: Capacity is not found, it is tried later"),
        "{}",
        world.message()
    );
    set_conditions(&mut world, &json!([condition("Provisioned", "True", "CapacityIsProvisioned", "made")]));
    world.run();
    assert_eq!(requested_condition(&world), Some(("True".into(), "CapacityIsProvisioned".into())));
}

#[test]
fn a_placed_gang_consumes_its_request_and_deletes_it() {
    let mut world = short(json!({}));
    world.run();
    world.node("new", "4");
    let mut released = Vec::new();
    for _ in 0..9 {
        let done = world.step();
        let patches = done.actions.iter().filter_map(|action| match action {
            Action::Release { patch, .. } => Some(patch.clone()),
            _ => None,
        });
        released.extend(patches);
        let deletes = kinds(&done, |action| match action {
            Action::Delete { kind, .. } => Some(*kind),
            _ => None,
        });
        assert!(deletes.is_empty() || released.len() == 2, "before its gates are lifted: {deletes:?}");
    }
    for patch in &released {
        let annotations = &patch["metadata"]["annotations"];
        assert_eq!(annotations["autoscaling.x-k8s.io/consume-provisioning-request"], "a-1");
        assert_eq!(annotations["autoscaling.x-k8s.io/provisioning-class-name"], CLASS);
    }
    assert_eq!(
        (world.stage(), released.len(), has_request(&world), requested_condition(&world)),
        ("Running", 2, false, None)
    );
    assert!(!world.objects.contains_key(&(Kind::PodTemplate, "a-1".into())));
}

#[test]
fn an_ended_request_is_recreated_after_a_pause() {
    for end in ["Failed", "BookingExpired", "CapacityRevoked"] {
        let mut world = short(json!({}));
        world.run();
        set_conditions(
            &mut world,
            &json!([condition("Provisioned", "True", "Made", "made"), condition(end, "True", "Why", "gone")]),
        );
        let done = world.step();
        assert_eq!(requested_condition(&world), Some(("False".into(), end.into())));
        assert_eq!(done.wake, Some(super::at(600)), "{end}");
        world.now = 599;
        world.run();
        assert!(has_request(&world));
        world.now = 600;
        let done = world.step();
        let deleted = kinds(&done, |action| match action {
            Action::Delete { kind, .. } => Some(*kind),
            _ => None,
        });
        assert_eq!(deleted, [Kind::PodTemplate, Kind::ProvisioningRequest]);
        world.run();
        assert_eq!(
            (has_request(&world), requested_condition(&world)),
            (true, Some(("Unknown".into(), "Requested".into())))
        );
    }
}

#[test]
fn nodes_are_not_requested_if_useless_or_requested_by_kueue() {
    let quiet = |mut world: World, why: &str| {
        world.run();
        assert_eq!((world.stage(), has_request(&world), requested_condition(&world)), ("Queued", false, None), "{why}");
    };
    let mut off = short(json!({}));
    off.provisioning_class = None;
    quiet(off, "it is disabled");
    let queue = json!({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}});
    quiet(short(json!({"template": queue})), "Kueue asks itself");
    // Both nodes have room, but they are in different racks.
    let racks = json!({"topologyPolicy": {"domains": [{"key": "example.com/rack", "mode": "Required"}]}});
    let mut split = World::new(2, racks);
    split.provisioning_class = Some(CLASS);
    for (name, rack) in [("n0", "r0"), ("n1", "r1")] {
        let labels = Arc::make_mut(&mut split.nodes.get_mut(name).unwrap().facts.labels);
        labels.insert("example.com/rack".into(), rack.into());
    }
    quiet(split, "there are nodes enough, in the wrong places");
    let gpus = json!({"trainer": {"framework": "Plain", "image": "i", "numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 33}}}});
    quiet(short(gpus), "no node could have so many GPUs");
    let gpus = json!({"trainer": {"framework": "Plain", "image": "i", "numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 1}}}});
    let mut claims = short(gpus);
    claims.step();
    claims.job.status.as_mut().unwrap().device_allocation = Some(DeviceAllocation::Claims);
    quiet(claims, "claims name the GPUs of nodes that exist");
}

#[test]
fn a_job_that_stops_waiting_withdraws_its_request() {
    let mut world = short(json!({}));
    world.run();
    world.job.spec.suspend = true;
    world.run();
    assert_eq!((world.stage(), has_request(&world), requested_condition(&world)), ("Suspended", false, None));
}

#[test]
fn a_foreign_object_with_the_requests_name_is_left_alone() {
    let mut world = short(json!({}));
    world.step();
    world.step();
    let view =
        crate::cluster::view::ObjectView { uid: "theirs".into(), owned: false, deleting: false, content: json!({}) };
    world.objects.insert((REQUEST.0, REQUEST.1.into()), view.clone());
    world.run();
    assert_eq!((world.stage(), requested_condition(&world)), ("Queued", None));
    world.node("new", "4");
    world.run();
    assert_eq!((world.stage(), world.objects.get(&(REQUEST.0, REQUEST.1.to_string()))), ("Running", Some(&view)));
}
