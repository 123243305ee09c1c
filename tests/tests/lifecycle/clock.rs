//! The controller's wall clock jumps by an hour, both ways. What must hold:
//!
//! - What runs goes on: no attempt, no count and no pod changes by a jump.
//! - A pause lasts at most as long as it can: one that a jump made longer is over (`plan::cluster::clock`).
//! - A deadline and the time to live follow the clock: early or late by the jump, and not more.
//! - No job ends before its start.

use super::Scene;
use anyhow::Result;
use kube::ResourceExt;
use serde_json::json;
use std::path::PathBuf;
use switchyard_crds::TrainJob;
use switchyard_tests::{Command, ControlPlane, clock_by, condition_of, stage_of};

/// A scene whose controller has a clock of its own.
pub(super) struct Shifted {
    pub scene: Scene,
    offset: PathBuf,
}

impl Shifted {
    pub async fn new(prefix: &str, nodes: usize) -> Result<Shifted> {
        let offset = ControlPlane::shared().folder().join(format!("{prefix}.offset"));
        std::fs::write(&offset, "0")?;
        Ok(Shifted { scene: Scene::with(prefix, nodes, clock_by(&offset)).await?, offset })
    }

    /// The clock is this many minutes off from now on.
    pub fn jump(&self, minutes: i64) -> Result<()> {
        // Renamed into its place: the controller reads it at any moment.
        let next = self.offset.with_extension("next");
        std::fs::write(&next, (minutes * 60).to_string())?;
        Ok(std::fs::rename(next, &self.offset)?)
    }

    /// Changes a job, so that it is reconciled.
    async fn touch(&self, name: &str, value: &str) -> Result<()> {
        self.scene.jobs.patch(name, json!({"metadata": {"labels": {"touched": value}}})).await?;
        Ok(())
    }
}

fn times_are_in_order(job: &TrainJob) -> Result<()> {
    let status = job.status.as_ref().unwrap();
    let (start, end) = (status.start_time.as_ref().unwrap(), status.completion_time.as_ref().unwrap());
    anyhow::ensure!(start.0 <= end.0, "ends at {} before its start at {}", end.0, start.0);
    Ok(())
}

fn total(job: &TrainJob) -> i32 {
    job.status.as_ref().and_then(|status| status.restarts.as_ref()).map_or(0, |restarts| restarts.total)
}

#[tokio::test]
async fn what_runs_is_not_disturbed_by_a_jump() -> Result<()> {
    let shifted = Shifted::new("jump", 4).await?;
    let scene = &shifted.scene;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let uids = |pods: &[k8s_openapi::api::core::v1::Pod]| -> Vec<Option<String>> {
        pods.iter().filter(|pod| pod.name_any().starts_with("a-")).map(ResourceExt::uid).collect()
    };
    let before = uids(&scene.jobs.pods().await?);
    for (name, hours) in [("back", -1), ("forth", 1), ("right", 0)] {
        shifted.jump(60 * hours)?;
        shifted.touch("a", name).await?;
        // A job of that hour goes through its life; the controller has reconciled the other one by then.
        scene.create(name, 1, "succeed-after=0.1s", json!({})).await?;
        let done = scene.jobs.wait_stage(name, "Complete").await?;
        let end = done.status.as_ref().unwrap().completion_time.as_ref().unwrap().0;
        let ours = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(hours);
        assert!(end.duration_since(ours).abs() < jiff::SignedDuration::from_mins(30), "the clock did not jump: {end}");
        times_are_in_order(&done)?;
    }
    assert_eq!(uids(&scene.jobs.pods().await?), before);
    // It ends an hour before it began, by the clock.
    shifted.jump(-60)?;
    scene.finish().await?;
    let done = scene.jobs.wait_stage("a", "Complete").await?;
    times_are_in_order(&done)?;
    assert_eq!((done.status.as_ref().unwrap().attempt, total(&done)), (Some(1), 0));
    scene.never_panicked()
}

#[tokio::test]
async fn a_pause_between_attempts_is_not_an_hour_longer() -> Result<()> {
    let shifted = Shifted::new("pause", 1).await?;
    let scene = &shifted.scene;
    scene.create("a", 1, "run", json!({"failurePolicy": {"maxRestarts": 3}})).await?;
    for attempt in 1..=2 {
        let runs = scene.jobs.wait("a", "running", |job| {
            stage_of(job) == Some("Running")
                && job.status.as_ref().is_some_and(|status| status.attempt == Some(attempt))
        });
        runs.await?;
        scene.order(&format!("a-{attempt}-0"), Command::Exit(9, String::new()))?;
    }
    scene.jobs.wait("a", "waiting for attempt 3", |job| total(job) == 2).await?;
    shifted.jump(-60)?;
    let third = scene.jobs.wait("a", "running in attempt 3", |job| stage_of(job) == Some("Running")).await?;
    assert_eq!((third.status.as_ref().unwrap().attempt, total(&third)), (Some(3), 2));
    scene.never_panicked()
}

#[tokio::test]
async fn deadlines_follow_the_clock() -> Result<()> {
    let shifted = Shifted::new("deadline", 2).await?;
    let scene = &shifted.scene;
    scene.create("late", 1, "run", json!({"activeDeadlineSeconds": 1800})).await?;
    scene.create("done", 1, "succeed-after=0.1s", json!({"ttlSecondsAfterFinished": 1800})).await?;
    scene.jobs.wait_stage("late", "Running").await?;
    scene.jobs.wait_stage("done", "Complete").await?;
    shifted.jump(-60)?;
    for name in ["late", "done"] {
        shifted.touch(name, "back").await?;
    }
    scene.create("after", 1, "succeed-after=0.1s", json!({})).await?;
    scene.jobs.wait_stage("after", "Complete").await?;
    assert_eq!(stage_of(&scene.jobs.api().get("late").await?), Some("Running"), "a jump back ends nothing");
    assert_eq!(stage_of(&scene.jobs.api().get("done").await?), Some("Complete"), "nor does it delete anything");
    shifted.jump(60)?;
    for name in ["late", "done"] {
        shifted.touch(name, "forth").await?;
    }
    let failed = scene.jobs.wait_stage("late", "Failed").await?;
    assert_eq!(condition_of(&failed, "Failed").map(|c| c.reason.as_str()), Some("DeadlineExceeded"));
    assert_eq!(total(&failed), 0);
    times_are_in_order(&failed)?;
    scene.jobs.wait_gone("done").await?;
    scene.never_panicked()
}
