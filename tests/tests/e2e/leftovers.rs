//! Deleting or expiring a job removes all of its objects and node state, whatever else happens in
//! the cluster.
//!
//! `cargo xtask bench leftovers` runs more rounds and keeps the result; `SWITCHYARD_SEED` selects
//! another sequence.

use crate::e2e::faults::{checkpointed, volume};
use crate::e2e::random_jobs::RandomJobs;
use crate::e2e::{Cluster, JOBS, TEAM};
use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use switchyard_tests::chaos;
use switchyard_tests::drivers::ClaimDriver;
use switchyard_tests::gpus::{GpuNodes, Machine, gpu_job};
use switchyard_tests::nodes::leftovers_of;

/// Kinds of objects created for a job.
const MADE: [&str; 7] =
    ["configmap", "networkpolicy", "pod", "poddisruptionbudget", "resourceclaim", "secret", "service"];
/// Kinds of node state that pods have.
const ON_NODES: [&str; 6] = ["address", "cable", "cgroup", "folder", "mount", "process"];

#[tokio::test(flavor = "multi_thread")]
async fn jobs_and_faults_leave_nothing_behind() -> Result<()> {
    let (seed, jobs) = (chaos::seed().unwrap_or(20_261_122), chaos::size(6, 20));
    let mut cluster = Cluster::start(2)?;
    cluster.install()?;
    let drivers = gpus(&cluster).await?;
    cluster.team(TEAM)?;
    cluster.sh(&format!("kubectl --namespace {TEAM} create configmap text --from-file=docs"))?;
    volume(&cluster)?;
    let kinds = kinds(&cluster)?;
    cluster.until("the namespace has its default objects", || {
        let objects = objects(&cluster, &kinds)?;
        Ok(["configmap/kube-root-ca.crt", "serviceaccount/default"].iter().all(|name| objects.contains(*name)))
    })?;
    let before = objects(&cluster, &kinds)?;
    expired(&cluster, &kinds, &before)?;

    let begin = Instant::now();
    println!("seed {seed}");
    let mut random = RandomJobs::new(seed);
    for number in 0..jobs {
        random.next(&mut cluster, number)?;
    }
    // A fault may have suspended a job that must end by itself.
    for name in &random.expire {
        cluster.suspend(name, false)?;
    }
    for name in &random.expire {
        cluster.until(&format!("{name} has expired"), || Ok(cluster.get(TEAM, JOBS, name)?.is_none()))?;
    }
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} --all"))?;
    gone(&cluster, &kinds, &before)?;
    let decided = decided(&cluster)?;

    cluster.sh("helm uninstall switchyard --namespace switchyard-system --wait")?;
    cluster.sh(&format!("kubectl delete namespace {TEAM} switchyard-system"))?;
    let pods = cluster.sh("kubectl get pods --all-namespaces -o name")?;
    ensure!(pods.is_empty(), "{pods}");
    let cleaned = cluster.until("the nodes have no pod leftovers", || Ok(cluster.nodes.pod_leftovers()?.is_empty()));
    ensure!(cleaned.is_ok(), "{:#?}", cluster.nodes.pod_leftovers()?);
    let (number, shims) = (cluster.nodes.number(), cluster.nodes.shims());
    drop(drivers);
    drop(cluster);
    ensure!(leftovers_of(number)?.is_empty(), "{:#?}", leftovers_of(number)?);
    let result = json!({
        "seed": seed, "jobs": jobs, "drawn": random.counts, "decided": decided, "seconds": begin.elapsed().as_secs(),
        "objectsLeft": 0, "leftOnNodes": 0, "leftOnTheMachine": 0, "shimsLostByContainerd": shims,
        "command": "cargo xtask bench leftovers",
    });
    chaos::report("leftovers", &result)
}

/// Number of controller events by reason.
fn decided(cluster: &Cluster) -> Result<BTreeMap<String, u64>> {
    let reasons = "jsonpath={range .items[*]}{.reason} {end}";
    let events =
        format!("kubectl --namespace {TEAM} get events.events.k8s.io --field-selector regarding.kind=TrainJob");
    let mut counts = BTreeMap::new();
    for reason in cluster.sh(&format!("{events} -o '{reasons}'"))?.split_whitespace() {
        *counts.entry(reason.to_owned()).or_default() += 1;
    }
    Ok(counts)
}

