//! Gangs that request nodes. The test acts as the autoscaler: it installs the CRD, sets conditions,
//! and adds a node.

use super::Scene;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod, PodTemplate};
use kube::api::Patch;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::fmt::Debug;
use switchyard_crds::{ProvisioningRequest, TrainJob};
use switchyard_tests::{
    ControlPlane, ControllerOptions, TIMEOUT, account, chart_rules_with, condition_of, stage_of, until_async,
};

const CLASS: &str = "best-effort-atomic-scale-up.autoscaling.x-k8s.io";

async fn install() -> Result<()> {
    let plane = ControlPlane::shared();
    let made = plane.kubectl_with(&["apply", "--server-side", "-f", "-"], include_str!("provisioning.yaml"));
    ensure!(made.code == Some(0), "{}", made.stderr);
    let name = "provisioningrequests.autoscaling.x-k8s.io";
    tokio::time::timeout(
        TIMEOUT,
        await_condition(Api::all(plane.client().await?), name, conditions::is_crd_established()),
    )
    .await??;
    Ok(())
}

async fn cordon(scene: &Scene, node: usize, cordoned: bool) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"unschedulable": cordoned}}));
    Api::<Node>::all(scene.jobs.client.clone())
        .patch(&scene.kubelet.nodes()[node], &Default::default(), &patch)
        .await?;
    Ok(())
}

/// Waits until an object of this name exists, or no longer exists.
async fn until<K>(api: &Api<K>, name: &str, exists: bool) -> Result<()>
where
    K: kube::Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    let what = format!("{} {name}: {}", K::kind(&()), if exists { "created" } else { "deleted" });
    until_async(&what, TIMEOUT, async || Ok(api.get_opt(name).await?.is_some() == exists)).await.map(drop)
}

/// Status and reason of the `NodesRequested` condition.
fn request_state(job: &TrainJob) -> Option<(&str, &str)> {
    condition_of(job, "NodesRequested").map(|condition| (condition.status.as_str(), condition.reason.as_str()))
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// Regression: autoscalers ignore gated pods, so a cluster with too few nodes never grew. Runs with
/// the chart's rights.
#[tokio::test]
async fn a_gang_without_a_node_requests_one_and_releases_the_request() -> Result<()> {
    let plane = ControlPlane::shared();
    let rules = chart_rules_with(&["--set", &format!("autoscaling.provisioningClass={CLASS}")])?;
    let options = ControllerOptions {
        kubeconfig: Some(account(plane, "asks-for-nodes", &rules)?),
        arguments: vec!["--provisioning-class".into(), CLASS.into()],
        ..ControllerOptions::default()
    };
    let scene = Scene::started("nodes", 2, options).await?;
    cordon(&scene, 1, true).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Queued").await?;
    // The cluster lacks the CRD: the controller logs that once, and the job waits as before.
    let missing = "the cluster does not serve autoscaling.x-k8s.io/v1";
    let log = || std::fs::read_to_string(&scene.controller.log);
    until_async("logged", TIMEOUT, async || Ok(log()?.contains(missing)))
        .await
        .with_context(|| scene.controller.tail())?;
    assert_eq!(request_state(&scene.jobs.api().get("a").await?), None);
    install().await?;
    let requests = Api::<ProvisioningRequest>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let templates = Api::<PodTemplate>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let is_requested = |job: &TrainJob| request_state(job) == Some(("Unknown", "Requested"));
    let job = scene.jobs.wait("a", "requested", is_requested).await?;
    assert_eq!(log()?.matches(missing).count(), 1);
    let request = requests.get("a-1").await?;
    assert_eq!((request.spec.provisioning_class_name.as_str(), request.spec.pod_sets[0].count), (CLASS, 2));
    let template = templates.get(&request.spec.pod_sets[0].pod_template_ref.name).await?;
    assert_eq!(template.owner_references(), request.owner_references());
    assert_eq!(request.owner_references()[0].uid, job.uid().unwrap());
    let pod = template.template.unwrap().spec.unwrap();
    let amounts = pod.containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap();
    assert_eq!(
        (amounts["cpu"].0.as_str(), amounts["memory"].0.as_str(), pod.scheduling_gates),
        ("100m", "67108864", None)
    );
    // The status follows the request's conditions even if nothing else about the job changes.
    let speak = async |conditions: Value| {
        let patch = Patch::Merge(json!({"status": {"conditions": conditions}}));
        requests.patch_status("a-1", &Default::default(), &patch).await
    };
    speak(json!([
        condition("Accepted", "True", "Accepted", "accepted"),
        condition("Provisioned", "False", "CapacityIsNotFound", "no zone has any")
    ]))
    .await?;
    let job =
        scene.jobs.wait("a", "reported", |job| request_state(job) == Some(("Unknown", "CapacityIsNotFound"))).await?;
    let message = &condition_of(&job, "Succeeded").unwrap().message;
    assert!(
        message.ends_with("ProvisioningRequest a-1 requests 2 nodes: Provisioned is False: no zone has any"),
        "{message}"
    );
    speak(json!([condition("Provisioned", "True", "CapacityIsProvisioned", "made")])).await?;
    scene.jobs.wait("a", "reported", |job| request_state(job) == Some(("True", "CapacityIsProvisioned"))).await?;
    cordon(&scene, 1, false).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let binds = |pod: &Pod| {
        pod.annotations().get("autoscaling.x-k8s.io/consume-provisioning-request").is_some_and(|name| name == "a-1")
    };
    let pods = scene.jobs.pods().await?;
    assert!(pods.len() == 2 && pods.iter().all(binds), "{pods:?}");
    until(&requests, "a-1", false).await?;
    until(&templates, "a-1", false).await?;
    assert_eq!(request_state(&scene.jobs.api().get("a").await?), None);
    // A failed request is reported and kept for a while. It is deleted with its job.
    scene.create("b", 2, "run", json!({"trainer": {"resourcesPerNode": {"limits": {"cpu": "1000"}}}})).await?;
    until(&requests, "b-1", true).await?;
    let failed = condition("Failed", "True", "Expired", "nobody has such nodes");
    let failed = Patch::Merge(json!({"status": {"conditions": [merged(failed)?]}}));
    requests.patch_status("b-1", &Default::default(), &failed).await?;
    let job = scene.jobs.wait("b", "reported", |job| request_state(job) == Some(("False", "Failed"))).await?;
    assert_eq!(stage_of(&job), Some("Queued"));
    scene.jobs.api().delete("b", &Default::default()).await?;
    until(&requests, "b-1", false).await?;
    until(&templates, "b-1", false).await?;
    assert!(!log()?.contains("forbidden"), "{}", scene.controller.tail());
    scene.never_panicked()
}

/// Sets the transition time to now, because old failures are retried immediately.
fn merged(condition: Value) -> Result<Value> {
    let mut condition = condition;
    condition["lastTransitionTime"] =
        json!(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::now()));
    Ok(condition)
}
