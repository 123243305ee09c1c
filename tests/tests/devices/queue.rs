//! Queue order when there is not room for all jobs.

use super::{Allocation, Scene, h200, names, placement, until};
use anyhow::{Context, Result};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::time::Duration;
use switchyard_crds::TrainJob;
use switchyard_tests::history::{Fact, Recorder};
use switchyard_tests::stage_of;

impl Scene {
    /// Creates a priority class for this test; returns the job spec fields that select it.
    async fn priority(&self, value: i32) -> Result<Value> {
        let name = format!("{}-{value}", self.jobs.namespace);
        let class: PriorityClass = serde_json::from_value(json!({"metadata": {"name": name}, "value": value}))?;
        Api::all(self.jobs.client.clone()).create(&PostParams::default(), &class).await?;
        Ok(json!({"template": {"spec": {"priorityClassName": name}}}))
    }

    async fn stages(&self) -> Result<Vec<(String, String)>> {
        let jobs = self.jobs.api().list(&Default::default()).await?.items;
        Ok(jobs.iter().map(|job| (job.name_any(), stage_of(job).unwrap_or_default().to_string())).collect())
    }
}

/// Nodes become free one at a time, and a small job always wants the free one. Without a
/// reservation, the large gang would never start.
#[tokio::test]
async fn a_stream_of_small_jobs_does_not_starve_a_big_gang() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "stream", &[(h200(), ""); 3]).await?;
    for number in 0..3 {
        scene.run(&format!("first{number}"), 1, 8, json!({})).await?;
    }
    scene.create("big", 3, 8, "run", json!({})).await?;
    scene.wait_message("big", "0 of 3 needed nodes have room").await?;
    for number in 0..6 {
        scene.create(&format!("small{number}"), 1, 8, "succeed-after=1s", json!({})).await?;
    }
    // Each node that becomes free has room for a small job.
    for number in 0..3 {
        scene.finish(&format!("first{number}")).await?;
        if number < 2 {
            scene.wait_message("big", &format!("{} of 3 needed nodes have room", number + 1)).await?;
            scene.wait_message("small5", "3 nodes are reserved for ").await?;
        }
    }
    scene.jobs.wait_stage("big", "Running").await?;
    let small: Vec<_> = scene.stages().await?.into_iter().filter(|(name, _)| name.starts_with("small")).collect();
    assert!(small.iter().all(|(_, stage)| stage == "Queued"), "{small:?}");
    scene.finish("big").await?;
    for number in 0..6 {
        scene.jobs.wait_stage(&format!("small{number}"), "Complete").await?;
    }
    scene.had_all_rights()
}

#[tokio::test]
async fn the_fewest_lower_priority_jobs_are_preempted_and_restart_later() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "preempt", &[(h200(), ""); 3]).await?;
    let (low, high) = (scene.priority(10).await?, scene.priority(1000).await?);
    // Among equal jobs, the youngest are preempted first. Timestamps have whole seconds, so names
    // break ties.
    for name in ["a", "b", "c"] {
        scene.run(name, 1, 8, low.clone()).await?;
    }
    let mut never = high.clone();
    never["topologyPolicy"] = json!({"preemption": "Never"});
    scene.create("never", 2, 8, "run", never).await?;
    scene.wait_message("never", "0 of 2 needed nodes have room").await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let restarts =
        async |name: &str| anyhow::Ok(scene.jobs.api().get(name).await?.status.unwrap().restarts.unwrap().total);
    for name in ["a", "b", "c"] {
        assert_eq!(restarts(name).await?, 0, "a job that cannot preempt stops no other");
    }
    scene.jobs.api().delete("never", &Default::default()).await?;
    scene.jobs.wait_gone("never").await?;

    let mut lower = high;
    lower["topologyPolicy"] = json!({"preemption": "LowerPriority"});
    scene.run("high", 2, 8, lower).await?;
    assert_eq!(restarts("a").await?, 0, "two were enough");
    for name in ["b", "c"] {
        let victim = scene.jobs.wait_stage(name, "Queued").await?;
        let restarts = victim.status.as_ref().unwrap().restarts.as_ref().context("restarts")?;
        assert_eq!((restarts.preemption, restarts.total), (1, 1), "{name}");
        let reported = scene.jobs.events(name, "Restarting").await?;
        assert!(
            reported.iter().any(|note| note.contains("preempted by") && note.contains("high (priority 1000)")),
            "{reported:?}"
        );
    }
    scene.finish("high").await?;
    for name in ["a", "b", "c"] {
        let restarted = scene.jobs.wait_stage(name, "Running").await?;
        assert_eq!(restarted.status.unwrap().attempt, Some(if name == "a" { 1 } else { 2 }));
    }
    scene.had_all_rights()
}

