//! Hostile surroundings: quotas, missing rights, namespaces that end, objects that cannot be read.

use super::Scene;
use anyhow::Result;
use kube::Api;
use kube::api::{DynamicObject, GroupVersionKind, Patch};
use kube::core::ApiResource;
use serde_json::json;
use switchyard_tests::{ControlPlane, condition_of};

#[tokio::test]
async fn a_quota_is_told_and_the_job_goes_on_when_it_grows() -> Result<()> {
    let scene = Scene::new("quota", 2).await?;
    let quotas =
        Api::<k8s_openapi::api::core::v1::ResourceQuota>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}});
    quotas.create(&Default::default(), &serde_json::from_value(quota)?).await?;
    let counted = |quota: Option<&k8s_openapi::api::core::v1::ResourceQuota>| {
        quota.and_then(|quota| quota.status.as_ref()?.used.as_ref()).is_some_and(|used| used.contains_key("pods"))
    };
    kube::runtime::wait::await_condition(quotas.clone(), "small", counted).await?;
    scene.create("a", 2, "run", json!({})).await?;
    let refused = scene.jobs.wait("a", "refused", |job| {
        condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("exceeded quota"))
    });
    refused.await?;
    quotas.patch("small", &Default::default(), &Patch::Merge(json!({"spec": {"hard": {"pods": "5"}}}))).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

#[tokio::test]
async fn a_missing_service_account_is_told() -> Result<()> {
    let scene = Scene::new("account", 1).await?;
    scene.create("a", 1, "run", json!({"template": {"spec": {"serviceAccountName": "nobody"}}})).await?;
    let refused = scene.jobs.wait("a", "refused", |job| {
        condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("nobody") && c.message.contains("not found"))
    });
    refused.await?;
    let accounts =
        Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    accounts.create(&Default::default(), &serde_json::from_value(json!({"metadata": {"name": "nobody"}}))?).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

#[tokio::test]
async fn a_name_that_is_taken_is_told_and_left_alone() -> Result<()> {
    let scene = Scene::new("taken", 2).await?;
    let services =
        Api::<k8s_openapi::api::core::v1::Service>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let theirs = json!({"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}}});
    services.create(&Default::default(), &serde_json::from_value(theirs)?).await?;
    scene.create("a", 2, "run", json!({})).await?;
    let refused = scene.jobs.wait("a", "refused", |job| {
        condition_of(job, "Succeeded")
            .is_some_and(|c| c.message.contains("Service a") && c.message.contains("does not belong to this job"))
    });
    refused.await?;
    let kept = services.get("a").await?.spec.unwrap().selector.unwrap();
    assert_eq!(kept.get("app").map(String::as_str), Some("theirs"));
    services.delete("a", &Default::default()).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

#[tokio::test]
async fn a_namespace_that_ends_takes_its_jobs_with_it() -> Result<()> {
    let scene = Scene::new("ending", 2).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(scene.jobs.client.clone());
    let name = scene.jobs.namespace.clone();
    namespaces.delete(&name, &Default::default()).await?;
    let gone = |namespace: Option<&_>| namespace.is_none();
    tokio::time::timeout(
        std::time::Duration::from_secs(90),
        kube::runtime::wait::await_condition(namespaces, &name, gone),
    )
    .await??;
    Ok(())
}

/// A version before this one stored it, or somebody switched validation off.
#[tokio::test]
async fn a_job_that_cannot_be_read_fails_with_a_reason_and_holds_nobody_up() -> Result<()> {
    let scene = Scene::new("unreadable", 1).await?;
    let plane = ControlPlane::shared();
    // Written under a looser CRD of another group would need another store; a field that the schema keeps but our type does not
    // read is what an old version leaves: the template's schema takes any string as a quantity.
    let kind = GroupVersionKind::gvk("training.switchyard.dev", "v1alpha1", "TrainJob");
    let resource = ApiResource::from_gvk_with_plural(&kind, "trainjobs");
    let jobs = Api::<DynamicObject>::namespaced_with(scene.jobs.client.clone(), &scene.jobs.namespace, &resource);
    let mut bad = scene.job("bad", 1, "run", json!({}));
    bad["spec"]["template"]["metadata"]["creationTimestamp"] = "not a time".into();
    let created = jobs.create(&Default::default(), &serde_json::from_value(bad)?).await;
    scene.create("good", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("good", "Running").await?;
    if let Err(error) = created {
        // The schema refuses it already: as good.
        assert!(error.to_string().contains("creationTimestamp"), "{error}");
        return Ok(());
    }
    let give_up = std::time::Instant::now() + switchyard_tests::PATIENCE;
    loop {
        let stored = plane
            .kubectl(&["get", "trainjobs.training.switchyard.dev", "bad", "-n", &scene.jobs.namespace, "-o", "json"])
            .stdout;
        if stored.contains("InvalidSpec") {
            return Ok(());
        }
        assert!(std::time::Instant::now() < give_up, "no reason: {stored}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn huge_jobs_are_refused_or_run_and_nothing_hangs() -> Result<()> {
    let scene = Scene::new("huge", 1).await?;
    let many: Vec<_> = (0..10_000).map(|number| json!({"name": format!("N{number}"), "value": "x"})).collect();
    let refused = scene.create("env", 1, "run", json!({"trainer": {"env": many}})).await;
    assert!(refused.is_err_and(|error| error.to_string().contains("Too many")), "10,000 entries are accepted");
    // A megabyte where it is allowed: the template is the user's.
    let large = json!({"template": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "LARGE", "value": "x".repeat(900_000)}]}]}}});
    scene.create("large", 1, "run", large).await?;
    scene.create("small", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("small", "Running").await?;
    scene.jobs.wait_stage("large", "Running").await?;
    Ok(())
}
