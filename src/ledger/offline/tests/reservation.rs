//! Which nodes the head of the queue reserves, and for how long.

use super::*;
use jiff::SignedDuration;
use switchyard_plan::cluster::WaitReason;

const DAY: SignedDuration = SignedDuration::from_hours(24);

fn other(on: &str, spec: Value) -> Value {
    let mut pod = json!({
        "kind": "Pod", "metadata": {"name": "other", "namespace": "web", "uid": "other"},
        "spec": {"nodeName": on, "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]},
    });
    for (field, value) in spec.as_object().unwrap() {
        pod["spec"][field] = value.clone();
    }
    pod
}

/// Regression test: nodes with Deployments were reserved for a gang as if they would become empty,
/// and the rest of the reservation idled with them.
#[test]
fn a_node_is_reserved_only_if_its_pods_end_by_themselves() {
    for (spec, is_held) in [
        (json!({"restartPolicy": "Always"}), false),
        (json!({}), false),
        (json!({"restartPolicy": "Always", "activeDeadlineSeconds": 60}), true),
        (json!({"restartPolicy": "OnFailure"}), true),
        (json!({"restartPolicy": "Never"}), true),
    ] {
        let mut items = gang_waits(0);
        items.push(other("n2", spec.clone()));
        let late = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
        assert_eq!(
            (late.placement.is_err(), ahead_message(&late).starts_with("3 nodes are reserved")),
            (is_held, is_held),
            "{spec}"
        );
        // With a fourth node, three nodes can be reserved without the other pod.
        items.push(node("n4"));
        let late = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
        assert!(ahead_message(&late).starts_with("3 nodes are reserved"), "{spec}: {}", ahead_message(&late));
    }
}

/// An inference service that has a GPU by claim never ends, so waiting for that GPU is futile.
#[test]
fn a_gpu_claimed_by_a_lasting_pod_is_not_waited_for() {
    let gpu = |uuid: &str| json!({"index": uuid[4..].parse::<u32>().unwrap(), "uuid": uuid});
    let device = |uuid: &str| json!({"name": uuid.to_lowercase(), "attributes": {"uuid": {"string": uuid}}});
    let world = |policy: &str, consumer: &str| {
        let mut items = vec![node("n1")];
        items.push(json!({"kind": "GPUTopology", "metadata": {"name": "n1"}, "spec": {}, "status": {"gpuCount": 2, "gpus": [gpu("GPU-0"), gpu("GPU-1")]}}));
        items.push(json!({"kind": "ResourceSlice", "metadata": {"name": "n1"}, "spec": {
            "driver": "gpu.nvidia.com", "nodeName": "n1", "devices": [device("GPU-0"), device("GPU-1")],
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        }}));
        let result = json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0"});
        items.push(json!({"kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "web", "uid": "c"}, "spec": {"devices": {}}, "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "other", "uid": consumer}],
        }}));
        items.push(other("n1", json!({"restartPolicy": policy, "containers": [{"name": "c"}]})));
        let mut gang = job("gang", 1, "2026-01-02T00:00:00Z", waiting());
        gang["status"]["deviceAllocation"] = json!("Claims");
        gang["spec"]["trainer"]["framework"] = json!("Torch");
        gang["spec"]["trainer"]["resourcesPerNode"]["limits"] = json!({"nvidia.com/gpu": "2"});
        items.push(gang);
        let mut waits = pod("gang", 0, None, 0);
        waits["spec"]["containers"][0]["resources"] = json!({});
        items.push(waits);
        items
    };
    for (policy, consumer, is_held) in
        [("Always", "other", false), ("Never", "other", true), ("Always", "another", true)]
    {
        let items = world(policy, consumer);
        let reversed: Vec<Value> = items.iter().rev().cloned().collect();
        for items in [items, reversed] {
            let late = cluster(&items).explain(&fresh("late", 1, json!({})), PreviousPlacement::Ignored).unwrap();
            let is_free = late.placement.is_ok() && ahead_message(&late).is_empty();
            assert_eq!(is_free, !is_held, "{policy} {consumer}: {} {:?}", ahead_message(&late), late.placement);
        }
    }
}

/// Regression test: a gang that could not start held its reservation for as long as it was queued.
#[test]
fn the_reservation_expires_and_is_followed_by_an_equal_cooldown() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    let mut cluster =
        Cluster::of(&gang_waits(0), Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
    cluster.index.queue.configure(|queue| queue.longest_reservation = Some(DAY));
    let late = fresh("late", 1, json!({}));
    let gang = Key { namespace: "ns".into(), name: "gang".into() };
    let at = |cluster: &mut Cluster, now: Timestamp| {
        cluster.now = now;
        let (defaults, levels) = (cluster.defaults.clone(), cluster.levels.clone());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now };
        cluster.index.standing(&late, rules);
        cluster.index.enqueue(&gang, WaitReason::Room { open: 2 }, rules);
        (
            cluster.explain(&late, PreviousPlacement::Ignored).unwrap().placement.is_ok(),
            cluster.index.reservation_ends(&gang),
        )
    };
    let second = SignedDuration::from_secs(1);
    assert_eq!(at(&mut cluster, now), (false, Some(now + DAY)));
    assert_eq!(at(&mut cluster, now + DAY - second), (false, Some(now + DAY)), "recomputing it keeps its age");
    assert_eq!(at(&mut cluster, now + DAY), (true, Some(now + DAY * 2)));
    assert_eq!(cluster.index.cooldown_until(&gang), Some(now + DAY * 2));
    assert_eq!(at(&mut cluster, now + DAY * 2 - second), (true, Some(now + DAY * 2)));
    assert_eq!(at(&mut cluster, now + DAY * 2), (false, Some(now + DAY * 3)), "it can reserve nodes again");
}

#[test]
fn a_promised_start_doubles_the_reservation_limit() {
    let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
    for (hours, days) in [(47, 2), (49, 1)] {
        let mut items = gang_waits(0);
        items[3]["spec"]["activeDeadlineSeconds"] = json!(hours * 3600);
        items[3]["status"]["placedTime"] = json!(now);
        let mut cluster =
            Cluster::of(&items, Defaults::default(), Levels::default(), QueueSettings::default(), now).unwrap();
        cluster.index.queue.configure(|queue| queue.longest_reservation = Some(DAY));
        let gang = Key { namespace: "ns".into(), name: "gang".into() };
        assert_eq!(cluster.index.reservation_ends(&gang), Some(now + DAY * days), "{hours} h");
    }
}
