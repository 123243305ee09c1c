//! Runs the real controller as a process, and helpers to observe jobs.

use crate::wait::{Seen, until_object, until_objects};
use crate::{ControlPlane, Daemon, TIMEOUT, programs, until_async};
use anyhow::{Context, Result, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use switchyard_crds::{TrainJob, conditions};

/// Start options of a controller.
#[derive(Debug, Clone, Default)]
pub struct ControllerOptions {
    /// Watch only this namespace.
    pub namespace: Option<String>,
    /// Additional arguments.
    pub arguments: Vec<String>,
    /// Environment variables, such as injected faults.
    pub environment: Vec<(&'static str, String)>,
    /// Kubeconfig; the `switchyard-controller` user's if `None`.
    pub kubeconfig: Option<PathBuf>,
    /// A `switchyard-controller` binary to run instead of this profile's `switchyard controller`.
    pub program: Option<PathBuf>,
}

/// Starts `switchyard controller` against a control plane. Logs to `NAME.log` in the control
/// plane's folder.
///
/// # Errors
/// It cannot be started, or would watch other tests' jobs on the shared control plane.
pub fn start_controller(plane: &ControlPlane, name: &str, options: &ControllerOptions) -> Result<Daemon> {
    let is_cluster_wide =
        options.namespace.is_none() && !options.arguments.iter().any(|a| a.starts_with("--watch-namespace"));
    ensure!(!(is_cluster_wide && plane.is_shared()), "{name}: a cluster-wide controller needs its own control plane");
    let kubeconfig = options.kubeconfig.clone().unwrap_or_else(|| plane.kubeconfig("switchyard-controller"));
    let (program, command) = match &options.program {
        Some(program) => (program.clone(), None),
        None => (programs().join("switchyard"), Some("controller".to_owned())),
    };
    let mut arguments: Vec<String> = command.into_iter().collect();
    arguments.extend(["--kubeconfig".into(), kubeconfig.display().to_string()]);
    if !options.arguments.iter().any(|argument| argument == "--listen") {
        arguments.extend(["--listen".into(), "127.0.0.1:0".into()]);
    }
    if let Some(namespace) = &options.namespace {
        arguments.extend(["--watch-namespace".into(), namespace.clone()]);
    }
    if !options.arguments.iter().any(|argument| argument == "--leader-elect") {
        arguments.extend(["--leader-elect".into(), "Disabled".into()]);
    }
    if !options.arguments.iter().any(|argument| argument == "--node-grace-seconds") {
        arguments.extend(["--node-grace-seconds".into(), "2".into()]);
    }
    arguments.extend(options.arguments.iter().cloned());
    Daemon::start(&program, &arguments, &options.environment, &plane.folder().join(format!("{name}.log")))
}

/// Returns the address of a controller's HTTP server, once it is listening.
pub fn http_address(controller: &Daemon) -> Option<SocketAddr> {
    let log = std::fs::read_to_string(&controller.log).ok()?;
    log.split("listen=").nth(1)?.split_whitespace().next()?.parse().ok()
}

/// Returns a pod template restricted to these nodes, because other tests' nodes exist as well.
pub fn template_on(nodes: &[String]) -> Value {
    json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}]},
    ]}}}}})
}

/// Merges `source` into `target`, field by field.
pub fn merge(target: &mut Value, source: Value) {
    match (target, source) {
        (Value::Object(target), Value::Object(source)) => {
            for (key, value) in source {
                merge(target.entry(key).or_insert(Value::Null), value);
            }
        }
        (target, source) => *target = source,
    }
}

/// Returns a Plain TrainJob of `nodes` pods that behave according to `policy`.
pub fn plain_job(name: &str, nodes: u32, policy: &str) -> Value {
    json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": {
            "trainer": {
                "framework": "Plain", "image": "bench/none:1", "numNodes": nodes,
                "resourcesPerNode": {"limits": {"cpu": "100m", "memory": "64Mi"}},
            },
            "template": {"metadata": {"annotations": {crate::POLICY: policy}}},
        },
    })
}

/// Jobs and pods in one namespace.
#[derive(Clone)]
pub struct Jobs {
    /// Client with administrator rights.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
    /// Creation time of each job.
    created: Arc<Mutex<BTreeMap<String, Instant>>>,
}

impl Jobs {
    /// Creates a helper for a namespace.
    pub fn new(client: Client, namespace: &str) -> Jobs {
        Jobs { client, namespace: namespace.into(), created: Arc::default() }
    }

