//! Jobs that take turns under the default queue policy end with the weights of an uninterrupted
//! run. `cargo xtask bench preemption` runs ten jobs and keeps the result.

use crate::e2e::faults::{checkpointed, volume};
use crate::e2e::first_job::{events, run_alone};
use crate::e2e::times::{machine, steps};
use crate::e2e::{Cluster, TEAM, stage};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::time::Instant;
use switchyard_tests::chaos;

#[test]
fn preempted_jobs_end_with_the_weights_of_an_uninterrupted_run() -> Result<()> {
    let (count, total_steps) = (chaos::size(3, 10), chaos::size(8000, 50_000));
    let (quantum, threshold) = (chaos::size(5, 10), chaos::size(5, 10));
    let cluster = Cluster::start(2)?;
    cluster.install_with(&format!(
        "--set nodeAgent.enabled=false --set queue.quantumSeconds={quantum} --set 'queue.thresholdsSeconds={{{threshold}}}' \
         --set queue.preemptionSeconds=0"
    ))?;
    cluster.team(TEAM)?;
    cluster.sh(&format!("kubectl --namespace {TEAM} create configmap text --from-file=docs"))?;
    volume(&cluster)?;

    let memory = most_memory(&cluster)?;
    let jobs: Vec<Value> = (0..count).map(|number| job(number, total_steps, &memory)).collect::<Result<_>>()?;
    let begin = Instant::now();
    cluster.apply(TEAM, &jobs[0])?;
    // It has both nodes and comes first, so it is preempted. By then it must have made steps.
    steps(&cluster, "job-0", 1, begin)?;
    for job in &jobs[1..] {
        cluster.apply(TEAM, job)?;
    }
    let mut ended = Vec::new();
    for number in 0..count {
        let name = format!("job-{number}");
        let job = cluster.wait_job(TEAM, &name, "over", |job| ["Complete", "Failed"].contains(&stage(job)))?;
        ensure!(stage(&job) == "Complete", "{name}: {:#}", job["status"]);
        ended.push(job);
    }
    let seconds = begin.elapsed().as_secs();

    let (mut preemptions, mut resumed) = (Vec::new(), 0);
    for (job, ended) in jobs.iter().zip(&ended) {
        let name = job["metadata"]["name"].as_str().context("a name")?;
        let restarts = &ended["status"]["restarts"];
        let preempted = restarts["preemption"].as_u64().unwrap_or(0);
        ensure!(
            restarts["total"].as_u64().unwrap_or(0) == preempted,
            "{name} restarted for another reason: {restarts}"
        );
        let log = cluster.sh(&format!("kubectl --namespace {TEAM} logs {name}-{}-0", ended["status"]["attempt"]))?;
        let from = event(&log, "ready")?["resumedStep"].as_u64();
        let digest = event(&log, "finished")?["weightsDigest"].clone();
        let alone = fs::read_to_string(run_alone(&cluster, name, job)?.join("events.jsonl"))?;
        let expected = event(&alone, "finished")?["weightsDigest"].clone();
        ensure!(
            digest == expected,
            "{name} has the weights {digest} after {preempted} preemptions, {expected} without"
        );
        println!("         {name}: preempted {preempted} times, resumed from step {from:?}, weights {digest}");
        preemptions.push(preempted);
        resumed += usize::from(from.is_some());
    }
    let first = preemptions[0];
    ensure!(first > 0 && resumed > 0, "preemptions: {preemptions:?}; {resumed} resumed from a checkpoint");
    let result = json!({
        "jobs": count, "steps": total_steps, "quantumSeconds": quantum, "thresholdSeconds": threshold,
        "seconds": seconds, "preemptions": preemptions, "preempted": preemptions.iter().filter(|count| **count > 0).count(),
        "resumed": resumed, "equalDigests": count, "command": "cargo xtask bench preemption", "machine": machine()?,
    });
    chaos::report("preemption", &result)
}

/// More than half of a node's memory, so that a node runs one pod at a time.
fn most_memory(cluster: &Cluster) -> Result<String> {
    let kibibytes = cluster.sh("kubectl get node node-1 --output=jsonpath='{.status.allocatable.memory}'")?;
    let kibibytes: u64 = kibibytes.strip_suffix("Ki").context("the kubelet reports KiB")?.parse()?;
    Ok(format!("{}Ki", kibibytes / 5 * 3))
}

/// A job of one node, or every third one of both. It saves checkpoints, because a job that may lose
/// all of its work makes way only for larger ones.
/// Its own seed gives it weights of its own.
fn job(number: usize, total_steps: usize, memory: &str) -> Result<Value> {
    let name = format!("job-{number}");
    let mut job = checkpointed(&name)?;
    let spec = &mut job["spec"];
    spec["trainer"]["numNodes"] = if number.is_multiple_of(3) { 2 } else { 1 }.into();
    spec["trainer"]["numProcPerNode"] = 1.into();
    spec["trainer"]["resourcesPerNode"]["limits"]["memory"] = memory.into();
    spec["engine"]["steps"] = total_steps.into();
    spec["engine"]["fetchEverySteps"] = 100.into();
    spec["engine"]["seed"] = number.into();
    spec["checkpoint"] = json!({"path": format!("/checkpoints/{name}"), "periodSeconds": 5});
    Ok(job)
}

/// The first event of this kind.
fn event(log: &str, kind: &str) -> Result<Value> {
    events(log).find(|event| event["event"] == kind).with_context(|| format!("no event {kind}"))
}
