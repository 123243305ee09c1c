//! 200 gangs in the queues of a real Kueue, and scenarios with its topology-aware scheduling:
//! `cargo xtask bench kueue`.
//!
//! Runs two cohorts of two queues each. The nodes have more GPUs than the quotas together, because
//! the pods of a gang take different nodes. First, one queue of each cohort borrows the quota that
//! the other does not use. Then the other queue reclaims it and Kueue evicts. Finally, all gangs
//! run to completion. A pod watch checks every state that the API server shows: no pod of a gang
//! may be ungated while Kueue still gates another one. The controller has the chart's rights, and
//! the chart's policies are in force.
//!
//! `--record FOLDER` saves some objects; `src/plan/cluster/tests/recorded` was made this way.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "kueue/scenes.rs"]
mod scenes;
#[path = "kueue/watched.rs"]
mod watched;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt};
use kube::ResourceExt;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;
use switchyard_tests::gpus::{RESOURCE, gpu_job};
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, condition_of,
    found_async, kueue, programs_of, stage_of, start_controller, until_async,
};
use watched::Watched;

/// GPUs per node, and number of nodes.
const NODE: (usize, usize) = (8, 24);
/// Nominal GPU quotas of the first and second queue of a cohort.
const QUOTAS: [u32; 2] = [30, 50];
const COHORTS: [&str; 2] = ["one", "two"];
/// Gangs per queue, and the request of each gang: pods, and GPUs per pod.
const GANGS: usize = 50;
const GANG: (u32, u32) = (2, 1);
/// Evictions implied by these numbers: the second queue of each cohort reclaims its full quota.
const EVICTIONS: usize = 50;
const LIMIT: Duration = Duration::from_secs(300);

struct Bench {
    plane: ControlPlane,
    jobs: Jobs,
    kubelet: Kubelet,
    watched: Watched,
    /// Folder for recorded objects.
    record: Option<PathBuf>,
    kueue: Daemon,
    controller: Daemon,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
    let folder = programs_of(&["kueue"])?.remove(0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let scenes = runtime.block_on(scenes::play(&folder))?;
    println!("{scenes:#}");
    let (version, result) = runtime.block_on(measure(&folder, after("--record").map(PathBuf::from)))?;
    println!("{result:#}");
    if let Some(file) = after("--json") {
        let document = json!({
            "command": "cargo xtask bench kueue", "kubernetes": "v1.34.4", "kueue": version, "result": result, "scenes": scenes,
        });
        std::fs::write(file, format!("{}\n", serde_json::to_string_pretty(&document)?))?;
    }
    Ok(())
}

async fn measure(folder: &Path, record: Option<PathBuf>) -> Result<(String, Value)> {
    let plane = ControlPlane::start(&Options { controller_manager: true, scheduler: true, ..Options::default() })?;
    plane.install_crds().await?;
    plane.apply_chart(&[])?;
    let kueue = kueue::start(&plane, folder, json!({})).await?;
    let namespace = plane.namespace("queues").await?;
    let mut options = KubeletOptions::new("node", NODE.1);
    options.capacity.push(("nvidia.com/gpu".into(), NODE.0.to_string()));
    let kubelet = Kubelet::start(plane.config().await?, options).await?;
    let watched = Watched::start(plane.client().await?, &namespace, record.clone());
    // The chart's rights and policies must tolerate Kueue's changes to the pods.
    let kubeconfig = Some(plane.controller_kubeconfig()?);
    let options = ControllerOptions { kubeconfig, ..ControllerOptions::default() };
    let controller = start_controller(&plane, "controller", &options)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let bench = Bench { plane, jobs, kubelet, watched, record, kueue, controller };
    let result = bench.run().await;
    if result.is_err() {
        println!("{}\n{}", bench.kueue.tail(), bench.controller.tail());
    }
    Ok((kueue::version(&bench.kueue)?, result?))
}

impl Bench {
    async fn run(&self) -> Result<Value> {
        self.queues()?;
        let begin = Instant::now();
        let total = QUOTAS[0] + QUOTAS[1];
        let fitting = (total / (GANG.0 * GANG.1)) as usize;
        self.submit("a").await?;
        self.running("all quota is used", fitting * 2).await?;
        let filled = since(begin);
        let full = self.charged(total).await?;
        let words = self.words().await?;
        let begin = Instant::now();
        self.submit("b").await?;
        self.preempted("what was lent is taken back", EVICTIONS).await?;
        self.running("all quota is used again", fitting * 2).await?;
        let reclaimed = since(begin);
        let full_again = self.charged(total).await?;
        let restarts = self.restarts().await?;
        let begin = Instant::now();
        self.finish().await?;
        let finished = since(begin);
        let empty = self.charged(0).await?;
        ensure!(self.restarts().await? == restarts, "restarts after the evictions: {:?}", self.restarts().await?);
        Ok(json!({
            "gangs": GANGS * 4, "podsOfAGang": GANG.0, "cohorts": 2, "queues": 4, "partialAdmissions": self.partial()?, "states": self.watched.states(),
            "evictions": restarts["preemption"], "otherRestarts": restarts["infrastructure"] + restarts["application"],
            "words": words, "gpusCharged": {"full": full, "afterTheEvictions": full_again, "atTheEnd": empty}, "complete": GANGS * 4,
            "seconds": {"filled": filled, "reclaimed": reclaimed, "finished": finished},
        }))
    }

