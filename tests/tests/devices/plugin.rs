//! Gangs on nodes whose kubelets choose the GPUs.

use super::{Allocation, Scene, h200, names, placement, until};
use anyhow::Result;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use serde_json::json;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{DeviceAllocation, TrainJob};
use switchyard_tests::gpus::{Machine, device_use, uuids};
use switchyard_tests::{condition_of, stage_of};

/// A pod that takes all GPUs of a node is exact without claims, because there is no choice.
#[tokio::test]
async fn whole_nodes_are_exact_without_claims() -> Result<()> {
    let scene = Scene::new(Allocation::Plugin, "whole", &[(h200(), "r1"), (h200(), "r2"), (h200(), "r2")]).await?;
    let job = scene.run("a", 2, 8, json!({})).await?;
    assert_eq!(job.status.as_ref().unwrap().device_allocation, Some(DeviceAllocation::DevicePlugin));
    assert_eq!(names(&job), scene.nodes[1..]);
    for (node, report) in placement(&job).nodes.iter().zip(&scene.reports[1..]) {
        assert_eq!(node.gpus, uuids(report));
    }
    let claims = Api::<ResourceClaim>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    assert!(claims.list(&Default::default()).await?.items.is_empty());
    for (pod, node) in scene.jobs.pods().await?.into_iter().zip(&scene.nodes[1..]) {
        let spec = pod.spec.unwrap();
        let terms = serde_json::to_value(&spec.affinity)?;
        let fields = "/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchFields/0";
        assert_eq!(
            terms.pointer(fields).unwrap(),
            &json!({"key": "metadata.name", "operator": "In", "values": [node]})
        );
        assert_eq!((spec.node_name.as_ref(), spec.resource_claims), (Some(node), None));
        let limits = spec.containers[0].resources.as_ref().unwrap().limits.as_ref().unwrap();
        assert_eq!(limits["nvidia.com/gpu"].0, "8");
    }
    // The remaining node has exactly the capacity that the plugin counts.
    scene.create("b", 2, 1, "run", json!({})).await?;
    scene.wait_message("b", "1 of 2 needed nodes have room for 1 GPU").await?;
    scene.had_all_rights()
}

/// The agent's report of a node where a pod uses these GPUs.
fn in_use(report: &GPUTopology, scene: &Scene, pod: &str, gpus: &[String]) -> GPUTopology {
    let mut report = report.clone();
    let uses = gpus.iter().map(|gpu| device_use(gpu, &scene.jobs.namespace, pod));
    report.status.as_mut().unwrap().in_use = uses.collect();
    report
}

fn degraded<'a>(job: &'a TrainJob, state: &str) -> Option<&'a str> {
    let condition = condition_of(job, "PlacementDegraded").filter(|condition| condition.status == state);
    condition.map(|condition| condition.message.as_str())
}

/// The GPUs of an A30 pair have an NVLink bridge; GPUs of different pairs communicate over PCIe.
/// With one node, NICs do not matter.
#[tokio::test]
async fn gpus_other_than_planned_are_reported_with_their_bandwidth() -> Result<()> {
    let scene = Scene::new(Allocation::Plugin, "degraded", &[(Machine::of("f08-a30"), "")]).await?;
    let job = scene.run("a", 1, 2, json!({})).await?;
    let (plan, report) = (placement(&job).nodes[0].gpus.clone(), &scene.reports[0]);
    let others: Vec<String> = uuids(report).into_iter().filter(|gpu| !plan.contains(gpu)).collect();
    // The allocation matches the plan, so the status reports nothing.
    scene.gpus.report(&in_use(report, &scene, "a-1-0", &plan)).await?;
    scene.create("b", 1, 1, "run", json!({})).await?;
    scene.jobs.wait_stage("b", "Running").await?;
    assert!(condition_of(&scene.jobs.api().get("a").await?, "PlacementDegraded").is_none());
    scene.gpus.report(&in_use(report, &scene, "a-1-0", &[plan[0].clone(), others[0].clone()])).await?;
    let reported = scene.jobs.wait("a", "degraded", |job| degraded(job, "True").is_some()).await?;
    let text = degraded(&reported, "True").unwrap();
    assert!(text.starts_with(&format!("pod 0 on {}: GPUs ", scene.nodes[0])), "{text}");
    assert!(text.ends_with("GB/s instead of 80"), "{text}");
    assert_eq!(stage_of(&reported), Some("Running"));
    until("reported by one event", async || Ok(scene.jobs.events("a", "PlacementDegraded").await?.len() == 1)).await?;
    // The other pair is equivalent.
    scene.gpus.report(&in_use(report, &scene, "a-1-0", &others)).await?;
    scene.jobs.wait("a", "as planned", |job| degraded(job, "False").is_some()).await?;
    scene.had_all_rights()
}
