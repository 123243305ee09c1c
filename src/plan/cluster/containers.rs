//! Container states of a pod: how containers ended, init containers, which run before the trainer,
//! and sidecars, which run next to it.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod};
use switchyard_core::units::plural;
use switchyard_crds::names::TRAINER;
use switchyard_worker_contract::termination::Termination;

/// The kubelet's reason for an out-of-memory kill.
pub(super) const OUT_OF_MEMORY: &str = "OOMKilled";

/// Maximum length of a quoted termination message, in characters.
const MAX_LAST_LINE: usize = 200;

/// How a container ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ended {
    pub code: i32,
    /// The runtime's reason, such as `Error` or `OOMKilled`.
    pub reason: String,
    /// The termination message: JSON from the worker, or the end of the log.
    pub message: String,
    pub at: Option<Timestamp>,
}

impl Ended {
    pub(super) fn of(state: ContainerStateTerminated) -> Ended {
        Ended {
            code: state.exit_code,
            reason: state.reason.unwrap_or_default(),
            message: state.message.unwrap_or_default(),
            at: state.finished_at.map(|time| time.0),
        }
    }

    /// The worker's own report of its exit, if the termination message contains one.
    pub fn worker_report(&self) -> Option<Termination> {
        Termination::parse(&self.message)
    }
}

/// An init container that is running or has failed.
#[derive(Debug, Clone, PartialEq)]
pub struct InitContainer {
    pub name: String,
    /// 1-based position among the init containers that must end, and their number.
    pub position: (usize, usize),
    pub state: InitState,
}

#[derive(Debug, Clone, PartialEq)]
pub enum InitState {
    Running { since: Option<Timestamp> },
    Failed(Ended),
}

impl InitContainer {
    /// The init container that currently keeps the trainer of this pod from starting.
    pub(super) fn of(pod: &Pod) -> Option<InitContainer> {
        let statuses = pod.status.as_ref()?.init_container_statuses.as_deref()?;
        let blocking: Vec<&ContainerStatus> = statuses.iter().filter(|status| !is_sidecar(pod, &status.name)).collect();
        blocking.iter().enumerate().find_map(|(at, status)| {
            let state = match status.state.clone()? {
                ContainerState { running: Some(running), .. } => {
                    InitState::Running { since: running.started_at.map(|time| time.0) }
                }
                ContainerState { terminated: Some(terminated), .. } if terminated.exit_code != 0 => {
                    InitState::Failed(Ended::of(terminated))
                }
                _ => return None,
            };
            Some(InitContainer { name: status.name.clone(), position: (at + 1, blocking.len()), state })
        })
    }

    /// How it failed, `None` if it is running.
    pub fn failure(&self) -> Option<&Ended> {
        match &self.state {
            InitState::Failed(ended) => Some(ended),
            InitState::Running { .. } => None,
        }
    }

    /// Says since when it runs. The sentence does not change while it runs.
    pub(super) fn sentence(&self) -> String {
        let (at, all) = self.position;
        let of = if all > 1 { format!(" ({at} of {all})") } else { String::new() };
        match &self.state {
            InitState::Running { since: Some(since) } => {
                format!("init container {}{of} has been running since {since}", self.name)
            }
            InitState::Running { since: None } => format!("init container {}{of} is running", self.name),
            InitState::Failed(ended) => format!("init container {}{of} {}", self.name, failed(ended)),
        }
    }
}

/// `failed with exit code 3: no such bucket`.
fn failed(ended: &Ended) -> String {
    if ended.reason == OUT_OF_MEMORY {
        return format!("ran out of memory ({OUT_OF_MEMORY})");
    }
    format!("failed with exit code {}{}", ended.code, last_line(&ended.message))
}

/// The last line of a termination message, after a colon; empty if there is none.
pub(super) fn last_line(message: &str) -> String {
    let last = message.trim().lines().last().unwrap_or_default().trim();
    let last: String = last.chars().take(MAX_LAST_LINE).collect();
    if last.is_empty() { last } else { format!(": {last}") }
}

/// A container next to the trainer that has ended, or whose restart the kubelet delays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sidecar {
    pub name: String,
    /// `ended with exit code 1`.
    pub description: String,
}

impl Sidecar {
    /// Sidecars of a pod that do not run.
    pub(super) fn not_running(pod: &Pod) -> Vec<Sidecar> {
        let Some(status) = &pod.status else { return Vec::new() };
        let native = status.init_container_statuses.iter().flatten().filter(|status| is_sidecar(pod, &status.name));
        let others = status.container_statuses.iter().flatten().filter(|status| status.name != TRAINER);
        let stopped = |status: &ContainerStatus| {
            let ended = |ended: &ContainerStateTerminated| format!("exit code {}", ended.exit_code);
            let description = match status.state.as_ref()? {
                ContainerState { terminated: Some(last), .. } => format!("ended with {}", ended(last)),
                ContainerState { waiting: Some(waiting), .. } => {
                    let last = status.last_state.as_ref()?.terminated.as_ref()?;
                    format!("ended with {} ({})", ended(last), waiting.reason.as_deref().unwrap_or("it restarts"))
                }
                _ => return None,
            };
            Some(Sidecar { name: status.name.clone(), description })
        };
        native.chain(others).filter_map(stopped).collect()
    }

    /// Sentence about the first of these, with the pod's name. `None` if all run.
    pub(super) fn sentence<'a>(pods: impl Iterator<Item = (&'a str, &'a [Sidecar])>) -> Option<String> {
        let mut stopped = pods.flat_map(|(pod, sidecars)| sidecars.iter().map(move |sidecar| (pod, sidecar)));
        let (pod, Sidecar { name, description }) = stopped.next()?;
        let more = stopped.count();
        let more = if more > 0 { format!(", and {more} more sidecar{}", plural(more as u64)) } else { String::new() };
        Some(format!("sidecar {name} of pod {pod} {description}{more}"))
    }
}

/// Whether an init container is a sidecar: Kubernetes restarts it and does not wait for its end.
fn is_sidecar(pod: &Pod, name: &str) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    containers
        .into_iter()
        .any(|container| container.name == name && container.restart_policy.as_deref() == Some("Always"))
}