/// The node with the fewest busy GPUs does not belong to the job with the lowest priority. The
/// victim's GPUs must be reserved, because otherwise the victim would be the first to take them
/// again.
#[tokio::test]
async fn freed_gpus_go_to_the_preempting_job() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "leaves", &[(h200(), ""); 2]).await?;
    let (low, middle, high) = (scene.priority(10).await?, scene.priority(500).await?, scene.priority(1000).await?);
    let victim = scene.run("low", 1, 8, low).await?;
    scene.run("middle", 1, 4, middle).await?;
    let mut preempts = high;
    preempts["topologyPolicy"] = json!({"preemption": "LowerPriority"});
    let placed = scene.run("high", 1, 8, preempts).await?;
    assert_eq!(names(&placed), names(&victim), "{}", placement(&placed).reason);
    let victim = scene.jobs.wait_stage("low", "Queued").await?;
    assert_eq!(victim.status.unwrap().restarts.unwrap().preemption, 1, "stopped once");
    assert_eq!(scene.jobs.api().get("middle").await?.status.unwrap().restarts.unwrap().total, 0);
    scene.had_all_rights()
}

/// A restarting gang keeps its nodes, even if another job that waits for them is ahead in the
/// queue, because it never released them.
#[tokio::test]
async fn a_restarting_gang_keeps_the_gpus_that_others_wait_for() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "keeps", &[(h200(), ""); 2]).await?;
    // The older job, initially suspended.
    scene.create("a", 2, 8, "run", json!({"suspend": true})).await?;
    scene.jobs.wait_stage("a", "Suspended").await?;
    let first = scene.run("b", 2, 8, json!({"failurePolicy": {"maxRestarts": 1}})).await?;
    scene.jobs.patch("a", json!({"spec": {"suspend": false}})).await?;
    scene.wait_message("a", "0 of 2 needed nodes have room").await?;
    scene.kubelet.send(&scene.jobs.namespace, "b-1-1", switchyard_tests::Command::Exit(3, String::new()))?;
    let is_restarted =
        |job: &TrainJob| job.status.as_ref().is_some_and(|s| s.attempt == Some(2)) && stage_of(job) == Some("Running");
    let restarted = scene.jobs.wait("b", "running again", is_restarted).await?;
    assert_eq!(placement(&restarted).nodes, placement(&first).nodes);
    assert_eq!(stage_of(&scene.jobs.api().get("a").await?), Some("Queued"));
    scene.finish("b").await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.had_all_rights()
}

/// Each gang needs more than half the GPUs: one runs, the other waits, and neither ever holds a
/// part.
#[tokio::test]
async fn two_gangs_that_do_not_fit_together_run_one_at_a_time() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "halves", &[(h200(), ""); 3]).await?;
    let recorder = Recorder::start(scene.plane.client().await?).await?;
    let (a, b) = tokio::join!(scene.create("a", 2, 8, "run", json!({})), scene.create("b", 2, 8, "run", json!({})),);
    let uids = [a?.uid().context("uid")?, b?.uid().context("uid")?];
    until("one queued, one running", async || {
        let mut stages: Vec<String> = scene.stages().await?.into_iter().map(|(_, stage)| stage).collect();
        stages.sort();
        Ok(stages == ["Queued", "Running"])
    })
    .await?;
    let (winner, loser) = if scene.stages().await?[0].1 == "Running" { ("a", "b") } else { ("b", "a") };
    scene.finish(winner).await?;
    scene.jobs.wait_stage(loser, "Running").await?;
    let mut places = Vec::new();
    recorder.history().await?.walk(|_, world, change| {
        let (Fact::Job(_) | Fact::Claim(_) | Fact::Pod(_)) = &change.fact else { return };
        for uid in &uids {
            let claims = world.claims.values().filter(|(_, claim)| claim.job == *uid).count();
            let is_free = world.pods_of(uid).all(|pod| pod.view.gated && pod.view.node.is_none());
            let waits = world.jobs.get(uid.as_str()).is_some_and(|(_, job)| job.stage() == "Queued");
            if waits && !(claims == 0 && is_free) {
                places.push((change.revision, change.name.clone(), claims));
            }
        }
    });
    assert!(places.is_empty(), "a waiting gang holds GPUs: {places:?}");
    scene.had_all_rights()
}
