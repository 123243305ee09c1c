//! Scenarios with a real Kueue that schedules by topology and waits for ready pods: which side
//! chooses the nodes, the cost of an eviction, and when quota is released.

use super::{gpus_charged, since};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;
use switchyard_tests::gpus::{RESOURCE, gpu_job};
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, condition_of, kueue, merge,
    stage_of, start_controller, until_async,
};

const GPUS: u32 = 8;
const RACKS: [&str; 4] = ["r1", "r2", "r1", "r2"];
const RACK: &str = "example.com/rack";
const HOST: &str = "kubernetes.io/hostname";
/// How long Kueue waits for the pods of an admitted gang to become ready, and for a pod that is no
/// longer ready.
const READY_SECONDS: u64 = 30;
const RECOVERY_SECONDS: u64 = 20;
const LIMIT: Duration = Duration::from_secs(180);

struct Scenes {
    plane: ControlPlane,
    jobs: Jobs,
    kubelet: Kubelet,
}

pub(crate) async fn play(folder: &Path) -> Result<Value> {
    let plane = ControlPlane::start(&Options { controller_manager: true, scheduler: true, ..Options::default() })?;
    plane.install_crds().await?;
    plane.apply_chart(&[])?;
    let waits = json!({"waitForPodsReady": {
        "timeout": format!("{READY_SECONDS}s"), "recoveryTimeout": format!("{RECOVERY_SECONDS}s"),
        "requeuingStrategy": {"backoffBaseSeconds": 1},
    }});
    let kueue = kueue::start(&plane, folder, waits).await?;
    let namespace = plane.namespace("scenes").await?;
    let mut options = KubeletOptions::new("node", RACKS.len());
    options.capacity.push((RESOURCE.into(), GPUS.to_string()));
    let kubelet = Kubelet::start(plane.config().await?, options).await?;
    let kubeconfig = Some(plane.controller_kubeconfig()?);
    let controller = start_controller(&plane, "controller", &ControllerOptions { kubeconfig, ..Default::default() })?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let scenes = Scenes { plane, jobs, kubelet };
    let result = scenes.all().await;
    if result.is_err() {
        println!("{}\n{}", kueue.tail(), controller.tail());
    }
    result
}

impl Scenes {
    async fn all(&self) -> Result<Value> {
        self.objects().await?;
        let topology = json!({
            "requiredRack": self.topology("rack", json!({"kueue.x-k8s.io/podset-required-topology": RACK})).await?,
            "withoutAnnotation": self.topology("plain", json!({})).await?,
            "twoPodsOfAGangOnAHost": self.packed().await?,
        });
        Ok(json!({
            "topologyAwareScheduling": topology, "podsReadyTimeout": self.not_ready().await?,
            "unequalEnds": self.unequal_ends().await?,
        }))
    }

    /// Creates nodes in two racks, a queue with topology-aware scheduling and one without.
    async fn objects(&self) -> Result<()> {
        let nodes = Api::<Node>::all(self.jobs.client.clone());
        for (node, rack) in self.kubelet.nodes().iter().zip(RACKS) {
            let labels = json!({"metadata": {"labels": {RACK: rack, HOST: node, "pool": "gpu"}}});
            nodes.patch(node, &PatchParams::default(), &Patch::Merge(labels)).await?;
        }
        let kind = |kind: &str, name: &str, spec: Value| json!({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec});
        let mut list = vec![
            kind("Topology", "racks", json!({"levels": [{"nodeLabel": RACK}, {"nodeLabel": HOST}]})),
            kind("ResourceFlavor", "by-topology", json!({"nodeLabels": {"pool": "gpu"}, "topologyName": "racks"})),
            kind("ResourceFlavor", "by-quota", json!({"nodeLabels": {"pool": "gpu"}})),
        ];
        for flavor in ["by-topology", "by-quota"] {
            let quota = |name: &str, amount: Value| json!({"name": name, "nominalQuota": amount});
            let gpus = GPUS * RACKS.len() as u32;
            let resources = [quota("cpu", json!(1000)), quota("memory", json!("1Ti")), quota(RESOURCE, json!(gpus))];
            let group = json!({
                "coveredResources": ["cpu", "memory", RESOURCE], "flavors": [{"name": flavor, "resources": resources}],
            });
            list.push(kind("ClusterQueue", flavor, json!({"namespaceSelector": {}, "resourceGroups": [group]})));
            let mut queue = kind("LocalQueue", flavor, json!({"clusterQueue": flavor}));
            queue["metadata"]["namespace"] = self.jobs.namespace.clone().into();
            list.push(queue);
        }
        let list = json!({"apiVersion": "v1", "kind": "List", "items": list});
        let ended = self.plane.kubectl_with(&["apply", "-f", "-"], &list.to_string());
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        Ok(())
    }

