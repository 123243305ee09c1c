//! The life of jobs with the real controller against a real API server, scheduler and controller manager.

#![allow(missing_docs, clippy::unwrap_used)]

use anyhow::Result;
use kube::ResourceExt;
use serde_json::json;
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, condition_of, plain_job, stage_of,
    start_controller,
};

/// A namespace with its own controller.
async fn scene(prefix: &str) -> Result<(Jobs, Daemon)> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace(prefix).await?;
    let options = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let controller = start_controller(plane, &namespace, &options)?;
    Ok((Jobs::new(plane.client().await?, &namespace), controller))
}

/// Nodes of a test: others do not go there.
async fn nodes(prefix: &str, count: usize) -> Result<Kubelet> {
    let plane = ControlPlane::shared();
    Kubelet::start(plane.config().await?, KubeletOptions::new(prefix, count)).await
}

#[tokio::test]
async fn a_job_of_three_pods_runs_and_completes() -> Result<()> {
    let kubelet = nodes("complete", 3).await?;
    let (jobs, _controller) = scene("complete").await?;
    jobs.create(plain_job("a", 3, "run")).await?;
    let running = jobs.wait_stage("a", "Running").await?;
    let status = running.status.clone().unwrap();
    assert_eq!((status.attempt, status.ready.as_deref()), (Some(1), Some("3/3")));
    let pods = jobs.pods().await?;
    assert_eq!(pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["a-1-0", "a-1-1", "a-1-2"]);
    for pod in &pods {
        kubelet.order(&jobs.namespace, &pod.name_any(), Command::Exit(0, String::new()))?;
    }
    let done = jobs.wait_stage("a", "Complete").await?;
    assert!(condition_of(&done, "Complete").is_some_and(|c| c.status == "True"), "{:?}", done.status);
    assert!(done.status.unwrap().completion_time.is_some());
    Ok(())
}