/// Offers GPUs for claims on all nodes. Deletes the agents, which would report that there are none.
async fn gpus(cluster: &Cluster) -> Result<Vec<ClaimDriver>> {
    cluster.sh("kubectl --namespace switchyard-system delete daemonset switchyard-node-agent")?;
    cluster.sh("kubectl --namespace switchyard-system wait --for=delete pod -l app.kubernetes.io/component=node-agent --timeout=600s")?;
    let gpus = GpuNodes::start(cluster.nodes.plane.client().await?).await?;
    let mut drivers = Vec::new();
    for node in cluster.nodes.names() {
        let report = Machine::of("f04-h200").report(&node);
        gpus.report(&report).await?;
        drivers.push(ClaimDriver::start(&cluster.nodes, &gpus, &report).await?);
    }
    Ok(drivers)
}

/// Every namespaced kind except events, which outlive their objects by an hour.
fn kinds(cluster: &Cluster) -> Result<String> {
    let output = cluster.sh("kubectl api-resources --namespaced --verbs=list -o name")?;
    let kinds: Vec<&str> = output.lines().filter(|kind| !kind.starts_with("events")).collect();
    ensure!(kinds.len() >= 20 && kinds.contains(&JOBS) && kinds.contains(&"pods"), "{kinds:?}");
    Ok(kinds.join(","))
}

/// All objects of the namespace, as kind and name.
fn objects(cluster: &Cluster, kinds: &str) -> Result<BTreeSet<String>> {
    let ended = cluster.nodes.plane.kubectl(&["--namespace", TEAM, "get", kinds, "-o", "name"]);
    ensure!(ended.code == Some(0), "{}", ended.stderr);
    Ok(ended.stdout.lines().map(str::to_owned).collect())
}

/// Waits until the namespace holds exactly the objects from before the jobs.
fn gone(cluster: &Cluster, kinds: &str, before: &BTreeSet<String>) -> Result<()> {
    let is_as_before = cluster.until("the jobs have left nothing", || Ok(objects(cluster, kinds)? == *before));
    let now = objects(cluster, kinds)?;
    ensure!(is_as_before.is_ok(), "left: {:#?}\nmissing: {:#?}", &now - before, before - &now);
    Ok(())
}

/// Two jobs that expire create every kind of object and node state; seconds later all of it is
/// gone.
fn expired(cluster: &Cluster, kinds: &str, before: &BTreeSet<String>) -> Result<()> {
    let mut trains = checkpointed("trains")?;
    trains["spec"]["engine"]["steps"] = 100.into();
    let mut sleeps = gpu_job("sleeps", 2, 3, "");
    sleeps["spec"]["trainer"]["command"] = json!(["sleep", "5"]);
    sleeps["spec"]["trainer"]["image"] = switchyard_tests::nodes::TOOLS.into();
    sleeps["spec"]["template"] = trains["spec"]["template"].clone();
    sleeps["spec"]["template"]["spec"]["securityContext"]["runAsUser"] = 1000.into();
    for job in [&mut trains, &mut sleeps] {
        job["spec"]["ttlSecondsAfterFinished"] = 3.into();
        cluster.apply(TEAM, job)?;
    }
    let (mut made, mut on_nodes) = (BTreeSet::new(), BTreeSet::new());
    let command = ["--namespace", TEAM, "get", &MADE.join(","), "-l", "training.switchyard.dev/job-uid", "-o", "name"];
    let begin = Instant::now();
    loop {
        let output = cluster.nodes.plane.kubectl(&command).stdout;
        made.extend(output.lines().filter_map(|line| line.split(['.', '/']).next()).map(str::to_owned));
        on_nodes
            .extend(cluster.nodes.pod_leftovers()?.iter().filter_map(|what| what.split(' ').nth(1)).map(str::to_owned));
        let remaining = cluster.sh(&format!("kubectl --namespace {TEAM} get {JOBS} -o name"))?;
        if remaining.is_empty() {
            break;
        }
        ensure!(begin.elapsed() < crate::e2e::TIMEOUT, "{remaining} are still there");
    }
    // A poll on a busy machine can miss the three seconds for which a job is complete.
    let complete = || Ok(decided(cluster)?.get("Complete") == Some(&2));
    cluster.until("both jobs have completed, by their events", complete)?;
    ensure!(made.iter().eq(MADE), "got the objects {made:?}; expected {MADE:?}");
    ensure!(on_nodes.iter().eq(ON_NODES), "got {on_nodes:?} on the nodes; expected {ON_NODES:?}");
    gone(cluster, kinds, before)
}
