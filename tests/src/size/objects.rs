//! Nodes, reports and foreign pods, as the API server stores them.

use super::{OTHERS, POOL, Scale};
use crate::gpus::{Machine, RESOURCE};
use serde_json::{Value, json};

const CREATED: &str = "2026-01-01T00:00:00Z";

/// Returns all initial objects with their keys.
pub(super) fn all(scale: &Scale) -> impl Iterator<Item = (String, Value)> {
    let report = Machine::of("f03-h100").report("NODE-OF-REPORT");
    let report = serde_json::to_string(&report).expect("invariant: a report is JSON");
    let nodes = (0..scale.nodes).flat_map(move |number| {
        let name = scale.name(number);
        let mut report: Value =
            serde_json::from_str(&report.replace("NODE-OF-REPORT", &name)).expect("invariant: a report is JSON");
        report["metadata"] = metadata(&name, None, json!({}));
        nics(&mut report);
        [
            (format!("minions/{name}"), node(scale, number)),
            (format!("training.switchyard.dev/gputopologies/{name}"), report),
        ]
    });
    nodes.chain((0..scale.others).map(move |number| {
        let pod = foreign_pod(scale, number, &format!("other-{number}"));
        (format!("pods/{OTHERS}/other-{number}"), pod)
    }))
}

fn metadata(name: &str, namespace: Option<&str>, labels: Value) -> Value {
    let kind = if namespace.is_some() { "1" } else { "0" };
    // Derive the UUID from the name, so that objects are reproducible.
    let digest = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let uid =
        format!("{:08x}-{:04x}-4{kind}00-8000-{:012x}", digest >> 32, digest >> 16 & 0xffff, digest & 0xffff_ffff_ffff);
    let mut metadata = json!({"name": name, "uid": uid, "creationTimestamp": CREATED, "labels": labels});
    if let Some(namespace) = namespace {
        metadata["namespace"] = namespace.into();
    }
    metadata
}

/// Adds RDMA-capable NICs, so that every node gets NCCL settings.
fn nics(report: &mut Value) {
    for (number, nic) in report["status"]["nics"].as_array_mut().into_iter().flatten().enumerate() {
        nic["rdmaDevice"] = format!("mlx5_{number}").into();
        nic["linkLayer"] = "InfiniBand".into();
        nic["port"] = 1.into();
        nic["state"] = "Active".into();
    }
}

fn node(scale: &Scale, number: usize) -> Value {
    let name = scale.name(number);
    let labels = json!({
        "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", POOL: scale.pool(number),
        "network.topology.nvidia.com/leaf": format!("leaf-{}", number / 16),
        "network.topology.nvidia.com/spine": format!("spine-{}", number / 256),
    });
    let amounts = json!({"cpu": "192", "memory": "2Ti", "ephemeral-storage": "7Ti", "pods": "110", RESOURCE: "8"});
    let condition = |kind: &str, status: &str| {
        json!({"type": kind, "status": status, "reason": "Kubelet", "message": "kubelet reports", "lastHeartbeatTime": CREATED,
            "lastTransitionTime": CREATED})
    };
    let image = |number: usize| {
        json!({"names": [format!("registry.example/team/image-{number}@sha256:{:064x}", number), format!("registry.example/team/image-{number}:1")],
            "sizeBytes": 1_000_000_000 + number})
    };
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": metadata(&name, None, labels), "spec": {},
        "status": {
            "capacity": amounts, "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
            "conditions": [condition("MemoryPressure", "False"), condition("DiskPressure", "False"), condition("PIDPressure", "False"),
                condition("Ready", "True")],
            "images": (0..20).map(image).collect::<Vec<_>>(),
        },
    })
}

/// Returns a foreign pod on the node selected by its number. The first pod on each node of the
/// foreign pool has all GPUs.
pub(super) fn foreign_pod(scale: &Scale, number: usize, name: &str) -> Value {
    let node = number % scale.nodes;
    let has_gpus = number < scale.nodes && scale.pool(node) == "others";
    let mut requests = json!({"cpu": "100m", "memory": "256Mi"});
    if has_gpus {
        requests[RESOURCE] = "8".into();
    }
    let container = |name: &str, requests: &Value| {
        json!({
            "name": name, "image": "registry.example/team/service:1", "imagePullPolicy": "IfNotPresent",
            "args": ["--listen=:8080", "--log-level=info", "--config=/etc/service/config.yaml"],
            "env": (0..8).map(|number| json!({"name": format!("SERVICE_OPTION_{number}"), "value": "some text of usual length"})).collect::<Vec<_>>(),
            "resources": {"requests": requests, "limits": requests},
            "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}],
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
        })
    };
    let light = json!({"cpu": "10m", "memory": "64Mi"});
    let state = |name: &str| {
        json!({"name": name, "ready": true, "started": true, "restartCount": 0, "image": "registry.example/team/service:1",
            "imageID": "registry.example/team/service@sha256:00", "containerID": format!("containerd://{name}-{number}"),
            "state": {"running": {"startedAt": CREATED}}})
    };
    let condition = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": CREATED});
    let conditions = ["Initialized", "Ready", "ContainersReady", "PodScheduled"].map(condition);
    let labels = json!({"app": format!("app-{}", number % 400), "pod-template-hash": "6b7f9c"});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata(name, Some(OTHERS), labels),
        "spec": {
            "nodeName": scale.name(node), "containers": [container("service", &requests), container("proxy", &light)],
            "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler", "serviceAccountName": "default",
            "serviceAccount": "default", "terminationGracePeriodSeconds": 0, "enableServiceLinks": true, "priority": 0,
            "preemptionPolicy": "PreemptLowerPriority", "securityContext": {},
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}],
            "volumes": [{"name": "token", "emptyDir": {}}],
        },
        "status": {
            "phase": "Running", "startTime": CREATED, "hostIP": "127.0.0.1", "podIP": "127.0.0.1", "qosClass": "Guaranteed",
            "conditions": conditions,
            "containerStatuses": [state("service"), state("proxy")],
        },
    })
}
