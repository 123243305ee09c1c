//! Exact GPUs by claims, from `kubectl apply` to the container's environment.

use crate::e2e::gpu_nodes::GpuCluster;
use crate::e2e::{JOBS, TEAM, message, predicted, stage};
use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use switchyard_core::placement::gpus::MinLink;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::cluster::machine::{Machine, Shapes};
use switchyard_tests::drivers::VISIBLE;
use switchyard_tests::gpus::{DRIVER, gpu_job};
use switchyard_tests::history::{Fact, Violation, double_gpus};
use switchyard_tests::nodes::TOOLS;
use switchyard_tests::{merge, template_on};

/// GPUs per pod. The mesh has different kinds of links between pairs, so the choice matters.
const PAIR: u32 = 2;
/// More than half of a node's GPUs.
const MAX_JOBS: u32 = 5;

/// A job with one pod on this node that runs until it is stopped.
fn job(name: &str, node: &str, gpus: u32) -> Value {
    let mut job = gpu_job(name, 1, gpus, "");
    let command = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"];
    merge(&mut job["spec"]["trainer"], json!({"image": TOOLS, "command": command}));
    job["spec"]["template"] = template_on(&[node.into()]);
    merge(
        &mut job["spec"]["template"]["spec"],
        json!({
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "trainer",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        }),
    );
    job
}

fn set(values: &Value) -> BTreeSet<String> {
    values.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
}

impl GpuCluster {
    fn report(&self, node: &str) -> Result<&GPUTopology> {
        self.reports.iter().find(|report| report.name_any() == node).with_context(|| format!("no report of {node}"))
    }

    /// GPUs that the node's kubelet gave to a pod by its claim, as the node's agent reports them.
    fn reported_gpus(&self, node: &str, pod: &str) -> Result<BTreeSet<String>> {
        let report = self.cluster.get("", "gputopology", node)?.context("no report")?;
        let uses = report["status"]["inUse"].as_array().into_iter().flatten();
        let gpus = &self.report(node)?.status.as_ref().context("no status")?.gpus;
        let uuid = |entry: &Value| {
            let is_claim = entry["source"] == "DynamicResource" && entry["claim"]["name"] == pod;
            let found = gpus.iter().find(|gpu| entry["device"] == format!("gpu-{}", gpu.index));
            found.filter(|_| is_claim).map(|gpu| gpu.uuid.clone()).with_context(|| format!("not by the claim: {entry}"))
        };
        uses.filter(|entry| entry["pod"] == pod && entry["namespace"] == TEAM).map(uuid).collect()
    }

    /// Returns the GPUs of a running single-pod job, after checking that all sources agree.
    async fn gpus_of(&self, name: &str) -> Result<BTreeSet<String>> {
        let job = self.cluster.wait_job(TEAM, name, "running", |job| stage(job) == "Running")?;
        let (attempt, placed) = (&job["status"]["attempt"], &job["status"]["placement"]["nodes"][0]);
        let pod = format!("{name}-{attempt}-0");
        let node = placed["nodeName"].as_str().context("no node")?;
        let visible = self.cluster.sh(&format!("kubectl --namespace {TEAM} exec {pod} -- sh -c 'echo ${VISIBLE}'"))?;
        let planned = set(&placed["gpus"]);
        ensure!(job["status"]["deviceAllocation"] == "Claims", "{:#}", job["status"]);
        for (who, gpus) in [
            ("the claim", self.gpus.allocated(TEAM).await?.remove(&pod).unwrap_or_default()),
            ("the container", visible.trim().split(',').map(str::to_string).collect()),
        ] {
            ensure!(gpus == planned, "{pod}: {who} has {gpus:?}; the status {planned:?}");
        }
        // The agent queries the kubelet every second, so its report can still describe a deleted
        // pod of the same name.
        let last = RefCell::default();
        let is_reported = || {
            *last.borrow_mut() = self.reported_gpus(node, &pod)?;
            Ok(*last.borrow() == planned)
        };
        self.cluster
            .until(&format!("the agent of {node} reports {pod}"), is_reported)
            .with_context(|| format!("{pod}: got {last:?} from the kubelet, planned {planned:?}"))?;
        Ok(planned)
    }

