//! The objects of a job, and the reaction to external changes.

use super::Scene;
use anyhow::Result;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{ListParams, Patch};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_tests::{ControlPlane, TIMEOUT, condition_of, stage_of, until_async};

macro_rules! names {
    ($scene:expr, $type:ty) => {{
        let api = Api::<$type>::namespaced($scene.jobs.client.clone(), &$scene.jobs.namespace);
        let labelled = ListParams::default().labels("training.switchyard.dev/job-uid");
        api.list(&labelled).await?.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
    }};
}

fn engine() -> Value {
    json!({"trainer": {"framework": "Switchyard", "image": null}, "engine": {
        "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
        "data": {"path": "/data"}, "steps": 3,
    }})
}

#[tokio::test]
async fn a_single_pod_job_gets_only_what_it_needs() -> Result<()> {
    let scene = Scene::new("one", 1).await?;
    scene.create("a", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    assert_eq!(names!(scene, PodDisruptionBudget), ["a"]);
    assert!(names!(scene, Service).is_empty() && names!(scene, ConfigMap).is_empty());
    assert!(names!(scene, NetworkPolicy).is_empty() && names!(scene, Secret).is_empty());
    Ok(())
}

#[tokio::test]
async fn an_engine_gang_gets_all_objects_and_releases_its_disruption_budget() -> Result<()> {
    let scene = Scene::new("all", 2).await?;
    scene.create("a", 2, "run", engine()).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    assert_eq!(names!(scene, Service), ["a"]);
    assert_eq!(names!(scene, ConfigMap), ["a-1"]);
    assert_eq!(names!(scene, NetworkPolicy), ["a"]);
    assert_eq!(names!(scene, PodDisruptionBudget), ["a"]);
    let secrets = names!(scene, Secret);
    assert!(secrets.len() == 1 && secrets[0].starts_with("a-key-"), "{secrets:?}");
    let api = Api::<Secret>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let key = api.get(&secrets[0]).await?.data.unwrap().remove("key").unwrap().0;
    assert!(key.len() == 32 && key.iter().any(|byte| *byte != key[0]), "32 random bytes");
    scene.finish().await?;
    scene.jobs.wait_stage("a", "Complete").await?;
    let is_gone = async || Ok(names!(scene, PodDisruptionBudget).is_empty());
    until_async("rid of the budget", TIMEOUT, is_gone).await.map(drop)
}

#[tokio::test]
async fn pod_security_restricted_accepts_our_pods() -> Result<()> {
    let scene = Scene::new("restricted", 2).await?;
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(scene.jobs.client.clone());
    namespaces.patch(&scene.jobs.namespace, &Default::default(), &Patch::Merge(label)).await?;
    scene.create("engine", 2, "run", engine()).await?;
    scene.jobs.wait_stage("engine", "Running").await?;
    scene.create("plain", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("plain", "Running").await?;
    let root = json!({"template": {"spec": {"securityContext": {"runAsNonRoot": false, "runAsUser": 0}}}});
    scene.create("root", 1, "run", root).await?;
    let refused = scene.jobs.wait("root", "refused", |job| {
        condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("violates PodSecurity"))
    });
    assert_eq!(stage_of(&refused.await?), Some("Placing"), "it can still recover");
    Ok(())
}

#[tokio::test]
async fn foreign_changes_are_reverted() -> Result<()> {
    let scene = Scene::new("touch", 2).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let services = Api::<Service>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let wrong = json!({"spec": {"selector": {"training.switchyard.dev/job-uid": "wrong"}}});
    services.patch("a", &Default::default(), &Patch::Merge(wrong)).await?;
    let right = |service: Option<&Service>| {
        let selector = service.and_then(|service| service.spec.as_ref()?.selector.clone()).unwrap_or_default();
        selector.get("training.switchyard.dev/job-uid").is_some_and(|uid| uid.len() == 36)
    };
    tokio::time::timeout(TIMEOUT, kube::runtime::wait::await_condition(services.clone(), "a", right)).await??;
    let budgets = Api::<PodDisruptionBudget>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let old = budgets.get("a").await?.uid();
    budgets.delete("a", &Default::default()).await?;
    let anew = |budget: Option<&PodDisruptionBudget>| budget.is_some_and(|budget| budget.uid() != old);
    tokio::time::timeout(TIMEOUT, kube::runtime::wait::await_condition(budgets, "a", anew)).await??;
    // A pod that is deleted after the gang has started counts as failed. Before that, it is
    // recreated.
    scene.jobs.pods_api().delete("a-1-0", &Default::default()).await?;
    let next = scene.jobs.wait("a", "in attempt 2", |job| {
        stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|status| status.attempt == Some(2))
    });
    assert_eq!(next.await?.status.unwrap().restarts.unwrap().infrastructure, 1);
    Ok(())
}

#[tokio::test]
async fn settings_not_applied_are_named() -> Result<()> {
    let scene = Scene::new("merge", 1).await?;
    let template = json!({"template": {"spec": {"restartPolicy": "Always", "containers": [
        {"name": "trainer", "env": [{"name": "SWITCHYARD_JOB", "value": "mine"}]},
        {"name": "side", "image": "side:1"},
    ]}}});
    scene.create("a", 1, "run", template).await?;
    let job = scene.jobs.wait_stage("a", "Running").await?;
    let condition = condition_of(&job, "TemplateMerged").unwrap();
    assert!(condition.message.contains("spec.template.spec.restartPolicy: Always is ignored"), "{}", condition.message);
    assert!(condition.message.contains("env[SWITCHYARD_JOB]"), "{}", condition.message);
    let pod = &scene.jobs.pods().await?[0];
    assert_eq!(pod.spec.as_ref().unwrap().containers.len(), 2);
    Ok(())
}

#[tokio::test]
async fn the_api_server_refuses_what_the_rules_refuse() -> Result<()> {
    let scene = Scene::new("rules", 1).await?;
    let plane = ControlPlane::shared();
    let apply = |job: &Value| plane.kubectl_with(&["apply", "-n", &scene.jobs.namespace, "-f", "-"], &job.to_string());
    let valid = scene.job("a", 1, "run", json!({}));
    assert_eq!(apply(&valid).code, Some(0), "{}", apply(&valid).stderr);
    for (name, spec, expected) in [
        (
            "no-engine",
            json!({"trainer": {"framework": "Switchyard"}}),
            "engine must be set with trainer.framework Switchyard",
        ),
        ("name-that-is-much-too-long-for-the-names-of-all-its-pods", json!({}), "metadata.name must have at most 50"),
        ("many", json!({"trainer": {"numNodes": 5000}}), "should be less than or equal to 4096"),
        ("word", json!({"topologyPolicy": {"mode": "Sometimes"}}), "Unsupported value"),
    ] {
        let ended = apply(&scene.job(name, 1, "run", spec));
        assert!(ended.code != Some(0) && ended.stderr.contains(expected), "{name}: {}", ended.stderr);
    }
    let changed = scene.job("a", 2, "run", json!({}));
    let ended = apply(&changed);
    assert!(ended.stderr.contains("spec is immutable but for suspend"), "{}", ended.stderr);
    Ok(())
}