    /// Creates a flavor, two cohorts of two queues, and a LocalQueue for each.
    fn queues(&self) -> Result<()> {
        let mut objects = vec![json!({
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "default"},
        })];
        for cohort in COHORTS {
            for (which, gpus) in ["a", "b"].iter().zip(QUOTAS) {
                let name = format!("{cohort}-{which}");
                let quota = |resource: &str, amount: Value| json!({"name": resource, "nominalQuota": amount});
                objects.push(json!({
                    "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ClusterQueue", "metadata": {"name": name},
                    "spec": {
                        "cohortName": cohort, "namespaceSelector": {}, "preemption": {"reclaimWithinCohort": "Any"},
                        "resourceGroups": [{"coveredResources": ["cpu", "memory", "nvidia.com/gpu"], "flavors": [{"name": "default", "resources": [
                            quota("cpu", json!(1000)), quota("memory", json!("1Ti")), quota("nvidia.com/gpu", json!(gpus)),
                        ]}]}],
                    },
                }));
                objects.push(json!({
                    "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue",
                    "metadata": {"name": name, "namespace": self.jobs.namespace}, "spec": {"clusterQueue": name},
                }));
            }
        }
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        let ended = self.plane.kubectl_with(&["apply", "-f", "-"], &list.to_string());
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        Ok(())
    }

    /// Submits the gangs of this queue in both cohorts.
    async fn submit(&self, which: &str) -> Result<()> {
        let job = |number: usize| {
            let queue = format!("{}-{which}", COHORTS[number % 2]);
            let mut job = gpu_job(&format!("{queue}-{}", number / 2), GANG.0, GANG.1, "run");
            job["metadata"]["labels"] = json!({"kueue.x-k8s.io/queue-name": queue});
            serde_json::from_value::<TrainJob>(job).unwrap()
        };
        let api = self.jobs.api();
        let create = |number: usize| {
            let (api, job) = (api.clone(), job(number));
            async move { api.create(&PostParams::default(), &job).await }
        };
        futures::stream::iter(0..2 * GANGS).map(create).buffer_unordered(16).try_for_each(|_| async { Ok(()) }).await?;
        Ok(())
    }

    async fn list(&self) -> Result<Vec<TrainJob>> {
        Ok(self.jobs.api().list(&ListParams::default()).await?.items)
    }

    async fn until(&self, what: &str, count: usize, is: impl Fn(&TrainJob) -> usize) -> Result<()> {
        let mut seen = 0;
        let are_there = async || {
            seen = self.list().await?.iter().map(&is).sum();
            self.partial()?;
            Ok(seen == count)
        };
        let done = until_async(what, LIMIT, are_there).await;
        done.map(drop).with_context(|| format!("{seen} of {count}"))
    }

    /// Checks that no gang was partially ungated; returns 0.
    fn partial(&self) -> Result<usize> {
        let partial = self.watched.partial();
        ensure!(partial.is_empty(), "let go in part: {partial:?}");
        Ok(partial.len())
    }

    async fn running(&self, what: &str, count: usize) -> Result<()> {
        self.until(what, count, |job| usize::from(stage_of(job) == Some("Running"))).await
    }

    async fn preempted(&self, what: &str, count: usize) -> Result<()> {
        let of = |job: &TrainJob| {
            job.status.as_ref().and_then(|status| status.restarts.as_ref()).map_or(0, |r| r.preemption)
        };
        self.until(what, count, |job| of(job) as usize).await
    }

    /// GPUs that Kueue charges to each cohort.
    fn charge(&self) -> Result<[u32; 2]> {
        let ended = self.plane.kubectl(&["get", "clusterqueues", "-o", "json"]);
        let list: Value = serde_json::from_str(&ended.stdout)?;
        let of = |cohort: &str| {
            let queues =
                list["items"].as_array().into_iter().flatten().filter(|queue| queue["spec"]["cohortName"] == cohort);
            queues.map(gpus_charged).sum()
        };
        Ok(COHORTS.map(of))
    }