    /// GPUs that the scheduler chooses for a claim that requests only a count: the first free ones.
    async fn first_fit(&self, node: &str, count: u32) -> Result<BTreeSet<String>> {
        // A kubelet that has not released a claim yet refuses one of the same name.
        let name = format!("any-{count}-of-{node}");
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "gpus", "exactly": {"deviceClassName": DRIVER, "count": count}}]}},
        });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "containers": [{"name": "main", "image": TOOLS, "resources": {"claims": [{"name": "gpus"}]}}],
                "resourceClaims": [{"name": "gpus", "resourceClaimName": name}],
                "nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 0,
            },
        });
        for object in [claim, pod] {
            self.cluster.apply("default", &object)?;
        }
        self.cluster.sh(&format!("kubectl wait --for=condition=Ready pod/{name} --timeout=600s"))?;
        let got = self.gpus.allocated("default").await?.remove(&name).context("no claim")?;
        self.cluster.sh(&format!("kubectl delete pod/{name} resourceclaim/{name}"))?;
        ensure!(got.len() == count as usize, "{got:?}");
        Ok(got)
    }

    /// Waits until no pod or claim is left and the containers' CDI files are gone from the node.
    fn given_back(&self, node: &str) -> Result<()> {
        self.cluster.until("the GPUs are given back", || {
            let left = self.cluster.sh(&format!("kubectl --namespace {TEAM} get pods,resourceclaims -o name"))?;
            let files = std::fs::read_dir(self.cluster.nodes.path(node, "/run/cdi")?)?.count();
            Ok(left.is_empty() && files == 0)
        })?;
        Ok(())
    }

    /// Checks that a waiting job reports which GPUs it lacks.
    fn waits(&self, name: &str) -> Result<()> {
        let job = self
            .cluster
            .wait_job(TEAM, name, "waiting for GPUs", |job| stage(job) == "Queued" && message(job).contains("room"))?;
        println!("         {name}: {}", message(&job));
        ensure!(message(&job).contains(&format!("no node has room for {MAX_JOBS} GPUs")), "{}", message(&job));
        ensure!(job["status"]["placement"].is_null(), "{:#}", job["status"]);
        Ok(())
    }
}

/// Predicted bandwidth of these GPUs for a single-node job, from the planner's tables; MB/s.
fn value(machine: &Machine, gpus: &BTreeSet<String>) -> i64 {
    machine.shape.value(machine.mask(gpus.iter().map(String::as_str)), None, MinLink::System).into()
}

/// The claim's allocation, the kubelet's report, the container's environment and the status all
/// name the same GPUs, and those beat the scheduler's own choice.
pub(crate) async fn the_container_gets_the_planned_gpus(nodes: &GpuCluster) -> Result<()> {
    let mut gains = BTreeMap::new();
    for report in &nodes.reports {
        let node = report.name_any();
        let machine = Shapes::default().machine(report).map_err(anyhow::Error::msg)?;
        let first = nodes.first_fit(&node, PAIR).await?;
        let name = format!("pair-{node}");
        nodes.cluster.apply(TEAM, &job(&name, &node, PAIR))?;
        let got = nodes.gpus_of(&name).await?;
        let (ours, theirs) = (value(&machine, &got), value(&machine, &first));
        let reported = predicted(&nodes.cluster.job(TEAM, &name)?)?.context("no prediction")?;
        ensure!(reported == ours, "{name}: {reported} MB/s in the status, {ours} by its GPUs");
        ensure!(ours >= theirs, "{name}: {ours} MB/s, first-fit {theirs}");
        println!(
            "         {PAIR} GPUs of {node}: {} GB/s, {} more than the first {PAIR}",
            ours as f64 / 1e3,
            (ours - theirs) as f64 / 1e3
        );
        gains.insert(node.clone(), (ours - theirs, got != first));
        nodes.cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {name}"))?;
        nodes.given_back(&node)?;
    }
    ensure!(gains.values().any(|(gain, differs)| *gain > 0 && *differs), "never better than first-fit: {gains:?}");
    Ok(())
}

