//! Hostile environments: quotas, missing service accounts, taken names, terminating namespaces,
//! huge jobs.

use super::{Scene, message_contains};
use anyhow::Result;
use k8s_openapi::api::core::v1::ResourceQuota;
use kube::Api;
use kube::api::Patch;
use serde_json::json;
use switchyard_tests::condition_of;

#[tokio::test]
async fn an_exhausted_quota_is_reported_and_the_job_continues_when_it_grows() -> Result<()> {
    let scene = Scene::new("quota", 2).await?;
    let quotas = Api::<ResourceQuota>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}});
    quotas.create(&Default::default(), &serde_json::from_value(quota)?).await?;
    let counted = |quota: Option<&ResourceQuota>| {
        quota.and_then(|quota| quota.status.as_ref()?.used.as_ref()).is_some_and(|used| used.contains_key("pods"))
    };
    kube::runtime::wait::await_condition(quotas.clone(), "small", counted).await?;
    scene.create("a", 2, "run", json!({})).await?;
    let refused = scene.jobs.wait("a", "refused", |job| {
        condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("exceeded quota"))
    });
    refused.await?;
    scene.jobs.verdict("a quota of pods", "waits, cause named", "a")?;
    quotas.patch("small", &Default::default(), &Patch::Merge(json!({"spec": {"hard": {"pods": "5"}}}))).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

/// Regression: two gangs each held a part of their namespace's quota, and both waited for the rest
/// forever.
#[tokio::test]
async fn two_gangs_that_share_a_quota_run_one_after_the_other() -> Result<()> {
    let scene = Scene::new("shared", 6).await?;
    let quotas = Api::<ResourceQuota>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"pods": "4"}}});
    quotas.create(&Default::default(), &serde_json::from_value(quota)?).await?;
    let used = |pods: &'static str| {
        move |quota: Option<&ResourceQuota>| {
            let used = quota.and_then(|quota| quota.status.as_ref()?.used.as_ref()?.get("pods"));
            used.is_some_and(|used| used.0 == pods)
        }
    };
    kube::runtime::wait::await_condition(quotas.clone(), "small", used("0")).await?;
    let pods = scene.jobs.pods_api();
    for name in ["x", "y"] {
        let pod = json!({"metadata": {"name": name}, "spec": {"schedulingGates": [{"name": "example.com/held"}],
            "containers": [{"name": "a", "image": "none"}]}});
        pods.create(&Default::default(), &serde_json::from_value(pod)?).await?;
    }
    scene.create("a", 3, "run", json!({})).await?;
    scene.jobs.wait("a", "refused", message_contains("exceeded quota")).await?;
    for name in ["x", "y"] {
        pods.delete(name, &Default::default()).await?;
    }
    scene.create("b", 3, "run", json!({})).await?;
    let second = tokio::select! {
        run = scene.jobs.wait_stage("a", "Running") => run.map(|_| "b")?,
        run = scene.jobs.wait_stage("b", "Running") => run.map(|_| "a")?,
    };
    scene.finish().await?;
    scene.jobs.wait_stage(second, "Running").await?;
    Ok(())
}

#[tokio::test]
async fn a_missing_service_account_is_reported() -> Result<()> {
    let scene = Scene::new("account", 1).await?;
    scene.create("a", 1, "run", json!({"template": {"spec": {"serviceAccountName": "nobody"}}})).await?;
    let refused = scene.jobs.wait("a", "refused", |job| {
        condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("nobody") && c.message.contains("not found"))
    });
    refused.await?;
    scene.jobs.verdict("a service account that does not exist", "waits, cause named", "a")?;
    let accounts =
        Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    accounts.create(&Default::default(), &serde_json::from_value(json!({"metadata": {"name": "nobody"}}))?).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

#[tokio::test]
async fn an_object_with_a_taken_name_is_reported_and_left_alone() -> Result<()> {
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
    scene.jobs.verdict("a Service of that name that is somebody else's", "waits, cause named", "a")?;
    let kept = services.get("a").await?.spec.unwrap().selector.unwrap();
    assert_eq!(kept.get("app").map(String::as_str), Some("theirs"));
    services.delete("a", &Default::default()).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

#[tokio::test]
async fn a_terminating_namespace_deletes_its_jobs() -> Result<()> {
    let scene = Scene::new("ending", 2).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(scene.jobs.client.clone());
    let name = scene.jobs.namespace.clone();
    namespaces.delete(&name, &Default::default()).await?;
    let gone = |namespace: Option<&_>| namespace.is_none();
    tokio::time::timeout(switchyard_tests::TIMEOUT, kube::runtime::wait::await_condition(namespaces, &name, gone))
        .await??;
    Ok(())
}

#[tokio::test]
async fn huge_jobs_are_refused_or_run_without_hanging() -> Result<()> {
    let scene = Scene::new("huge", 1).await?;
    let many: Vec<_> = (0..10_000).map(|number| json!({"name": format!("N{number}"), "value": "x"})).collect();
    let refused = scene.create("env", 1, "run", json!({"trainer": {"env": many}})).await;
    assert!(refused.is_err_and(|error| error.to_string().contains("Too many")), "10,000 entries are accepted");
    // The user controls the template, and its schema has no length limits.
    let large = |bytes: usize| json!({"template": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "LARGE", "value": "x".repeat(bytes)}]}]}}});
    scene.create("large", 1, "run", large(200_000)).await?;
    scene.create("too-large", 1, "run", large(900_000)).await?;
    scene.create("small", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("small", "Running").await?;
    scene.jobs.wait_stage("large", "Running").await?;
    let refused = scene.jobs.wait_stage("too-large", "Failed").await?;
    let message = condition_of(&refused, "Failed").map(|failed| failed.message.as_str()).unwrap_or_default();
    assert!(message.contains("expected at most 262144"), "{message}");
    Ok(())
}
