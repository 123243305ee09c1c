//! How jobs end, suspend and are deleted.

use super::Scene;
use anyhow::Result;
use kube::ResourceExt;
use serde_json::json;
use switchyard_tests::{Command, TIMEOUT, condition_of, stage_of, until_async};

#[tokio::test]
async fn three_pods_run_and_complete() -> Result<()> {
    let scene = Scene::new("complete", 3).await?;
    scene.create("a", 3, "run", json!({})).await?;
    let running = scene.jobs.wait_stage("a", "Running").await?;
    let status = running.status.clone().unwrap();
    assert_eq!((status.attempt, status.ready.as_deref(), status.observed_generation), (Some(1), Some("3/3"), Some(1)));
    let nodes: Vec<String> = status.placement.unwrap().nodes.into_iter().map(|node| node.node_name).collect();
    assert_eq!(nodes, scene.kubelet.nodes(), "one node each, in order");
    let pods = scene.jobs.pods().await?;
    assert_eq!(scene.names().await?, ["a-1-0", "a-1-1", "a-1-2"]);
    for (pod, node) in pods.iter().zip(&nodes) {
        assert_eq!(pod.spec.as_ref().unwrap().node_name.as_ref(), Some(node), "bound where it was placed");
    }
    scene.finish().await?;
    let done = scene.jobs.wait_stage("a", "Complete").await?;
    assert!(condition_of(&done, "Complete").is_some_and(|c| c.status == "True"), "{:?}", done.status);
    let status = done.status.unwrap();
    let counts = status.nodes.unwrap();
    assert_eq!((counts.desired, counts.active, counts.succeeded, counts.failed), (3, 0, 3, 0));
    assert!(status.completion_time >= status.start_time);
    assert_eq!(scene.jobs.events("a", "GangPlaced").await?.len(), 1);
    assert_eq!(scene.jobs.events("a", "Complete").await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn terminal_is_terminal() -> Result<()> {
    let scene = Scene::new("terminal", 1).await?;
    scene.create("a", 1, "succeed-after=0s", json!({})).await?;
    let done = scene.jobs.wait_stage("a", "Complete").await?;
    // Whatever happens to the remaining objects, nothing is recreated and the status stays
    // unchanged.
    let pods = scene.jobs.pods_api();
    pods.delete("a-1-0", &Default::default()).await?;
    scene.jobs.wait_pods("gone", |pods| pods.is_empty()).await?;
    scene.create("b", 1, "succeed-after=0s", json!({})).await?;
    scene.jobs.wait_stage("b", "Complete").await?;
    let now = scene.jobs.api().get("a").await?;
    assert_eq!(scene.names().await?, ["b-1-0"]);
    assert_eq!(now.status, done.status);
    Ok(())
}

#[tokio::test]
async fn a_suspended_job_releases_everything_and_starts_over() -> Result<()> {
    let scene = Scene::new("suspend", 2).await?;
    scene.create("a", 2, "run", json!({"suspend": true})).await?;
    let held = scene.jobs.wait_stage("a", "Suspended").await?;
    assert!(held.status.as_ref().unwrap().attempt.is_none() && scene.names().await?.is_empty());
    scene.jobs.patch("a", json!({"spec": {"suspend": false}})).await?;
    let first = scene.jobs.wait_stage("a", "Running").await?;
    assert_eq!(condition_of(&first, "Suspended").map(|c| c.reason.as_str()), Some("Resumed"));
    scene.jobs.patch("a", json!({"spec": {"suspend": true}})).await?;
    scene.jobs.wait_stage("a", "Suspended").await?;
    scene.jobs.wait_pods("gone", |pods| pods.is_empty()).await?;
    scene.jobs.patch("a", json!({"spec": {"suspend": false}})).await?;
    let second = scene.jobs.wait("a", "running again", |job| {
        stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|status| status.attempt == Some(2))
    });
    let status = second.await?.status.unwrap();
    assert_eq!(status.restarts.unwrap().total, 0, "no restart is counted");
    assert!(status.start_time > first.status.unwrap().start_time || status.attempt_time.is_some());
    assert_eq!(scene.names().await?, ["a-2-0", "a-2-1"]);
    Ok(())
}

#[tokio::test]
async fn a_job_ends_at_its_deadline_and_is_deleted_after_its_time_to_live() -> Result<()> {
    let scene = Scene::new("deadline", 1).await?;
    scene.create("a", 1, "run", json!({"activeDeadlineSeconds": 2, "ttlSecondsAfterFinished": 2})).await?;
    let failed = scene.jobs.wait_stage("a", "Failed").await?;
    assert_eq!(condition_of(&failed, "Failed").map(|c| c.reason.as_str()), Some("DeadlineExceeded"));
    let status = failed.status.unwrap();
    let lasted = status.completion_time.clone().unwrap().0.duration_since(status.start_time.unwrap().0);
    assert!(lasted >= jiff::SignedDuration::from_secs(2), "{lasted:?}");
    let ended = status.completion_time.unwrap().0;
    scene.jobs.wait_gone("a").await?;
    let late = jiff::Timestamp::now().duration_since(ended);
    assert!(late >= jiff::SignedDuration::from_secs(2), "not before its time: {late:?}");
    scene.jobs.wait_pods("gone", |pods| pods.is_empty()).await?;
    Ok(())
}

#[tokio::test]
async fn deleting_a_job_deletes_its_pods_and_dependents() -> Result<()> {
    let scene = Scene::new("delete", 2).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.jobs.api().delete("a", &Default::default()).await?;
    scene.jobs.wait_pods("gone", |pods| pods.is_empty()).await?;
    let services =
        kube::Api::<k8s_openapi::api::core::v1::Service>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let are_gone = async || Ok(services.list(&Default::default()).await?.items.is_empty());
    until_async("rid of the Service", TIMEOUT, are_gone).await.map(drop)
}

#[tokio::test]
async fn a_job_with_a_reused_name_starts_from_scratch() -> Result<()> {
    let scene = Scene::new("again", 2).await?;
    for round in 0..3 {
        scene.create("a", 2, "run", json!({})).await?;
        let job = scene.jobs.wait_stage("a", "Running").await?;
        let uid = job.uid().unwrap();
        let pods = scene.jobs.pods().await?;
        let owners: Vec<_> =
            pods.iter().flat_map(|pod| pod.owner_references().iter().map(|owner| owner.uid.clone())).collect();
        assert!(owners.iter().all(|owner| *owner == uid), "round {round}: pods of another job: {owners:?}");
        scene.jobs.api().delete("a", &Default::default()).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_job_managed_by_another_controller_is_left_alone() -> Result<()> {
    let scene = Scene::new("managed", 1).await?;
    scene.create("theirs", 1, "run", json!({"managedBy": "kueue.x-k8s.io/multikueue"})).await?;
    scene.create("ours", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("ours", "Running").await?;
    let theirs = scene.jobs.api().get("theirs").await?;
    assert!(theirs.status.is_none() && scene.names().await? == ["ours-1-0"], "{:?}", theirs.status);
    Ok(())
}

/// `kubectl get` output in every stage.
#[tokio::test]
async fn the_table_shows_every_stage() -> Result<()> {
    let scene = Scene::new("table", 2).await?;
    let plane = switchyard_tests::ControlPlane::shared();
    let row = |name: &str, wide: bool| {
        let mut arguments = vec!["get", "trainjobs.training.switchyard.dev", name, "-n", &scene.jobs.namespace];
        if wide {
            arguments.extend(["-o", "wide"]);
        }
        let ended = plane.kubectl(&arguments);
        let lines: Vec<String> =
            ended.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        lines
    };
    let expect = |name: &str, start: &str| {
        let lines = row(name, false);
        assert_eq!(lines[0], "NAME STAGE READY RESTARTS PROGRESS FIGURES BUSBW AGE");
        assert!(lines[1].starts_with(start), "{} does not start with {start}", lines[1]);
    };
    scene.create("held", 1, "run", json!({"suspend": true})).await?;
    scene.jobs.wait_stage("held", "Suspended").await?;
    expect("held", "held Suspended 0/1");
    scene.create("big", 3, "run", json!({})).await?;
    scene.jobs.wait_stage("big", "Queued").await?;
    expect("big", "big Queued 0/3 0");
    scene.jobs.api().delete("big", &Default::default()).await?;
    scene.create("slow", 2, "hang", json!({})).await?;
    scene.jobs.wait_stage("slow", "Starting").await?;
    expect("slow", "slow Starting 0/2 0");
    scene.jobs.api().delete("slow", &Default::default()).await?;
    scene.create("good", 2, "run", json!({"failurePolicy": {"maxRestarts": 2}})).await?;
    scene.jobs.wait_stage("good", "Running").await?;
    expect("good", "good Running 2/2 0");
    scene.send("good-1-1", Command::Exit(9, String::new()))?;
    scene
        .jobs
        .wait("good", "running again", |job| {
            stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|status| status.attempt == Some(2))
        })
        .await?;
    expect("good", "good Running 2/2 1");
    // The second consecutive restart has a backoff, during which the stage is visible.
    scene.send("good-2-0", Command::Exit(9, String::new()))?;
    scene.jobs.wait_stage("good", "Restarting").await?;
    expect("good", "good Restarting 0/2 2");
    scene.create("bad", 1, "fail=9", json!({})).await?;
    scene.jobs.wait_stage("bad", "Failed").await?;
    // A finished job has no ready pods, so the cell is empty.
    expect("bad", "bad Failed 0");
    scene.create("done", 1, "succeed-after=0s", json!({})).await?;
    scene.jobs.wait_stage("done", "Complete").await?;
    expect("done", "done Complete 0");
    assert_eq!(row("done", true)[0], "NAME STAGE READY RESTARTS PROGRESS FIGURES BUSBW AGE QUEUE TOPOLOGY ETA");
    Ok(())
}
