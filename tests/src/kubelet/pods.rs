//! One task per pod, from binding to deletion.

use super::status::{self, State};
use super::{Command, POLICY, Policy, Shared, worker};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde_json::json;
use std::time::Duration;
use tokio::sync::mpsc::{self, UnboundedReceiver};

/// Messages to a pod's task.
#[derive(Debug, Clone)]
pub(super) enum Signal {
    /// The object changed, or the node has recovered.
    Recheck,
    /// The pod is being deleted, with this grace period in seconds.
    Delete(i64),
    /// The pod is gone from the API server.
    Gone,
    /// Command from a test.
    Command(Command),
}

/// Watches all pods bound to this kubelet's nodes.
pub(super) async fn watch(shared: Shared) {
    let mut bound = watcher::Config::default().fields("spec.nodeName!=");
    if let Some(labels) = &shared.options.selector {
        bound = bound.labels(labels);
    }
    let api = Api::<Pod>::all(shared.client.clone());
    let mut events = Box::pin(watcher(api, bound).default_backoff());
    loop {
        match events.try_next().await {
            Ok(Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) => shared.observe(pod),
            Ok(Some(watcher::Event::Delete(pod))) => shared.notify(&pod, Signal::Gone),
            Ok(Some(_)) => {}
            Ok(None) => return,
            // The API server is down; the watcher retries.
            Err(_) => {}
        }
    }
}

impl Shared {
    fn notify(&self, pod: &Pod, signal: Signal) {
        if let Some(signals) = self.state().pods.get(&pod.uid().unwrap_or_default()) {
            let _ = signals.send(signal);
        }
    }

    fn observe(&self, pod: Pod) {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        if !self.state().nodes.contains(&node) {
            return;
        }
        let uid = pod.uid().unwrap_or_default();
        let deleting = pod.metadata.deletion_timestamp.is_some();
        let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
        if !self.state().pods.contains_key(&uid) {
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            let is_over = phase == "Succeeded" || phase == "Failed";
            if is_over && !deleting {
                return;
            }
            let (signals, received) = mpsc::unbounded_channel();
            self.state().pods.insert(uid.clone(), signals);
            let shared = self.clone();
            let pod_clone = pod.clone();
            tokio::spawn(async move {
                let task =
                    Task { address: shared.address(&pod_clone), started: status::now(), node, shared, pod: pod_clone };
                task.run(received, is_over).await;
            });
        }
        if deleting {
            self.notify(&pod, Signal::Delete(grace));
        }
    }

    /// Kills all processes of pods.
    pub(super) fn kill_all(&self) {
        for group in self.state().groups.values() {
            let _ = rustix::process::kill_process_group(*group, rustix::process::Signal::KILL);
        }
    }
}

pub(super) struct Task {
    pub shared: Shared,
    pub pod: Pod,
    pub node: String,
    pub address: std::net::Ipv4Addr,
    started: String,
}

/// Result of a container.
pub(super) struct Exit {
    pub code: i32,
    pub reason: String,
    pub message: String,
}

