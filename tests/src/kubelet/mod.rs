//! A kubelet without containers: nodes that take pods, say that they run, and end them as a test wishes.
//!
//! What it reports is what a real kubelet reports (phases, conditions, container states, termination messages, logs over the
//! API server); what it runs is decided per pod by a [`Policy`]. `worker` starts the pod's command as processes of this machine,
//! so that a TrainJob really trains. Nodes do not renew leases: the controller manager of the bench waits an hour for one.

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

/// Annotation by which a pod chooses its policy.
pub const POLICY: &str = "bench.switchyard.dev/policy";
/// Writes at a time.
const WRITES: usize = 64;

/// What happens to a pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Policy {
    /// Runs until it is deleted.
    #[default]
    Run,
    /// Ends well after a time.
    SucceedAfter(Duration),
    /// Ends with an exit code after a time.
    Fail(i32, Duration),
    /// Is killed for want of memory.
    OutOfMemory,
    /// Its first init container runs until a test ends it.
    Initialize,
    /// Never starts.
    Hang,
    /// Its image does not exist.
    ImageMissing,
    /// Its image runs as root.
    RootImage,
    /// A ConfigMap that it mounts does not exist, which only an event says.
    MountMissing,
    /// Runs, and goes on when it is deleted: a zombie.
    IgnoreDelete,
    /// Its command is started as processes of this machine.
    Worker,
}

impl FromStr for Policy {
    type Err = anyhow::Error;

    /// `run`, `succeed-after=2s`, `fail=3`, `fail=3@2s`, `oom`, `initialize`, `hang`, `image=missing`, `image=root`, `mount=missing`, `ignore-delete`, `worker`.
    fn from_str(text: &str) -> Result<Policy> {
        let seconds = |text: &str| -> Result<Duration> {
            Ok(Duration::from_secs_f64(
                text.trim_end_matches('s').parse().with_context(|| format!("`{text}` is no time"))?,
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
                _ => anyhow::bail!("`{text}` is no policy"),
            },
            Some(("succeed-after", time)) => Policy::SucceedAfter(seconds(time)?),
            Some(("fail", rest)) => {
                let (code, time) = rest.split_once('@').unwrap_or((rest, "0s"));
                Policy::Fail(code.parse().with_context(|| format!("`{code}` is no exit code"))?, seconds(time)?)
            }
            Some(("image", "missing")) => Policy::ImageMissing,
            Some(("image", "root")) => Policy::RootImage,
            Some(("mount", "missing")) => Policy::MountMissing,
            _ => anyhow::bail!("`{text}` is no policy"),
        })
    }
}

/// What a test does to a pod that runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// The container ends with this code and this termination message.
    Exit(i32, String),
    /// The trainer ends with this code, and the other containers go on.
    ExitTrainer(i32),
    /// The init container that runs ends with this code and this termination message.
    ExitInit(i32, String),
    /// The sidecar of this name ends with this code, and the trainer goes on.
    ExitSidecar(String, i32),
    /// The pod is evicted.
    Evict,
    /// The pod makes room for one of higher priority.
    Preempt,
}

/// The nodes, and what their pods do unless an annotation says otherwise.
#[derive(Debug, Clone)]
pub struct KubeletOptions {
    /// Number of nodes.
    pub nodes: usize,
    /// Their names are this and a number with leading zeros.
    pub prefix: String,
    /// What each node has, by resource name.
    pub capacity: Vec<(String, String)>,
    /// Policy of pods without an annotation.
    pub policy: Policy,
    /// Folder in which commands are looked for first.
    pub programs: Option<PathBuf>,
    /// Its nodes are there already, and it takes only pods with these labels.
    pub only: Option<String>,
}

impl KubeletOptions {
    /// Nodes with 8 cores and 32 GiB.
    pub fn new(prefix: &str, nodes: usize) -> KubeletOptions {
        let capacity = [("cpu", "8"), ("memory", "32Gi"), ("pods", "110")];
        KubeletOptions {
            nodes,
            prefix: prefix.into(),
            capacity: capacity.map(|(name, amount)| (name.to_string(), amount.to_string())).into(),
            policy: Policy::Run,
            programs: None,
            only: None,
        }
    }
}

/// Shared by the tasks of a kubelet.
#[derive(Clone)]
struct Shared {
    client: Client,
    options: Arc<KubeletOptions>,
    folder: PathBuf,
    state: Arc<Mutex<State>>,
    writes: Arc<Semaphore>,
}

/// Addresses that pods of this process have had.
static ADDRESSES: AtomicU32 = AtomicU32::new(0);

#[derive(Default)]
struct State {
    nodes: HashSet<String>,
    lost: HashSet<String>,
    /// By UID.
    pods: HashMap<String, mpsc::UnboundedSender<pods::Signal>>,
    /// UID and address by namespace and name.
    names: HashMap<(String, String), (String, Ipv4Addr)>,
    /// Where logs are served.
    port: u16,
    /// Texts and files of logs by namespace and name.
    logs: HashMap<(String, String), logs::Log>,
    /// Processes that run for pods, by UID.
    groups: HashMap<String, rustix::process::Pid>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_lost(&self, node: &str) -> bool {
        self.state().lost.contains(node)
    }