    async fn create(&self, name: &str, queue: &str, gpus: u32, annotations: Value) -> Result<()> {
        let mut job = gpu_job(name, 2, gpus, "run");
        job["metadata"]["labels"] = json!({"kueue.x-k8s.io/queue-name": queue});
        merge(&mut job["spec"], json!({"template": {"metadata": {"annotations": annotations}}}));
        self.jobs.create(job).await?;
        Ok(())
    }

    /// S8: the gang runs on the nodes to which Kueue pinned its pods, in the first attempt.
    async fn topology(&self, name: &str, annotations: Value) -> Result<Value> {
        let start = Instant::now();
        self.create(name, "by-topology", GPUS, annotations).await?;
        self.jobs.wait_stage(name, "Running").await?;
        let seconds = since(start);
        let job = self.jobs.api().get(name).await?;
        let placement = job.status.as_ref().and_then(|status| status.placement.clone()).context("no placement")?;
        let pods: BTreeMap<String, Pod> =
            self.jobs.pods().await?.into_iter().map(|pod| (pod.name_any(), pod)).collect();
        let mut pinned = Vec::new();
        for (rank, placed) in placement.nodes.iter().enumerate() {
            let spec = pods.get(&format!("{name}-1-{rank}")).and_then(|pod| pod.spec.clone()).context("no pod")?;
            let host = spec.node_selector.and_then(|selector| selector.get(HOST).cloned());
            let host = host.context("Kueue pinned no pod: it does not plan by topology")?;
            ensure!(host == placed.node_name && spec.node_name == Some(host.clone()), "{name}: {host} and {placed:?}");
            pinned.push(host);
        }
        let racks: Vec<&str> = pinned.iter().filter_map(|host| self.rack(host)).collect();
        ensure!(name != "rack" || racks[0] == racks[1], "{pinned:?}");
        self.finish(name).await?;
        Ok(json!({"attempts": attempt(&job), "pinnedPods": pinned.len(), "secondsToRunning": seconds}))
    }

    /// Kueue packs both pods of a gang onto one host, but Switchyard gives each pod its own node.
    /// The status reports the conflict, and Kueue reclaims its quota.
    async fn packed(&self) -> Result<Value> {
        let name = "packed";
        self.create(name, "by-topology", GPUS / 2, json!({})).await?;
        let says = |job: &TrainJob| {
            let message = condition_of(job, "Placed").map(|placed| placed.message.clone()).unwrap_or_default();
            message.contains("pinned to")
        };
        let ended = |job: &TrainJob| says(job) || stage_of(job) == Some("Running");
        let job = self.jobs.wait(name, "a verdict", ended).await?;
        let message = condition_of(&job, "Placed").map(|placed| placed.message.clone());
        let stage = stage_of(&job).map(str::to_string);
        self.jobs.api().delete(name, &Default::default()).await?;
        self.jobs.wait_gone(name).await?;
        self.charged("by-topology", 0).await?;
        Ok(json!({"stage": stage, "message": message}))
    }

