//! Pod statuses, as a kubelet writes them.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use switchyard_crds::names::TRAINER;

/// State of all containers in a pod.
pub(super) enum State<'a> {
    /// The first init container is running.
    Initializing,
    /// The init container, and with it the pod, failed with this code and termination message.
    InitFailed(i32, &'a str),
    /// All containers are running.
    Running,
    /// The containers cannot start: reason, message.
    Waiting(&'a str, &'a str),
    /// All containers ended: exit code, reason, termination message.
    Ended(i32, &'a str, &'a str),
    /// The trainer ended with this code; the other containers are running.
    TrainerEnded(i32),
    /// The sidecar with this name ended with this code; the trainer is running.
    SidecarEnded(&'a str, i32),
    /// The node ended the pod: reason, message, disruption reason.
    Removed(&'a str, &'a str, Option<&'a str>),
}

pub(super) fn now() -> String {
    k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns a strategic merge patch for the status.
pub(super) fn patch(pod: &Pod, started: &str, address: Ipv4Addr, state: &State<'_>) -> Value {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let empty = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&empty);
    let phase = match state {
        State::Running | State::TrainerEnded(_) | State::SidecarEnded(..) => "Running",
        State::Waiting(..) | State::Initializing => "Pending",
        State::Ended(0, ..) => "Succeeded",
        State::Ended(..) | State::InitFailed(..) | State::Removed(..) => "Failed",
    };
    let ready = matches!(state, State::Running);
    let terminated = |name: &str, code: i32, reason: &str, message: &str| {
        json!({"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": started, "finishedAt": now(),
            "containerID": format!("bench://{uid}/{name}")}})
    };
    let running = json!({"running": {"startedAt": started}});
    let initializing = json!({"waiting": {"reason": "PodInitializing"}});
    let entry = |container: &Container, state: Value| {
        let (image, runs) = (container.image.clone().unwrap_or_default(), state.get("running").is_some());
        json!({"name": container.name, "image": image, "imageID": image, "ready": runs, "started": runs, "restartCount": 0,
            "containerID": format!("bench://{uid}/{}", container.name), "state": state})
    };
    let containers: Vec<Value> = spec
        .containers
        .iter()
        .map(|container| {
            let name = container.name.as_str();
            let state = match state {
                State::Initializing | State::InitFailed(..) => initializing.clone(),
                State::TrainerEnded(code) if name == TRAINER => {
                    terminated(name, *code, if *code == 0 { "Completed" } else { "Error" }, "")
                }
                State::SidecarEnded(sidecar, code) if name == *sidecar => terminated(name, *code, "Error", ""),
                State::Running | State::TrainerEnded(_) | State::SidecarEnded(..) => running.clone(),
                State::Waiting(reason, message) => json!({"waiting": {"reason": reason, "message": message}}),
                State::Ended(code, reason, message) => terminated(name, *code, reason, message),
                State::Removed(..) => terminated(name, 137, "Error", ""),
            };
            entry(container, state)
        })
        .collect();
    let mut is_first = true;
    let init: Vec<Value> = spec
        .init_containers
        .iter()
        .flatten()
        .map(|container| {
            let name = container.name.as_str();
            let is_sidecar = container.restart_policy.as_deref() == Some("Always");
            let is_current = !is_sidecar && std::mem::take(&mut is_first);
            let state = match state {
                State::Initializing if is_current => running.clone(),
                State::InitFailed(code, message) if is_current => terminated(name, *code, "Error", message),
                State::Initializing | State::InitFailed(..) => initializing.clone(),
                State::SidecarEnded(sidecar, code) if name == *sidecar => terminated(name, *code, "Error", ""),
                State::Ended(..) | State::Removed(..) => terminated(name, 0, "Completed", ""),
                _ if is_sidecar => running.clone(),
                _ => terminated(name, 0, "Completed", ""),
            };
            entry(container, state)
        })
        .collect();
    let is_initialized = !matches!(state, State::Initializing | State::InitFailed(..));
    let is = |kind: &str, holds: bool| json!({"type": kind, "status": if holds { "True" } else { "False" }, "lastTransitionTime": now()});
    let mut conditions = vec![is("Initialized", is_initialized), is("ContainersReady", ready), is("Ready", ready)];
    let mut status = json!({
        "phase": phase, "startTime": started, "hostIP": "127.0.0.1", "podIP": address.to_string(),
        "podIPs": [{"ip": address.to_string()}], "containerStatuses": containers,
    });
    if !init.is_empty() {
        status["initContainerStatuses"] = init.into();
    }
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
