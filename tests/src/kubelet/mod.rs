//! A kubelet without containers: its nodes accept pods, report them as running, and end them as a
//! test requires.
//!
//! It reports what a real kubelet reports: phases, conditions, container states, termination
//! messages, and logs through the API server. A [`Policy`] per pod decides what runs. `worker`
//! starts the pod's command as processes on this machine, so that a TrainJob really trains. Nodes
//! do not renew leases, because the test cluster's controller manager waits an hour for them.

mod logs;
mod nodes;
mod pods;
mod status;
mod worker;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt};
use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Annotation that selects a pod's policy.
pub const POLICY: &str = "bench.switchyard.dev/policy";
/// Concurrent writes.
const MAX_WRITES: usize = 64;

/// Behaviour of a pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Policy {
    /// Runs until it is deleted.
    #[default]
    Run,
    /// Succeeds after this time.
    SucceedAfter(Duration),
    /// Exits with this code after this time.
    Fail(i32, Duration),
    /// Is OOM-killed.
    OutOfMemory,
    /// The first init container runs until a test ends it.
    Initialize,
    /// Never starts.
    Hang,
    /// The image does not exist.
    ImageMissing,
    /// The image runs as root.
    RootImage,
    /// A mounted ConfigMap does not exist, which only an event reports.
    MountMissing,
    /// Runs, and keeps running after deletion: a zombie.
    IgnoreDelete,
    /// Starts its command as processes on this machine.
    Worker,
}

impl FromStr for Policy {
    type Err = anyhow::Error;

    /// `run`, `succeed-after=2s`, `fail=3`, `fail=3@2s`, `oom`, `initialize`, `hang`,
    /// `image=missing`, `image=root`, `mount=missing`, `ignore-delete`, `worker`.
    fn from_str(text: &str) -> Result<Policy> {
        let seconds = |text: &str| -> Result<Duration> {
            Ok(Duration::from_secs_f64(
                text.trim_end_matches('s')
                    .parse()
                    .with_context(|| format!("got the time `{text}`; expected seconds such as 2s"))?,
            ))
        };
        Ok(match text.split_once('=') {
            None => match text {
                "run" => Policy::Run,
                "oom" => Policy::OutOfMemory,
                "initialize" => Policy::Initialize,
                "hang" => Policy::Hang,
                "ignore-delete" => Policy::IgnoreDelete,
                "worker" => Policy::Worker,
                _ => anyhow::bail!("got the policy `{text}`; expected for example run, fail=3@2s or worker"),
            },
            Some(("succeed-after", time)) => Policy::SucceedAfter(seconds(time)?),
            Some(("fail", rest)) => {
                let (code, time) = rest.split_once('@').unwrap_or((rest, "0s"));
                Policy::Fail(
                    code.parse().with_context(|| format!("got the exit code `{code}`; expected a number"))?,
                    seconds(time)?,
                )
            }
            Some(("image", "missing")) => Policy::ImageMissing,
            Some(("image", "root")) => Policy::RootImage,
            Some(("mount", "missing")) => Policy::MountMissing,
            _ => anyhow::bail!("got the policy `{text}`; expected for example run, fail=3@2s or worker"),
        })
    }
}

/// Action on a running pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// The container exits with this code and termination message.
    Exit(i32, String),
    /// The trainer exits with this code; the other containers keep running.
    ExitTrainer(i32),
    /// The running init container exits with this code and termination message.
    ExitInit(i32, String),
    /// The sidecar with this name exits with this code; the trainer keeps running.
    ExitSidecar(String, i32),
    /// The pod is evicted.
    Evict,
    /// The pod is preempted by one with higher priority.
    Preempt,
}

/// Options for the nodes and the default behaviour of their pods.
#[derive(Debug, Clone)]
pub struct KubeletOptions {
    /// Number of nodes.
    pub nodes: usize,
    /// Prefix of node names, followed by a zero-padded number.
    pub prefix: String,
    /// Capacity of each node, by resource name.
    pub capacity: Vec<(String, String)>,
    /// Policy of pods without an annotation.
    pub policy: Policy,
    /// Folder searched first for commands.
    pub programs: Option<PathBuf>,
    /// If set, the nodes already exist, and only pods with these labels are accepted.
    pub selector: Option<String>,
}