    /// Returns the status message of a waiting job once it quotes Kueue, and records the events of
    /// its Workload.
    async fn words(&self) -> Result<String> {
        found_async("told what Kueue says", LIMIT, async || {
            for job in self.list().await?.iter().filter(|job| stage_of(job) == Some("Queued")) {
                let said =
                    condition_of(job, "Succeeded").map(|condition| condition.message.clone()).unwrap_or_default();
                if said.starts_with("waiting for Kueue: ") {
                    self.record(&job.name_any())?;
                    return Ok(Some(said));
                }
            }
            Ok(None)
        })
        .await
    }

    /// Writes the Workload of a job's first attempt and its events to the record folder.
    fn record(&self, job: &str) -> Result<()> {
        let Some(folder) = &self.record else { return Ok(()) };
        let get = |what: &[&str]| {
            let arguments = [&["get", "-n", self.jobs.namespace.as_str(), "-o", "json"], what].concat();
            serde_json::from_str::<Value>(&self.plane.kubectl(&arguments).stdout)
        };
        let list = get(&["workloads"])?;
        let of_job = |workload: &&Value| {
            let owner = workload["metadata"]["ownerReferences"][0]["name"].as_str().unwrap_or_default();
            owner.starts_with(&format!("{job}-1-"))
        };
        let workload = list["items"].as_array().into_iter().flatten().find(of_job).context("no Workload")?;
        let name = workload["metadata"]["name"].as_str().unwrap_or_default();
        let events = get(&[
            "events.v1.events.k8s.io",
            "--field-selector",
            &format!("regarding.kind=Workload,regarding.name={name}"),
        ])?;
        for (file, document) in [("workload.json", workload), ("events.json", &events["items"])] {
            std::fs::write(folder.join(file), format!("{}\n", serde_json::to_string_pretty(document)?))?;
        }
        Ok(())
    }

    /// Waits until Kueue charges exactly this many GPUs to each cohort.
    async fn charged(&self, gpus: u32) -> Result<[u32; 2]> {
        let charged = async || Ok(Some(self.charge()?).filter(|seen| *seen == [gpus; 2]));
        found_async(&format!("charging {gpus} GPUs to each cohort"), LIMIT, charged).await
    }

    /// Total restarts of all jobs, by restart budget.
    async fn restarts(&self) -> Result<BTreeMap<&'static str, i32>> {
        let mut sums = BTreeMap::from([("preemption", 0), ("infrastructure", 0), ("application", 0)]);
        for restarts in self.list().await?.into_iter().filter_map(|job| job.status?.restarts) {
            *sums.entry("preemption").or_default() += restarts.preemption;
            *sums.entry("infrastructure").or_default() += restarts.infrastructure;
            *sums.entry("application").or_default() += restarts.application;
        }
        Ok(sums)
    }

    /// Ends running pods until all jobs are complete.
    async fn finish(&self) -> Result<()> {
        let are_complete = async || {
            let jobs = self.list().await?;
            if jobs.iter().all(|job| stage_of(job) == Some("Complete")) {
                return Ok(true);
            }
            for job in jobs.iter().filter(|job| stage_of(job) == Some("Running")) {
                let attempt = job.status.as_ref().and_then(|status| status.attempt).unwrap_or(1);
                for rank in 0..GANG.0 {
                    let pod = format!("{}-{attempt}-{rank}", job.name_any());
                    // The previous round may have ended it already.
                    let _ = self.kubelet.send(&self.jobs.namespace, &pod, Command::Exit(0, String::new()));
                }
            }
            Ok(false)
        };
        until_async("complete", LIMIT, are_complete).await.map(drop)
    }
}

/// GPUs that Kueue charges to a ClusterQueue.
fn gpus_charged(queue: &Value) -> u32 {
    let flavors = queue["status"]["flavorsUsage"].as_array().into_iter().flatten();
    let resources = flavors.flat_map(|flavor| flavor["resources"].as_array().into_iter().flatten());
    let total = |resource: &Value| match &resource["total"] {
        Value::String(text) => text.parse().unwrap_or(u32::MAX),
        number => number.as_u64().unwrap_or(0) as u32,
    };
    resources.filter(|resource| resource["name"] == RESOURCE).map(total).sum()
}

/// Seconds since `start`, rounded to tenths.
fn since(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 10.0).round() / 10.0
}
