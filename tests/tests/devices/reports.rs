//! Reports that are late, changing, invalid or contradictory, and missing labels.

use super::{Allocation, RACK, Scene, h200, names, placement};
use anyhow::Result;
use serde_json::json;
use switchyard_tests::{condition_of, stage_of};

#[tokio::test]
async fn a_job_follows_the_reports_of_its_nodes() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "reports", &[(h200(), ""), (h200(), "")]).await?;
    let (node, report) = (&scene.nodes[0], &scene.reports[0]);
    scene.gpus.delete_report(node).await?;
    scene.create("a", 2, 8, "run", json!({})).await?;
    let reported =
        scene.wait_message("a", "1 node cannot be used: no GPUTopology: the node agent does not run there").await?;
    assert_eq!(stage_of(&reported), Some("Queued"));

    // A report with an NVLink to a GPU that does not exist.
    let mut broken = report.clone();
    broken.status.as_mut().unwrap().links[3].a = "GPU-of-nobody".into();
    scene.gpus.report(&broken).await?;
    scene
        .wait_message("a", "its GPUTopology cannot be used: status.links[3].a: \"GPU-of-nobody\" is not the UUID")
        .await?;
    // The planner must avoid a GPU that the driver wants to reset.
    let mut sick = report.clone();
    let health = switchyard_crds::gpu_topology::GpuHealth { recovery_action: "GPUReset".into() };
    sick.status.as_mut().unwrap().gpus[2].health = Some(health);
    scene.gpus.report(&sick).await?;
    scene.wait_message("a", "most free GPUs on the others: 7").await?;
    scene.gpus.report(report).await?;
    let running = scene.jobs.wait_stage("a", "Running").await?;
    assert_eq!(names(&running), scene.nodes);

    // Later changes of the report do not affect the running job, and later jobs cannot get the same
    // GPUs.
    scene.gpus.report(&broken).await?;
    scene.create("b", 1, 1, "run", json!({})).await?;
    scene.wait_message("b", "its GPUTopology cannot be used").await?;
    scene.gpus.delete_report(node).await?;
    scene.gpus.report(report).await?;
    scene.wait_message("b", "no node has room for 1 GPU").await?;
    let still = scene.jobs.api().get("a").await?;
    assert_eq!(
        (stage_of(&still), &still.status.as_ref().unwrap().placement),
        (Some("Running"), &running.status.unwrap().placement)
    );
    assert!(condition_of(&still, "PlacementDegraded").is_none());
    scene.finish("a").await?;
    scene.jobs.wait_stage("b", "Running").await?;
    scene.had_all_rights()
}

/// When a NIC goes down, the next job prefers the nodes whose NICs are all up.
#[tokio::test]
async fn a_down_nic_counts_from_its_report_on() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "nic", &[(h200(), ""); 3]).await?;
    let mut report = scene.reports[0].clone();
    for nic in &mut report.status.as_mut().unwrap().nics[..2] {
        nic.state = Some("Down".into());
    }
    scene.gpus.report(&report).await?;
    let job = scene.run("a", 2, 8, json!({})).await?;
    assert_eq!(names(&job), scene.nodes[1..], "{}", placement(&job).reason);
    scene.had_all_rights()
}

#[tokio::test]
async fn a_required_domain_excludes_nodes_without_its_label() -> Result<()> {
    let scene =
        Scene::new(Allocation::Claims, "domain", &[(h200(), "d1"), (h200(), ""), (h200(), "d1"), (h200(), "")]).await?;
    let required = json!({"topologyPolicy": {"domains": [{"key": RACK, "mode": "Required"}]}});
    let fits = scene.run("a", 2, 4, required.clone()).await?;
    assert_eq!(names(&fits), [&scene.nodes[0], &scene.nodes[2]], "{}", placement(&fits).reason);
    scene.create("b", 3, 4, "run", required).await?;
    let reported = scene.wait_message("b", &format!("one {RACK} has at most 2 of 3, in d1")).await?;
    let text = &condition_of(&reported, "Placed").unwrap().message;
    assert!(text.contains(&format!("s have no label {RACK}")), "{text}");
    assert!(text.contains("topologyPolicy.domains[0].mode: Preferred (192 GB/s)"), "{text}");
    // Once the node has the label, the job starts.
    scene.gpus.label(&scene.nodes[1], &[(RACK, "d1")]).await?;
    let fits = scene.jobs.wait_stage("b", "Running").await?;
    assert_eq!(names(&fits), scene.nodes[..3], "{}", placement(&fits).reason);
    scene.had_all_rights()
}