impl KubeletOptions {
    /// Options for nodes with 8 cores and 32 GiB.
    pub fn new(prefix: &str, nodes: usize) -> KubeletOptions {
        let capacity = [("cpu", "8"), ("memory", "32Gi"), ("pods", "110")];
        KubeletOptions {
            nodes,
            prefix: prefix.into(),
            capacity: capacity.map(|(name, amount)| (name.to_string(), amount.to_string())).into(),
            policy: Policy::Run,
            programs: None,
            selector: None,
        }
    }
}

/// State shared by a kubelet's tasks.
#[derive(Clone)]
struct Shared {
    client: Client,
    options: Arc<KubeletOptions>,
    folder: PathBuf,
    state: Arc<Mutex<State>>,
    writes: Arc<Semaphore>,
}

/// Number of addresses assigned to pods in this process.
static ADDRESSES: AtomicU32 = AtomicU32::new(0);

#[derive(Default)]
struct State {
    nodes: HashSet<String>,
    lost: HashSet<String>,
    /// Signal senders by pod UID.
    pods: HashMap<String, mpsc::UnboundedSender<pods::Signal>>,
    /// UID and address by namespace and name.
    names: HashMap<(String, String), (String, Ipv4Addr)>,
    /// Port of the log endpoint.
    port: u16,
    /// Logs by namespace and name.
    logs: HashMap<(String, String), logs::Log>,
    /// Process groups of pods, by UID.
    groups: HashMap<String, rustix::process::Pid>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_lost(&self, node: &str) -> bool {
        self.state().lost.contains(node)
    }

    /// Returns a pod's stable address.
    fn address(&self, pod: &Pod) -> Ipv4Addr {
        let key = (pod.namespace().unwrap_or_default(), pod.name_any());
        let uid = pod.uid().unwrap_or_default();
        let mut state = self.state();
        if let Some((known, address)) = state.names.get(&key)
            && *known == uid
        {
            return *address;
        }
        // Unique among this process's kubelets and unlikely to clash with another process, because
        // all pods listen on the same ports.
        let number = ADDRESSES.fetch_add(1, Ordering::Relaxed);
        let process = 64 + (std::process::id() % 128) as u8;
        let address = Ipv4Addr::new(127, process, (number / 250 % 256) as u8, (number % 250 + 1) as u8);
        state.names.insert(key, (uid, address));
        address
    }
}

