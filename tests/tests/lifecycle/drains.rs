//! `kubectl drain` of a node with a running job.

use super::training::Training;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use switchyard_tests::{ControlPlane, Ended, Program, TIMEOUT, condition_of, found_async, merge, template_on};

/// Steps between checkpoints.
const INTERVAL: u64 = 20;

fn drain(node: &str, timeout: &str) -> Ended {
    let plane = ControlPlane::shared();
    let config = plane.kubeconfig("admin").display().to_string();
    let arguments = ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data", timeout];
    Program::new(&plane.kubectl_program(), plane.folder(), arguments).env("KUBECONFIG", &config).run(TIMEOUT)
}

/// Last value of a field in a pod's log.
fn last(scene: &Training, pod: &str, field: &str) -> Option<u64> {
    let log = scene.kubelet.log(&scene.namespace, pod);
    log.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok()?[field].as_u64())
}

/// Regression: the drain was refused for as long as the job ran. Now the job saves its state,
/// leaves the node and resumes elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_costs_a_leaving_job_at_most_one_checkpoint_interval() -> Result<()> {
    let scene = Training::on("drains", 3).await?;
    let mut job = scene.job("leaves", &scene.data(), 100_000_000);
    let path = scene.folder.join("checkpoints").display().to_string();
    let own = json!({
        "gangPolicy": {"disruption": "Checkpoint"}, "checkpoint": {"path": path, "everySteps": INTERVAL},
        "template": template_on(&scene.kubelet.nodes()),
    });
    merge(&mut job["spec"], own);
    scene.jobs.create(job).await?;
    let trains = scene.jobs.wait("leaves", "training", |job| {
        let figures = job.status.as_ref().and_then(|status| status.trainer_status.as_ref());
        figures.is_some_and(|figures| figures.step > 2 * INTERVAL as i64)
    });
    let node = trains.await?.status.unwrap().placement.unwrap().nodes[1].node_name.clone();
    let ended = drain(&node, "--timeout=0s");
    ensure!(ended.code == Some(0), "{}{}", ended.stdout, ended.stderr);
    println!("kubectl drain took {:.1} s", ended.time.as_secs_f64());
    let moved = scene.jobs.wait("leaves", "training elsewhere", |job| {
        let status = job.status.as_ref();
        status.is_some_and(|status| status.attempt == Some(2))
            && condition_of(job, "Succeeded").is_some_and(|stage| stage.reason == "Running")
    });
    let status = moved.await?.status.unwrap();
    assert!(status.placement.unwrap().nodes.iter().all(|placed| placed.node_name != node));
    assert_eq!(status.restarts.map(|restarts| (restarts.preemption, restarts.total)), Some((1, 1)));
    let done = last(&scene, "leaves-1-0", "step").context("attempt 1 logged no step")?;
    let resumed = found_async("resumed", TIMEOUT, async || Ok(last(&scene, "leaves-2-0", "resumedStep")));
    let resumed = resumed.await.with_context(|| scene.kubelet.log(&scene.namespace, "leaves-2-0"))?;
    assert!(resumed + INTERVAL >= done, "attempt 1 did {done} steps, and attempt 2 resumed after {resumed}");
    Ok(())
}

/// The default: `kubectl drain` shows why it is blocked, and the job keeps training.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_a_job_that_stays() -> Result<()> {
    let scene = Training::on("stays", 2).await?;
    scene.jobs.create(scene.job("stays", &scene.data(), 100_000_000)).await?;
    let runs = scene.jobs.wait_stage("stays", "Running").await?;
    let node = runs.status.unwrap().placement.unwrap().nodes[1].node_name.clone();
    let ended = drain(&node, "--timeout=1s");
    ensure!(ended.code == Some(1) && ended.stderr.contains("would violate the pod's disruption budget"), "{ended:?}");
    let waits_for_drain =
        |job: &_| condition_of(job, "Succeeded").is_some_and(|stage| stage.message.contains("a drain waits"));
    let waiting = scene.jobs.wait("stays", "reported", waits_for_drain).await?;
    assert_eq!(waiting.status.unwrap().attempt, Some(1));
    // As the message says, suspending the job unblocks the drain.
    scene.jobs.patch("stays", json!({"spec": {"suspend": true}})).await?;
    let ended = drain(&node, "--timeout=0s");
    ensure!(ended.code == Some(0), "{}{}", ended.stdout, ended.stderr);
    Ok(())
}
