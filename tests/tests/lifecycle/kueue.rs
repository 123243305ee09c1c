//! A Kueue queue, emulated by the test: it gates pods and holds them with a finalizer, reports in
//! an event what it waits for, and stops the pods that it evicts. `tests/benches/kueue.rs` uses a
//! real Kueue.

use super::Scene;
use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{Patch, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_crds::TrainJob;
use switchyard_tests::{condition_of, merge, stage_of};

const GATE: &str = "kueue.x-k8s.io/admission";

/// Creates a queued job. Its pods look as if Kueue's webhook had changed them, except for the
/// finalizer.
async fn create(scene: &Scene) -> Result<()> {
    let mut job = scene.job("a", 2, "run", json!({}));
    job["metadata"]["labels"] = json!({"kueue.x-k8s.io/queue-name": "team-a"});
    merge(&mut job["spec"], json!({"template": {"spec": {"schedulingGates": [{"name": GATE}]}}}));
    scene.jobs.create(job).await?;
    Ok(())
}

async fn patch_all(scene: &Scene, pods: &[Pod], patch: &Value) -> Result<()> {
    for pod in pods {
        scene.jobs.pods_api().patch(&pod.name_any(), &Default::default(), &Patch::Strategic(patch)).await?;
    }
    Ok(())
}

fn message_is(job: &TrainJob, words: &str) -> bool {
    condition_of(job, "Succeeded").is_some_and(|condition| condition.message == words)
}

#[tokio::test]
async fn kueue_admits_stops_and_readmits_a_gang() -> Result<()> {
    let scene = Scene::new("kueue", 2).await?;
    create(&scene).await?;
    let pods = scene.jobs.wait_pods("both", |pods| pods.len() == 2).await?;
    let group = pods[0].labels()["kueue.x-k8s.io/pod-group-name"].clone();
    assert!(pods.iter().all(|pod| pod.labels()["kueue.x-k8s.io/pod-group-name"] == group), "{pods:?}");
    patch_all(&scene, &pods, &json!({"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}})).await?;
    scene
        .jobs
        .wait("a", "waiting", |job| message_is(job, &format!("waiting for Kueue to admit Workload {group}")))
        .await?;
    let words =
        "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 2 more needed";
    let event: Event = serde_json::from_value(json!({
        "metadata": {"generateName": "workload-"}, "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning", "reason": "Pending",
        "action": "Pending", "reportingController": "kueue-admission", "reportingInstance": "kueue-0", "note": words,
        "regarding": {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "namespace": scene.jobs.namespace, "name": group},
    }))?;
    let events = Api::<Event>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    events.create(&PostParams::default(), &event).await?;
    let job = scene.jobs.wait("a", "reported", |job| message_is(job, &format!("waiting for Kueue: {words}"))).await?;
    assert_eq!(condition_of(&job, "Placed").map(|condition| condition.reason.as_str()), Some("Gated"));
    // Kueue admits the gang pod by pod. Nothing may start before the last.
    let lift = json!({"spec": {"schedulingGates": [{"$patch": "delete", "name": GATE}]}});
    patch_all(&scene, &pods[..1], &lift).await?;
    assert_eq!(stage_of(&scene.jobs.api().get("a").await?), Some("Queued"));
    patch_all(&scene, &pods[1..], &lift).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    // Kueue evicts: it sets a condition and deletes the pods, which stay until they have ended and
    // Kueue removes its finalizer.
    for pod in &pods {
        let condition =
            json!({"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted", "message": "Preempted"});
        let status = json!({"status": {"conditions": [condition]}});
        scene.jobs.pods_api().patch_status(&pod.name_any(), &Default::default(), &Patch::Strategic(status)).await?;
        scene.jobs.pods_api().delete(&pod.name_any(), &Default::default()).await?;
    }
    let next = |job: &TrainJob| job.status.as_ref().is_some_and(|status| status.attempt == Some(2));
    let status = scene.jobs.wait("a", "the next attempt", next).await?.status.unwrap();
    let restarts = status.restarts.unwrap();
    assert_eq!((restarts.preemption, restarts.infrastructure, restarts.application), (1, 0, 0));
    let ended = |pod: &Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        pod.name_any().starts_with("a-2-") || matches!(phase, Some("Failed" | "Succeeded"))
    };
    scene
        .jobs
        .wait_pods("with the old ones ended and new ones", |pods| pods.len() == 4 && pods.iter().all(ended))
        .await?;
    patch_all(&scene, &pods, &json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["kueue.x-k8s.io/managed"]}}))
        .await?;
    let recreated = scene.jobs.wait_pods("the new ones", |pods| pods.len() == 2).await?;
    assert!(recreated.iter().all(|pod| pod.labels()["kueue.x-k8s.io/pod-group-name"] != group), "{recreated:?}");
    scene.jobs.wait("a", "waiting again", |job| stage_of(job) == Some("Queued")).await?;
    patch_all(&scene, &recreated, &lift).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.never_panicked()
}