    /// The address of a pod, which it keeps.
    fn address(&self, pod: &Pod) -> Ipv4Addr {
        let key = (pod.namespace().unwrap_or_default(), pod.name_any());
        let uid = pod.uid().unwrap_or_default();
        let mut state = self.state();
        if let Some((known, address)) = state.names.get(&key)
            && *known == uid
        {
            return *address;
        }
        // Of no other kubelet of this process, and hardly of another process: their pods listen on the same ports.
        let number = ADDRESSES.fetch_add(1, Ordering::Relaxed);
        let process = 64 + (std::process::id() % 128) as u8;
        let address = Ipv4Addr::new(127, process, (number / 250 % 256) as u8, (number % 250 + 1) as u8);
        state.names.insert(key, (uid, address));
        address
    }
}

/// Nodes with a kubelet; stopped on drop.
pub struct Kubelet {
    shared: Shared,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Kubelet {
    /// Registers the nodes and begins to take pods.
    ///
    /// # Errors
    /// The nodes cannot be registered.
    pub async fn start(config: kube::Config, options: KubeletOptions) -> Result<Kubelet> {
        let folder = tempfile::Builder::new().prefix("switchyard-kubelet-").tempdir()?;
        let path = folder.path().to_path_buf();
        let (ready, is_ready) = oneshot::channel::<Result<Shared>>();
        let (stop, stopped) = oneshot::channel::<()>();
        // A thread and a runtime of its own: tests end their runtimes, and block them.
        let thread = std::thread::Builder::new().name("kubelet".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(ready.send(Err(error.into()))),
            };
            runtime.block_on(async {
                match begin(config, options, path).await {
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

    /// Does something to a pod that runs.
    ///
    /// # Errors
    /// It has not been seen.
    pub fn order(&self, namespace: &str, pod: &str, command: Command) -> Result<()> {
        let state = self.shared.state();
        let (uid, _) = state.names.get(&(namespace.into(), pod.into())).with_context(|| format!("no pod {pod}"))?;
        let signals = state.pods.get(uid).with_context(|| format!("pod {pod} is gone"))?;
        signals.send(pods::Signal::Order(command)).ok().context("the pod has ended")
    }

    /// Sets the log of a pod that is no process, or with `POD/CONTAINER` of one of its containers.
    pub fn set_log(&self, namespace: &str, pod: &str, text: &str) {
        self.shared.state().logs.insert((namespace.into(), pod.into()), logs::Log::Text(text.into()));
    }

    /// The log of a pod, as far as there is one.
    pub fn log(&self, namespace: &str, pod: &str) -> String {
        logs::read(&self.shared, namespace, pod).unwrap_or_default()
    }

    /// Folder of a pod in worker mode; its volumes lie in `volumes/NAME`.
    pub fn pod_folder(&self, namespace: &str, pod: &str) -> Option<PathBuf> {
        let uid = self.shared.state().names.get(&(namespace.into(), pod.into())).map(|(uid, _)| uid.clone())?;
        Some(self.shared.folder.join(uid))
    }

    /// Names of the nodes, in order.
    pub fn nodes(&self) -> Vec<String> {
        let mut names: Vec<String> = self.shared.state().nodes.iter().cloned().collect();
        names.sort();
        names
    }

    /// A node is lost: it does nothing any more, and its condition says so at once. Its processes go on.
    ///
    /// # Errors
    /// The condition cannot be written.
    pub async fn lose_node(&self, node: &str) -> Result<()> {
        self.shared.state().lost.insert(node.into());
        nodes::set_ready(&self.shared.client, node, "Unknown").await
    }

    /// A node says that it is not ready, and its pods go on.
    ///
    /// # Errors
    /// The condition cannot be written.
    pub async fn unready_node(&self, node: &str) -> Result<()> {
        nodes::set_ready(&self.shared.client, node, "False").await
    }

    /// A lost node is back; what was deleted meanwhile is ended.
    ///
    /// # Errors
    /// The condition cannot be written.
    pub async fn recover_node(&self, node: &str) -> Result<()> {
        self.find(node);
        nodes::set_ready(&self.shared.client, node, "True").await
    }

    /// A node is lost, and somebody deletes its object.
    ///
    /// # Errors
    /// It cannot be deleted.
    pub async fn delete_node(&self, node: &str) -> Result<()> {
        self.shared.state().lost.insert(node.into());
        let api = kube::Api::<k8s_openapi::api::core::v1::Node>::all(self.shared.client.clone());
        api.delete(node, &Default::default()).await?;
        Ok(())
    }

    /// A deleted node registers again, under its name and with a new UID. What takes its taint away is the controller manager.
    ///
    /// # Errors
    /// It cannot be registered.
    pub async fn register_node(&self, node: &str) -> Result<()> {
        self.find(node);
        nodes::make(&self.shared, node).await
    }

    fn find(&self, node: &str) {
        let mut state = self.shared.state();
        state.lost.remove(node);
        for signals in state.pods.values() {
            let _ = signals.send(pods::Signal::Look);
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

async fn begin(config: kube::Config, options: KubeletOptions, folder: PathBuf) -> Result<Shared> {
    let shared = Shared {
        client: Client::try_from(config)?,
        options: Arc::new(options),
        folder,
        state: Arc::default(),
        writes: Arc::new(Semaphore::new(WRITES)),
    };
    let port = logs::serve(shared.clone()).await?;
    shared.state().port = port;
    nodes::register(&shared).await?;
    tokio::spawn(pods::watch(shared.clone()));
    Ok(shared)
}
