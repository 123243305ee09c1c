//! The status names the reason why pods cannot be created or cannot start, with the field to
//! change.

use super::{Scene, message_contains};
use anyhow::Result;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use switchyard_tests::condition_of;

/// Regression: the kubelet reports this in events only, so the status said `ContainerCreating`
/// forever.
#[tokio::test]
async fn a_failed_mount_is_reported_with_the_field_to_change() -> Result<()> {
    let scene = Scene::new("mount", 1).await?;
    scene.create("a", 1, "mount=missing", json!({})).await?;
    let change = "create ConfigMap texxt in the job's namespace, or correct its name in spec.template.spec.volumes";
    let starting = scene.jobs.wait("a", "reported", message_contains(change)).await?;
    scene.jobs.verdict("a ConfigMap that is not there (FailedMount)", "starts, cause named", "a")?;
    let stage = condition_of(&starting, "Succeeded").unwrap();
    assert!(stage.reason == "Starting" && stage.message.contains("FailedMount"), "{stage:?}");
    assert_eq!(starting.status.unwrap().attempt, Some(1));
    Ok(())
}

/// Regression: the controller retried creating it forever, and the job stayed in Placing.
#[tokio::test]
async fn an_unacceptable_pod_fails_the_job_with_the_servers_message() -> Result<()> {
    let scene = Scene::new("refused", 1).await?;
    let mounts = json!([{"name": "nope", "mountPath": "/nope"}]);
    let template = json!({"template": {"spec": {"containers": [{"name": "trainer", "volumeMounts": mounts}]}}});
    scene.create("a", 1, "run", template).await?;
    let failed = scene.jobs.wait_stage("a", "Failed").await?;
    scene.jobs.verdict("a pod that the API server never accepts", "failed, cause named", "a")?;
    let condition = condition_of(&failed, "Failed").unwrap();
    assert_eq!(condition.reason, "PermanentFailure");
    for words in ["volumeMounts[0].name: Not found: \"nope\"", "the fields are under spec.template"] {
        assert!(condition.message.contains(words), "{}", condition.message);
    }
    assert!(scene.jobs.events("a", "Failed").await?[0].contains("nope"));
    Ok(())
}

#[tokio::test]
async fn a_missing_priority_class_is_reported_until_it_exists() -> Result<()> {
    let scene = Scene::new("class", 1).await?;
    let name = format!("{}-urgent", scene.jobs.namespace);
    scene.create("a", 1, "run", json!({"template": {"spec": {"priorityClassName": name}}})).await?;
    let change = "create the PriorityClass, or correct spec.template.spec.priorityClassName";
    scene.jobs.wait("a", "reported", message_contains(change)).await?;
    scene.jobs.verdict("a priority class that does not exist", "waits, cause named", "a")?;
    let class = serde_json::from_value(json!({"metadata": {"name": name}, "value": 7}))?;
    Api::<PriorityClass>::all(scene.jobs.client.clone()).create(&PostParams::default(), &class).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

/// Regression: the scheduler reports nothing about these pods, and their nodes stayed reserved
/// until the job's own timeout.
#[tokio::test]
async fn a_missing_claim_is_reported_and_no_node_is_held() -> Result<()> {
    let scene = Scene::new("absent", 1).await?;
    for (name, claim, words) in [
        ("a", json!({"resourceClaimName": "nope"}), "ResourceClaim nope does not exist"),
        ("b", json!({"resourceClaimTemplateName": "nope"}), "ResourceClaimTemplate nope does not exist"),
    ] {
        let mut claim = claim;
        claim["name"] = json!("x");
        scene.create(name, 1, "run", json!({"template": {"spec": {"resourceClaims": [claim]}}})).await?;
        let waits = scene.jobs.wait(name, "reported", message_contains(words)).await?;
        let placed = condition_of(&waits, "Placed").unwrap();
        assert_eq!((placed.status.as_str(), placed.reason.as_str()), ("False", "ObjectMissing"), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_missing_scheduler_is_reported() -> Result<()> {
    let scene = Scene::new("scheduler", 1).await?;
    scene.create("a", 1, "run", json!({"template": {"spec": {"schedulerName": "nobody"}}})).await?;
    let why =
        "pod a-1-0: no scheduler has reported on it: is there one named nobody (spec.template.spec.schedulerName)?";
    scene.jobs.wait("a", "reported", message_contains(why)).await?;
    scene.jobs.verdict("a scheduler that does not exist", "starts, cause named", "a")
}