impl Task {
    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.shared.client.clone(), &self.pod.namespace().unwrap_or_default())
    }

    fn must_not_be_root(&self) -> bool {
        let context = self.pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        context.is_some_and(|context| context.run_as_non_root == Some(true) && context.run_as_user.is_none())
    }

    fn policy(&self) -> Policy {
        let annotated = self.pod.annotations().get(POLICY).and_then(|text| text.parse().ok());
        annotated.unwrap_or_else(|| self.shared.options.policy.clone())
    }

    /// Writes a status, and retries while the API server is down. A lost node writes nothing.
    async fn write(&self, state: State<'_>) {
        let patch = status::patch(&self.pod, &self.started, self.address, &state);
        for _ in 0..600 {
            if self.shared.is_lost(&self.node) {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
            let written = {
                let _permit = self.shared.writes.acquire().await;
                self.api().patch_status(&self.pod.name_any(), &PatchParams::default(), &Patch::Strategic(&patch)).await
            };
            match written {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if [404, 409, 422].contains(&status.code) => return,
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Creates a kubelet event.
    async fn warn(&self, reason: &str, note: &str) {
        let now = k8s_openapi::jiff::Timestamp::now();
        let event = json!({
            "metadata": {"generateName": "kubelet-", "namespace": self.pod.namespace()},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": self.pod.namespace(), "name": self.pod.name_any(),
                "uid": self.pod.uid()},
            "type": "Warning", "reason": reason, "message": note, "count": 1, "firstTimestamp": now, "lastTimestamp": now,
            "source": {"component": "kubelet", "host": self.node},
        });
        let api = Api::<Event>::namespaced(self.shared.client.clone(), &self.pod.namespace().unwrap_or_default());
        if let Ok(event) = serde_json::from_value(event) {
            let _ = api.create(&PostParams::default(), &event).await;
        }
    }

    async fn run(self, mut signals: UnboundedReceiver<Signal>, is_over: bool) {
        let mut is_over = is_over;
        if !is_over {
            is_over = self.run_policy(&mut signals).await;
            // A finalizer keeps the pod after its end: a kubelet reports the end before it releases
            // the pod.
            if !is_over && self.pod.metadata.finalizers.iter().flatten().next().is_some() {
                self.write(State::Ended(143, "Error", "")).await;
            }
        }
        let zombie = self.policy() == Policy::IgnoreDelete;
        // The pod has finished or is terminating; keep it until it is deleted.
        loop {
            let deleting = self.is_deleting().await;
            if deleting && !zombie && !self.shared.is_lost(&self.node) && self.remove().await {
                break;
            }
            match tokio::time::timeout(Duration::from_secs(1), signals.recv()).await {
                Ok(None | Some(Signal::Gone)) => break,
                Ok(Some(_)) => {}
                Err(_) if is_over && !deleting => {
                    // Nothing to do until the next signal.
                    match signals.recv().await {
                        None | Some(Signal::Gone) => break,
                        Some(_) => {}
                    }
                }
                Err(_) => {}
            }
        }
        let uid = self.pod.uid().unwrap_or_default();
        self.shared.state().pods.remove(&uid);
    }

    async fn is_deleting(&self) -> bool {
        match self.api().get_opt(&self.pod.name_any()).await {
            Ok(Some(pod)) => pod.uid() != self.pod.uid() || pod.metadata.deletion_timestamp.is_some(),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Deletes the pod with a grace period of zero, which only kubelets may do.
    async fn remove(&self) -> bool {
        let preconditions = Preconditions { uid: self.pod.uid(), resource_version: None };
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(preconditions),
            ..DeleteParams::default()
        };
        let _permit = self.shared.writes.acquire().await;
        match self.api().delete(&self.pod.name_any(), &params).await {
            Ok(_) => true,
            Err(kube::Error::Api(status)) => [404, 409].contains(&status.code),
            Err(_) => false,
        }
    }

    /// Runs from the first status to the end of the container. Returns whether the pod is over.
    async fn run_policy(&self, signals: &mut UnboundedReceiver<Signal>) -> bool {
        let policy = self.policy();
        match &policy {
            Policy::Initialize => self.write(State::Initializing).await,
            Policy::Hang => self.write(State::Waiting("ContainerCreating", "")).await,
            Policy::ImageMissing => {
                self.write(State::Waiting("ErrImagePull", "no such image")).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
                self.write(State::Waiting("ImagePullBackOff", "Back-off pulling image: no such image")).await;
            }
            Policy::RootImage if self.must_not_be_root() => {
                let message = "container has runAsNonRoot and image will run as root";
                self.write(State::Waiting("CreateContainerConfigError", message)).await;
            }
            Policy::MountMissing => {
                self.write(State::Waiting("ContainerCreating", "")).await;
                let note = "MountVolume.SetUp failed for volume \"text\" : configmap \"texxt\" not found";
                self.warn("FailedMount", note).await;
            }
            Policy::Worker => return self.run_worker(signals).await,
            _ => self.write(State::Running).await,
        }
        let end = match policy {
            Policy::SucceedAfter(time) => Some((time, 0, "Completed")),
            Policy::Fail(code, time) => Some((time, code, "Error")),
            Policy::OutOfMemory => Some((Duration::ZERO, 137, "OOMKilled")),
            _ => None,
        };
        let due = end.map(|(time, ..)| tokio::time::Instant::now() + time);
        loop {
            let signal = match due {
                Some(due) => match tokio::time::timeout_at(due, signals.recv()).await {
                    Ok(signal) => signal,
                    Err(_) => {
                        let (_, code, reason) = end.unwrap_or_default();
                        self.write(State::Ended(code, reason, "")).await;
                        return true;
                    }
                },
                None => signals.recv().await,
            };
            match signal {
                None | Some(Signal::Gone) => return true,
                Some(Signal::Delete(_)) if policy != Policy::IgnoreDelete => return false,
                Some(Signal::Command(command)) => {
                    self.execute(&command).await;
                    if !matches!(command, Command::ExitInit(0, _) | Command::ExitSidecar(..)) {
                        return true;
                    }
                }
                Some(Signal::Delete(_) | Signal::Recheck) => {}
            }
        }
    }

    pub(super) async fn execute(&self, command: &Command) {
        match command {
            Command::Exit(code, message) => {
                let reason = if *code == 0 { "Completed" } else { "Error" };
                self.write(State::Ended(*code, reason, message)).await;
            }
            Command::ExitInit(0, _) => self.write(State::Running).await,
            Command::ExitInit(code, message) => self.write(State::InitFailed(*code, message)).await,
            Command::ExitSidecar(name, code) => self.write(State::SidecarEnded(name, *code)).await,
            Command::ExitTrainer(code) => self.write(State::TrainerEnded(*code)).await,
            Command::Evict => {
                let message = "The node was low on resource: memory.";
                self.write(State::Removed("Evicted", message, Some("TerminationByKubelet"))).await;
            }
            Command::Preempt => {
                let message = "preempting to accommodate a higher priority pod";
                self.write(State::Removed("Preempting", message, Some("PreemptionByScheduler"))).await;
            }
        }
    }

    /// Starts the pod's processes and follows them.
    async fn run_worker(&self, signals: &mut UnboundedReceiver<Signal>) -> bool {
        let mut worker = match worker::Worker::start(self).await {
            Ok(worker) => worker,
            Err(error) => {
                self.write(State::Ended(128, "StartError", &format!("{error:#}"))).await;
                return true;
            }
        };
        self.write(State::Running).await;
        let end = loop {
            tokio::select! {
                end = worker.wait() => break end,
                signal = signals.recv() => match signal {
                    None | Some(Signal::Gone) => {
                        worker.kill();
                        break worker.wait().await;
                    }
                    Some(Signal::Delete(grace)) if !self.shared.is_lost(&self.node) => {
                        break worker.stop(Duration::from_secs(grace.unsigned_abs())).await;
                    }
                    Some(Signal::Command(_)) => worker.kill(),
                    Some(_) => {}
                },
            }
        };
        self.write(State::Ended(end.code, &end.reason, &end.message)).await;
        true
    }
}
