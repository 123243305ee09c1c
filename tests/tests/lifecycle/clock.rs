//! The controller's wall clock is minutes off, or jumps by an hour, in either direction.
//! Invariants:
//!
//! - Running jobs continue: no attempt, counter or pod changes.
//! - Backoffs, grace periods, deadlines, TTLs and status timestamps use the API server's clock.
//! - No job ends before its start.

use super::{Scene, message_contains};
use anyhow::Result;
use kube::ResourceExt;
use serde_json::json;
use std::path::PathBuf;
use switchyard_crds::TrainJob;
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, condition_of, merge, shifted_clock, stage_of, template_on,
};

/// A test setup whose controller has its own clock.
pub(super) struct Shifted {
    pub scene: Scene,
    offset: PathBuf,
}

impl Shifted {
    pub async fn new(prefix: &str, nodes: usize) -> Result<Shifted> {
        Shifted::off(prefix, nodes, 0).await
    }

    /// Starts with a clock that is this many minutes off.
    pub async fn off(prefix: &str, nodes: usize, minutes: i64) -> Result<Shifted> {
        let offset = ControlPlane::shared().folder().join(format!("{prefix}.offset"));
        std::fs::write(&offset, (minutes * 60).to_string())?;
        let environment = shifted_clock(&offset);
        // Longer than a test takes, so that only a wrong clock can declare a node lost.
        let arguments = ["--node-grace-seconds", "120"].map(String::from).to_vec();
        let options = ControllerOptions { environment, arguments, ..ControllerOptions::default() };
        Ok(Shifted { scene: Scene::started(prefix, nodes, options).await?, offset })
    }

    /// Moves the clock to this many minutes off.
    pub fn jump(&self, minutes: i64) -> Result<()> {
        // Rename the file into place, because the controller can read it at any moment.
        let next = self.offset.with_extension("next");
        std::fs::write(&next, (minutes * 60).to_string())?;
        Ok(std::fs::rename(next, &self.offset)?)
    }

    /// Changes a label of a job, so that it is reconciled.
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
async fn a_clock_jump_does_not_disturb_a_running_job() -> Result<()> {
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
        // A job created now runs through its whole life. By then the controller has also reconciled
        // the other job.
        scene.create(name, 1, "succeed-after=0.1s", json!({})).await?;
        let done = scene.jobs.wait_stage(name, "Complete").await?;
        let end = done.status.as_ref().unwrap().completion_time.as_ref().unwrap().0;
        assert!(end.duration_since(jiff::Timestamp::now()).abs() < jiff::SignedDuration::from_mins(30), "{end}");
        times_are_in_order(&done)?;
    }
    assert_eq!(uids(&scene.jobs.pods().await?), before);
    // By the wrong clock, this job ends an hour before it started.
    shifted.jump(-60)?;
    scene.finish().await?;
    let done = scene.jobs.wait_stage("a", "Complete").await?;
    times_are_in_order(&done)?;
    assert_eq!((done.status.as_ref().unwrap().attempt, total(&done)), (Some(1), 0));
    scene.never_panicked()
}

#[tokio::test]
async fn a_clock_jump_does_not_prolong_a_backoff() -> Result<()> {
    let shifted = Shifted::new("pause", 1).await?;
    let scene = &shifted.scene;
    scene.create("a", 1, "run", json!({"failurePolicy": {"maxRestarts": 3}})).await?;
    for attempt in 1..=2 {
        let runs = scene.jobs.wait("a", "running", |job| {
            stage_of(job) == Some("Running")
                && job.status.as_ref().is_some_and(|status| status.attempt == Some(attempt))
        });
        runs.await?;
        scene.send(&format!("a-{attempt}-0"), Command::Exit(9, String::new()))?;
    }
    scene.jobs.wait("a", "waiting for attempt 3", |job| total(job) == 2).await?;
    shifted.jump(-60)?;
    let third = scene.jobs.wait("a", "running in attempt 3", |job| stage_of(job) == Some("Running")).await?;
    assert_eq!((third.status.as_ref().unwrap().attempt, total(&third)), (Some(3), 2));
    scene.never_panicked()
}

#[tokio::test]
async fn deadlines_and_time_to_live_ignore_the_controllers_clock() -> Result<()> {
    let shifted = Shifted::new("deadline", 2).await?;
    let scene = &shifted.scene;
    scene.create("late", 1, "run", json!({"activeDeadlineSeconds": 1800})).await?;
    scene.create("done", 1, "succeed-after=0.1s", json!({"ttlSecondsAfterFinished": 1800})).await?;
    scene.jobs.wait_stage("late", "Running").await?;
    scene.jobs.wait_stage("done", "Complete").await?;
    for (after, minutes) in [("back", -60), ("forth", 60)] {
        shifted.jump(minutes)?;
        for name in ["late", "done"] {
            shifted.touch(name, after).await?;
        }
        scene.create(after, 1, "succeed-after=0.1s", json!({})).await?;
        scene.jobs.wait_stage(after, "Complete").await?;
        assert_eq!(stage_of(&scene.jobs.api().get("late").await?), Some("Running"), "{minutes} minutes");
        assert_eq!(stage_of(&scene.jobs.api().get("done").await?), Some("Complete"), "{minutes} minutes");
    }
    // A deadline that has passed on the API server's clock takes effect.
    shifted.jump(-60)?;
    scene.jobs.patch("late", json!({"spec": {"activeDeadlineSeconds": 1}})).await?;
    let failed = scene.jobs.wait_stage("late", "Failed").await?;
    assert_eq!(condition_of(&failed, "Failed").map(|c| c.reason.as_str()), Some("DeadlineExceeded"));
    assert_eq!(total(&failed), 0);
    times_are_in_order(&failed)?;
    scene.jobs.patch("done", json!({"spec": {"ttlSecondsAfterFinished": 0}})).await?;
    scene.jobs.wait_gone("done").await?;
    scene.never_panicked()
}

/// Regression: with a clock minutes off, a node that had just stopped reporting was lost at once,
/// and every job with a time limit exceeded it as soon as it was placed.
#[tokio::test]
async fn clock_skew_ends_no_grace_period_and_no_job() -> Result<()> {
    for (prefix, minutes) in [("ahead", 10), ("behind", -10)] {
        let shifted = Shifted::off(prefix, 2, minutes).await?;
        let scene = &shifted.scene;
        let node = scene.kubelet.nodes()[0].clone();
        let mut job = scene.job("a", 1, "run", json!({"activeDeadlineSeconds": 300}));
        merge(&mut job["spec"], json!({"template": template_on(std::slice::from_ref(&node))}));
        scene.jobs.create(job).await?;
        scene.jobs.wait_stage("a", "Running").await?;
        scene.kubelet.lose_node(&node).await?;
        scene.jobs.wait("a", "waiting for the node", message_contains("has not reported since")).await?;
        shifted.touch("a", "again").await?;
        scene.create("after", 1, "succeed-after=0.1s", json!({})).await?;
        scene.jobs.wait_stage("after", "Complete").await?;
        let kept = scene.jobs.api().get("a").await?;
        assert_eq!((stage_of(&kept), total(&kept)), (Some("Running"), 0), "{minutes} minutes off");
        scene.kubelet.recover_node(&node).await?;
        let log = std::fs::read_to_string(&scene.controller.log)?;
        let words = if minutes > 0 { "s ahead of the API server's" } else { "s behind the API server's" };
        assert_eq!(log.matches("this machine's clock is").count(), 1, "{log}");
        assert!(log.contains(words), "{log}");
        scene.never_panicked()?;
    }
    Ok(())
}
