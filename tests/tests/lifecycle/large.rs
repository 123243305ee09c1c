//! A job with more nodes than fit into a status stores its placement in PlacementSlices.

use super::Scene;
use anyhow::{Context, Result, ensure};
use kube::api::{ListParams, Patch};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::json;
use switchyard_crds::{PlacementSlice, TrainJob};
use switchyard_plan::slices;
use switchyard_tests::{ControlPlane, ControllerOptions, Scene as Folder, TIMEOUT, start_controller};

/// One more than fits into a status.
const NODES: usize = slices::INLINE + 1;

async fn until(api: &Api<PlacementSlice>, name: &str, is: impl Fn(Option<&PlacementSlice>) -> bool) -> Result<()> {
    tokio::time::timeout(TIMEOUT, await_condition(api.clone(), name, is)).await.context("not in time")??;
    Ok(())
}

/// Name of the only slice that a job's status references.
fn slice_of(job: &TrainJob) -> Result<String> {
    slices::of(job).and_then(|named| slices::names(named).next()).context("no slice")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_placement_survives_controller_restarts_and_deleted_slices() -> Result<()> {
    let mut scene = Scene::new("large", NODES).await?;
    let api = Api::<PlacementSlice>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    scene.create("a", NODES as u32, "run", json!({})).await?;
    let job = scene.jobs.wait_stage("a", "Running").await?;
    let placement = job.status.clone().unwrap().placement.unwrap();
    assert_eq!((placement.nodes.len(), placement.node_count()), (0, NODES));
    let name = slice_of(&job)?;
    let slice = api.get(&name).await?;
    for pod in scene.jobs.pods().await? {
        let rank: usize = pod.labels()["training.switchyard.dev/node-rank"].parse()?;
        assert_eq!(pod.spec.unwrap().node_name.as_ref(), Some(&slice.spec.nodes[rank].node_name));
    }
    check_commands(&scene, &slice)?;

    let change = Patch::Merge(json!({"spec": {"firstNode": 7}}));
    let refused = api.patch(&name, &Default::default(), &change).await.unwrap_err().to_string();
    assert!(refused.contains("a PlacementSlice is immutable"), "{refused}");

    // A deleted slice is rewritten, both by the controller that planned it and by one that has only
    // read it.
    let mut uid = slice.uid();
    for restarts in [false, true] {
        if restarts {
            scene.controller.kill();
            scene.controller = controller(&scene, "large-second")?;
            // Once the controller has acted on a later job, it has also seen this one.
            scene.create("b", 1, "run", json!({})).await?;
            scene.jobs.wait_stage("b", "Running").await?;
        }
        api.delete(&name, &Default::default()).await?;
        until(&api, &name, |slice| slice.is_some_and(|slice| slice.uid() != uid)).await?;
        let recreated = api.get(&name).await?;
        assert_eq!(recreated.spec, slice.spec);
        uid = recreated.uid();
    }
    let status = scene.jobs.api().get("a").await?.status.unwrap();
    assert_eq!((status.attempt, status.restarts.unwrap().total), (Some(1), 0));

    // Deleted while no controller runs: the placement is lost, and the status reports it.
    scene.controller.kill();
    api.delete(&name, &Default::default()).await?;
    scene.controller = controller(&scene, "large-third")?;
    let is_restarted = |job: &TrainJob| job.status.as_ref().is_some_and(|status| status.attempt == Some(2));
    scene.jobs.wait("a", "in attempt 2", is_restarted).await?;
    let note = &scene.jobs.events("a", "Restarting").await?[0];
    assert!(note.contains("which hold the job's placement, were deleted or belong to another owner"), "{note}");
    let job = scene.jobs.wait("a", "placed again", |job| slices::of(job).is_some()).await?;
    let second = slice_of(&job)?;
    assert!(second.starts_with("a-2-"), "{second}");
    assert_eq!(job.status.unwrap().restarts.unwrap().infrastructure, 1);

    scene.jobs.api().delete("a", &Default::default()).await?;
    scene.jobs.wait_gone("a").await?;
    until(&api, &second, |slice| slice.is_none()).await?;
    assert!(api.list(&ListParams::default()).await?.items.is_empty());
    scene.never_panicked()
}

fn controller(scene: &Scene, name: &str) -> Result<switchyard_tests::Daemon> {
    let namespace = Some(scene.jobs.namespace.clone());
    start_controller(ControlPlane::shared(), name, &ControllerOptions { namespace, ..ControllerOptions::default() })
}

/// Commands show the full placement, wherever it is stored.
fn check_commands(scene: &Scene, slice: &PlacementSlice) -> Result<()> {
    let folder = Folder::new();
    let config = ControlPlane::shared().kubeconfig("admin").display().to_string();
    let ask = |arguments: &[&str]| {
        let place = ["--kubeconfig", &config, "--namespace", &scene.jobs.namespace];
        folder.switchyard(arguments.iter().chain(&place)).start().wait(TIMEOUT)
    };
    let last = &slice.spec.nodes[NODES - 1].node_name;
    for (arguments, words) in [
        (&["status", "a"][..], "129 nodes"),
        (&["status", "a", "-o", "json"], last.as_str()),
        (&["explain", "a", "--verbose"], last),
    ] {
        let ended = ask(arguments);
        ensure!(
            ended.code == Some(0) && ended.stdout.contains(words),
            "{arguments:?}: {}{}",
            ended.stdout,
            ended.stderr
        );
    }
    Ok(())
}
