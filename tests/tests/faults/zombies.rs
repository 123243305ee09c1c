//! G6: the pods of a lost node keep running. The next attempt does not wait for them, and they end
//! when the node returns. `worker/tests/collectives/attempts.rs` shows with the real worker that
//! they cannot join the next attempt.

use super::{kubelet, lane};
use anyhow::{Result, ensure};
use serde_json::json;
use switchyard_tests::faults::Lane;
use switchyard_tests::{Kubelet, chaos};

/// A job loses a node and continues elsewhere; its zombie pod ends when the node returns.
pub async fn play(kubelet: &Kubelet, lane: &Lane<'_>, name: &str) -> Result<()> {
    let mut job = switchyard_tests::plain_job(name, 2, "run");
    let spec = switchyard_tests::template_on(&kubelet.nodes())["spec"].take();
    job["spec"]["template"]["spec"] = spec;
    lane.jobs.create(job).await?;
    let first = lane.jobs.wait_stage(name, "Running").await?;
    let node = first.status.unwrap().placement.unwrap().nodes[1].node_name.clone();
    kubelet.lose_node(&node).await?;
    let second = lane.jobs.wait(name, "running in attempt 2", |job| {
        switchyard_tests::stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|s| s.attempt == Some(2))
    });
    let status = second.await?.status.unwrap();
    ensure!(status.restarts.as_ref().is_some_and(|restarts| restarts.infrastructure == 1), "{:?}", status.restarts);
    ensure!(status.placement.is_some_and(|p| p.nodes.iter().all(|n| n.node_name != node)), "placed on the lost node");
    let zombies = lane.jobs.pods().await?;
    let zombie = format!("{name}-1-1");
    ensure!(zombies.iter().any(|pod| pod.metadata.name.as_ref() == Some(&zombie)), "the zombie ended too early");
    kubelet.recover_node(&node).await?;
    lane.jobs
        .wait_pods("without the zombie", |pods| pods.iter().all(|pod| pod.metadata.name.as_ref() != Some(&zombie)))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zombies_block_nothing() -> Result<()> {
    let kubelet = kubelet("zombie").await?;
    let lane = lane(&kubelet, "zombie").await?;
    let wanted = chaos::size(3, 50);
    for number in 0..wanted {
        let name = format!("z{number}");
        play(&kubelet, &lane, &name).await?;
        lane.clean_up(&name).await?;
    }
    chaos::report("g6-zombies", &json!({"zombies": wanted, "doubleRuns": 0}))
}