    /// S9: Kueue has free quota but the nodes are full. Kueue evicts the gang, which requeues and
    /// runs once there is room.
    async fn not_ready(&self) -> Result<Value> {
        let name = "unready";
        let blockers = self.block(3).await?;
        let start = Instant::now();
        self.create(name, "by-quota", GPUS, json!({})).await?;
        let evicted = |job: &TrainJob| attempt(job) > 1;
        let job = self.jobs.wait(name, "the next attempt", evicted).await?;
        let seconds_to_eviction = since(start);
        let restarts = restarts(&job);
        for pod in &blockers {
            self.jobs.pods_api().delete(pod, &Default::default()).await?;
        }
        let start = Instant::now();
        self.jobs.wait_stage(name, "Running").await?;
        let seconds_to_running = since(start);
        self.charged("by-quota", GPUS * 2).await?;
        self.finish(name).await?;
        self.charged("by-quota", 0).await?;
        Ok(json!({
            "evictedAfterSeconds": seconds_to_eviction, "restarts": restarts, "runningAfterSeconds": seconds_to_running, "gpusChargedAtTheEnd": 0,
        }))
    }

    /// S10: one pod of a gang completes, and the other keeps running for longer than Kueue
    /// tolerates a gang that is not ready.
    async fn unequal_ends(&self) -> Result<Value> {
        let name = "unequal";
        self.create(name, "by-quota", GPUS, json!({})).await?;
        self.jobs.wait_stage(name, "Running").await?;
        self.kubelet.send(&self.jobs.namespace, &format!("{name}-1-1"), Command::Exit(0, String::new()))?;
        let end = Instant::now() + Duration::from_secs(2 * RECOVERY_SECONDS);
        while Instant::now() < end {
            if attempt(&self.jobs.api().get(name).await?) > 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        let job = self.jobs.api().get(name).await?;
        let is_evicted = attempt(&job) > 1;
        let result =
            json!({"recoveryTimeoutSeconds": RECOVERY_SECONDS, "evicted": is_evicted, "restarts": restarts(&job)});
        if is_evicted {
            self.jobs.wait_stage(name, "Running").await?;
        }
        self.finish(name).await?;
        self.charged("by-quota", 0).await?;
        Ok(result)
    }

    /// Occupies this many nodes with pods unknown to Kueue; returns their names.
    async fn block(&self, nodes: usize) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for node in self.kubelet.nodes().into_iter().take(nodes) {
            let limits = json!({"cpu": "1", RESOURCE: GPUS.to_string()});
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": format!("other-{node}")},
                "spec": {"nodeName": node, "containers": [{"name": "main", "image": "i", "resources": {"limits": limits}}]},
            }))?;
            names.push(self.jobs.pods_api().create(&PostParams::default(), &pod).await?.name_any());
        }
        Ok(names)
    }

    async fn finish(&self, name: &str) -> Result<()> {
        let is_complete = async || {
            let job = self.jobs.api().get(name).await?;
            if stage_of(&job) == Some("Complete") {
                return Ok(true);
            }
            for rank in 0..2 {
                let pod = format!("{name}-{}-{rank}", attempt(&job));
                // The previous round may have ended it already.
                let _ = self.kubelet.send(&self.jobs.namespace, &pod, Command::Exit(0, String::new()));
            }
            Ok(false)
        };
        until_async(&format!("complete: {name}"), LIMIT, is_complete).await.map(drop)
    }

    /// Waits until Kueue charges exactly this many GPUs to a queue.
    async fn charged(&self, queue: &str, gpus: u32) -> Result<()> {
        let is_charged = async || {
            let ended = self.plane.kubectl(&["get", "clusterqueue", queue, "-o", "json"]);
            Ok(gpus_charged(&serde_json::from_str(&ended.stdout)?) == gpus)
        };
        until_async(&format!("charging {gpus} GPUs to {queue}"), LIMIT, is_charged).await.map(drop)
    }

    fn rack(&self, host: &str) -> Option<&'static str> {
        self.kubelet.nodes().iter().zip(RACKS).find(|(node, _)| *node == host).map(|(_, rack)| rack)
    }
}

fn attempt(job: &TrainJob) -> i32 {
    job.status.as_ref().and_then(|status| status.attempt).unwrap_or(1)
}

fn restarts(job: &TrainJob) -> Value {
    let restarts = job.status.as_ref().and_then(|status| status.restarts.clone()).unwrap_or_default();
    json!({"preemption": restarts.preemption, "infrastructure": restarts.infrastructure, "application": restarts.application})
}