/// Each job wants more than half the GPUs. One runs, and the other waits until the first is
/// suspended, and then again until the other has ended.
pub(crate) async fn two_jobs_compete_for_one_node(nodes: &GpuCluster) -> Result<()> {
    let (cluster, node) = (&nodes.cluster, nodes.reports[0].name_any());
    let both = json!({"apiVersion": "v1", "kind": "List", "items": [job("one", &node, MAX_JOBS), job("two", &node, MAX_JOBS)]});
    cluster.apply(TEAM, &both)?;
    let mut names = ["one", "two"];
    cluster.until("one of the jobs runs", || {
        Ok([&names[0], &names[1]].iter().any(|name| cluster.job(TEAM, name).is_ok_and(|job| stage(&job) == "Running")))
    })?;
    if stage(&cluster.job(TEAM, names[1])?) == "Running" {
        names.reverse();
    }
    let [first, second] = names;
    let held = nodes.gpus_of(first).await?;
    nodes.waits(second)?;

    let begin = Instant::now();
    ensure!(cluster.suspend(first, true)?, "{first} was deleted");
    let list = format!(
        "kubectl --namespace {TEAM} get pods,resourceclaims -l training.switchyard.dev/job-name={first} -o name"
    );
    cluster.until("a suspended job has neither pods nor claims", || Ok(cluster.sh(&list)?.is_empty()))?;
    let holds = nodes.gpus_of(second).await?;
    println!("{:5.1} s  from suspend to the other job's containers", begin.elapsed().as_secs_f64());
    ensure!(stage(&cluster.job(TEAM, first)?) == "Suspended", "{:#}", cluster.job(TEAM, first)?["status"]);
    // Two sets of five out of eight GPUs must overlap.
    ensure!(!held.is_disjoint(&holds), "{held:?} and {holds:?}");

    ensure!(cluster.suspend(first, false)?, "{first} was deleted");
    nodes.waits(first)?;
    cluster.sh(&format!("kubectl --namespace {TEAM} exec {second}-1-0 -- kill -TERM 1"))?;
    cluster.wait_job(TEAM, second, "complete", |job| stage(job) == "Complete")?;
    nodes.gpus_of(first).await?;
    // The new job reuses the names of its predecessor's pod and claim, which may not be gone yet.
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {first}"))?;
    cluster.apply(TEAM, &job(first, &node, MAX_JOBS))?;
    nodes.gpus_of(first).await?;
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} --all"))?;
    nodes.given_back(&node)
}

/// At no revision was a GPU in two claims, or planned for two pods.
pub(crate) async fn no_gpu_was_shared(nodes: &GpuCluster) -> Result<()> {
    let history = nodes.recorder.history().await?;
    let mut found: Vec<Violation> = double_gpus(&history);
    let mut allocated = BTreeSet::new();
    history.walk(|_, world, change| {
        let Fact::Claim(claim) = &change.fact else { return };
        allocated.extend((!claim.devices.is_empty()).then_some(&change.uid));
        let mut holders: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, claim) in world.claims.values() {
            world.gpus_of(claim).for_each(|gpu| holders.entry(gpu).or_default().push(name));
        }
        let shared = holders.into_iter().filter(|(_, names)| names.len() > 1);
        found.extend(shared.map(|(gpu, names)| Violation {
            revision: change.revision,
            name: change.name.clone(),
            text: format!("{gpu} is in the claims {names:?}"),
        }));
    });
    ensure!(found.is_empty(), "{found:#?}");
    // Claims of first-fit, of one job per node, and of the two jobs, one of which was suspended and
    // applied again.
    ensure!(allocated.len() >= 8, "only {} claims had GPUs", allocated.len());
    println!("         {} changes, {} claims with GPUs: none shared", history.changes().len(), allocated.len());
    Ok(())
}