    /// API for TrainJobs.
    pub fn api(&self) -> Api<TrainJob> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// API for pods.
    pub fn pods_api(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a job.
    ///
    /// # Errors
    /// The API server rejects the job.
    pub async fn create(&self, job: Value) -> Result<TrainJob> {
        let job: TrainJob = serde_json::from_value(job)?;
        let begin = Instant::now();
        let job = self.api().create(&PostParams::default(), &job).await?;
        self.created.lock().unwrap_or_else(PoisonError::into_inner).insert(job.name_any(), begin);
        Ok(job)
    }

    /// Records the seconds from a job's creation to its verdict, for `cargo xtask bench scenes`.
    ///
    /// # Errors
    /// The job was not created here, or the file cannot be written.
    pub fn verdict(&self, scene: &str, verdict: &str, name: &str) -> Result<()> {
        let created = self.created.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied();
        let seconds = created.with_context(|| format!("{name} was not created here"))?.elapsed().as_secs_f64();
        let Some(file) = std::env::var_os("SWITCHYARD_SCENES") else { return Ok(()) };
        let mut file = File::options().create(true).append(true).open(file)?;
        Ok(writeln!(
            file,
            "{}",
            json!({"scene": scene, "verdict": verdict, "seconds": (seconds * 100.0).round() / 100.0})
        )?)
    }

    /// Waits until a job satisfies a condition.
    ///
    /// # Errors
    /// Timeout; the error contains the job's status.
    pub async fn wait(&self, name: &str, what: &str, condition: impl Fn(&TrainJob) -> bool) -> Result<TrainJob> {
        match until_object(self.api(), name, TIMEOUT, |job| job.is_some_and(&condition)).await {
            Ok(job) => job.with_context(|| format!("{name}: deleted")),
            Err(Seen { value, error }) => {
                let job = value.map(|job| job.map(|job| serde_json::to_string_pretty(&job.status).unwrap_or_default()));
                bail!("{name}: not {what} after {} s; seen: {job:?}; {error:?}", TIMEOUT.as_secs());
            }
        }
    }

    /// Waits until a job reaches a stage.
    ///
    /// # Errors
    /// See [`Jobs::wait`].
    pub async fn wait_stage(&self, name: &str, stage: &str) -> Result<TrainJob> {
        self.wait(name, stage, |job| stage_of(job) == Some(stage)).await
    }

    /// Waits until a job is deleted.
    ///
    /// # Errors
    /// Timeout.
    pub async fn wait_gone(&self, name: &str) -> Result<()> {
        match until_object(self.api(), name, TIMEOUT, |job| job.is_none()).await {
            Ok(_) => Ok(()),
            Err(Seen { error, .. }) => bail!("{name}: not deleted after {} s; {error:?}", TIMEOUT.as_secs()),
        }
    }

    /// Lists pods, sorted by name.
    ///
    /// # Errors
    /// They cannot be listed.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        let mut pods = self.pods_api().list(&ListParams::default()).await?.items;
        pods.sort_by_key(ResourceExt::name_any);
        Ok(pods)
    }

    /// Waits until the pods satisfy a condition.
    ///
    /// # Errors
    /// Timeout.
    pub async fn wait_pods(&self, what: &str, condition: impl Fn(&[Pod]) -> bool) -> Result<Vec<Pod>> {
        until_objects(self.pods_api(), TIMEOUT, condition).await.map_err(|Seen { value, error }| {
            let names: Vec<String> = value.iter().flatten().map(ResourceExt::name_any).collect();
            anyhow!("pods not {what} after {} s: {names:?}; {error:?}", TIMEOUT.as_secs())
        })
    }

    /// Applies a merge patch to a job.
    ///
    /// # Errors
    /// The API server rejects the patch.
    pub async fn patch(&self, name: &str, patch: Value) -> Result<TrainJob> {
        Ok(self.api().patch(name, &Default::default(), &kube::api::Patch::Merge(patch)).await?)
    }

    /// Returns the notes of the job's events with this reason. Waits for the first one, because
    /// events are sent after the status update they describe.
    ///
    /// # Errors
    /// The events cannot be listed, or none appeared in time.
    pub async fn events(&self, name: &str, reason: &str) -> Result<Vec<String>> {
        let api = Api::<k8s_openapi::api::events::v1::Event>::namespaced(self.client.clone(), &self.namespace);
        let is_about_job = |event: &k8s_openapi::api::events::v1::Event| {
            event.regarding.as_ref().is_some_and(|regarding| regarding.name.as_deref() == Some(name))
                && event.reason.as_deref() == Some(reason)
        };
        let mut notes = Vec::new();
        let has_notes = async || {
            let events = api.list(&ListParams::default()).await?.items;
            notes = events.into_iter().filter(is_about_job).filter_map(|event| event.note).collect();
            Ok(!notes.is_empty())
        };
        until_async(&format!("an event {reason} of {name}"), TIMEOUT, has_notes).await?;
        Ok(notes)
    }
}

/// Returns a job's stage.
pub fn stage_of(job: &TrainJob) -> Option<&str> {
    condition_of(job, conditions::SUCCEEDED).map(|condition| condition.reason.as_str())
}

/// Returns whether the status reports that another writer reverts the controller's changes.
pub fn reports_fight(job: &TrainJob) -> bool {
    condition_of(job, "Succeeded").is_some_and(|told| told.message.contains("keeps reverting"))
}

/// Returns a condition of a job.
pub fn condition_of<'a>(
    job: &'a TrainJob,
    kind: &str,
) -> Option<&'a k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    job.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == kind)
}

/// Folder with the worker program, for pods in worker mode.
pub fn worker_folder() -> &'static Path {
    programs()
}