/// A running kubelet for all its nodes; it stops on drop.
pub struct Kubelet {
    shared: Shared,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Kubelet {
    /// Registers the nodes and starts to accept pods.
    ///
    /// # Errors
    /// The nodes cannot be registered.
    pub async fn start(config: kube::Config, options: KubeletOptions) -> Result<Kubelet> {
        let folder = tempfile::Builder::new().prefix("switchyard-kubelet-").tempdir()?;
        let path = folder.path().to_path_buf();
        let (ready, is_ready) = oneshot::channel::<Result<Shared>>();
        let (stop, stopped) = oneshot::channel::<()>();
        // A separate thread and runtime, because tests block their runtime, or drop it.
        let thread = std::thread::Builder::new().name("kubelet".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(ready.send(Err(error.into()))),
            };
            runtime.block_on(async {
                match start_nodes(config, options, path).await {
                    Ok(shared) => {
                        let _ = ready.send(Ok(shared.clone()));
                        let _ = stopped.await;
                        shared.kill_all();
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            });
            runtime.shutdown_background();
        })?;
        let shared = is_ready.await.context("the kubelet ended")??;
        Ok(Kubelet { shared, stop: Some(stop), thread: Some(thread), _folder: folder })
    }

    /// Sends a command to a running pod.
    ///
    /// # Errors
    /// The pod was not seen, or has ended.
    pub fn send(&self, namespace: &str, pod: &str, command: Command) -> Result<()> {
        let state = self.shared.state();
        let (uid, _) = state.names.get(&(namespace.into(), pod.into())).with_context(|| format!("no pod {pod}"))?;
        let signals = state.pods.get(uid).with_context(|| format!("pod {pod} was deleted"))?;
        signals.send(pods::Signal::Command(command)).ok().context("the pod has ended")
    }

    /// Sets the log of a pod without processes, or of one container with `POD/CONTAINER`.
    pub fn set_log(&self, namespace: &str, pod: &str, text: &str) {
        self.shared.state().logs.insert((namespace.into(), pod.into()), logs::Log::Text(text.into()));
    }

    /// Returns a pod's log; empty if there is none.
    pub fn log(&self, namespace: &str, pod: &str) -> String {
        logs::read(&self.shared, namespace, pod).unwrap_or_default()
    }

    /// Returns the folder of a pod in worker mode. Its volumes are in `volumes/NAME`.
    pub fn pod_folder(&self, namespace: &str, pod: &str) -> Option<PathBuf> {
        let uid = self.shared.state().names.get(&(namespace.into(), pod.into())).map(|(uid, _)| uid.clone())?;
        Some(self.shared.folder.join(uid))
    }

    /// Node names, sorted.
    pub fn nodes(&self) -> Vec<String> {
        let mut names: Vec<String> = self.shared.state().nodes.iter().cloned().collect();
        names.sort();
        names
    }

    /// Simulates the loss of a node: its kubelet stops, and its Ready condition becomes Unknown at
    /// once. Its processes keep running.
    ///
    /// # Errors
    /// The condition cannot be written.
    pub async fn lose_node(&self, node: &str) -> Result<()> {
        self.shared.state().lost.insert(node.into());
        nodes::set_ready(&self.shared.client, node, "Unknown").await
    }

    /// Marks a node NotReady. Its pods keep running.
    ///
    /// # Errors
    /// The condition cannot be written.
    pub async fn unready_node(&self, node: &str) -> Result<()> {
        nodes::set_ready(&self.shared.client, node, "False").await
    }

    /// Recovers a lost node, and ends pods that were deleted in the meantime.
    ///
    /// # Errors
    /// The condition cannot be written.
    pub async fn recover_node(&self, node: &str) -> Result<()> {
        self.mark_found(node);
        nodes::set_ready(&self.shared.client, node, "True").await
    }

    /// Simulates the loss of a node and deletes its object.
    ///
    /// # Errors
    /// The object cannot be deleted.
    pub async fn delete_node(&self, node: &str) -> Result<()> {
        self.shared.state().lost.insert(node.into());
        let api = kube::Api::<k8s_openapi::api::core::v1::Node>::all(self.shared.client.clone());
        api.delete(node, &Default::default()).await?;
        Ok(())
    }

    /// Registers a deleted node again, with the same name and a new UID. The controller manager
    /// removes its taint.
    ///
    /// # Errors
    /// The node cannot be registered.
    pub async fn register_node(&self, node: &str) -> Result<()> {
        self.mark_found(node);
        nodes::create_node(&self.shared, node).await
    }

    fn mark_found(&self, node: &str) {
        let mut state = self.shared.state();
        state.lost.remove(node);
        for signals in state.pods.values() {
            let _ = signals.send(pods::Signal::Recheck);
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn start_nodes(config: kube::Config, options: KubeletOptions, folder: PathBuf) -> Result<Shared> {
    let shared = Shared {
        client: Client::try_from(config)?,
        options: Arc::new(options),
        folder,
        state: Arc::default(),
        writes: Arc::new(Semaphore::new(MAX_WRITES)),
    };
    let port = logs::serve(shared.clone()).await?;
    shared.state().port = port;
    nodes::register(&shared).await?;
    tokio::spawn(pods::watch(shared.clone()));
    Ok(shared)
}
