//! Statuses of pods, as a kubelet writes them.

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use serde_json::{Value, json};
use std::net::Ipv4Addr;

/// State of all containers of a pod.
pub(super) enum State<'a> {
    /// Started now.
    Running,
    /// Cannot start.
    Waiting(&'a str, &'a str),
    /// Ended: exit code, reason, termination message.
    Ended(i32, &'a str, &'a str),
    /// The trainer ended with this code; the others run.
    TrainerEnded(i32),
    /// The pod is over for a reason of the node: reason, message, type of disruption.
    Removed(&'a str, &'a str, Option<&'a str>),
}

pub(super) fn now() -> String {
    k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A strategic merge patch of the status.
pub(super) fn patch(pod: &Pod, started: &str, address: Ipv4Addr, state: &State<'_>) -> Value {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let empty = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&empty);
    let phase = match state {
        State::Running | State::TrainerEnded(_) => "Running",
        State::Waiting(..) => "Pending",
        State::Ended(0, ..) => "Succeeded",
        State::Ended(..) | State::Removed(..) => "Failed",
    };
    let ready = matches!(state, State::Running);
    let containers: Vec<Value> = spec
        .containers
        .iter()
        .map(|container| {
            let id = format!("bench://{uid}/{}", container.name);
            let state = match state {
                State::TrainerEnded(code) if container.name == switchyard_crds::names::TRAINER => json!({"terminated": {
                    "exitCode": code, "reason": if *code == 0 { "Completed" } else { "Error" }, "startedAt": started, "finishedAt": now(),
                    "containerID": id,
                }}),
                State::Running | State::TrainerEnded(_) => json!({"running": {"startedAt": started}}),
                State::Waiting(reason, message) => json!({"waiting": {"reason": reason, "message": message}}),
                State::Ended(code, reason, message) => json!({"terminated": {
                    "exitCode": code, "reason": reason, "message": message, "startedAt": started, "finishedAt": now(), "containerID": id,
                }}),
                State::Removed(..) => json!({"terminated": {
                    "exitCode": 137, "reason": "Error", "startedAt": started, "finishedAt": now(), "containerID": id,
                }}),
            };
            let image = container.image.clone().unwrap_or_default();
            json!({"name": container.name, "image": image, "imageID": image, "ready": ready, "started": ready, "restartCount": 0,
                "containerID": id, "state": state})
        })
        .collect();
    let is = |kind: &str, holds: bool| json!({"type": kind, "status": if holds { "True" } else { "False" }, "lastTransitionTime": now()});
    let mut conditions = vec![is("Initialized", true), is("ContainersReady", ready), is("Ready", ready)];
    let mut status = json!({
        "phase": phase, "startTime": started, "hostIP": "127.0.0.1", "podIP": address.to_string(),
        "podIPs": [{"ip": address.to_string()}], "containerStatuses": containers,
    });
    if let State::Removed(reason, message, disruption) = state {
        status["reason"] = (*reason).into();
        status["message"] = (*message).into();
        if let Some(kind) = disruption {
            let mut condition = is("DisruptionTarget", true);
            condition["reason"] = (*kind).into();
            condition["message"] = (*message).into();
            conditions.push(condition);
        }
    }
    status["conditions"] = conditions.into();
    json!({"metadata": {"uid": uid}, "status": status})
}
