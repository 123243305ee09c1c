//! Objects that falsely claim to belong to a job: in another namespace, and under names that the
//! job needs.

use super::Scene;
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_crds::labels;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Kubelet, KubeletOptions, Options, condition_of, start_controller,
};

fn owner(name: &str, uid: &str) -> Value {
    json!([{"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": name, "uid": uid, "controller": true}])
}

/// Regression, seen on real nodes: the gang was deleted within a second, and a forged name with the
/// maximum attempt number blocked the job permanently.
#[tokio::test]
async fn a_forged_pod_in_another_namespace_is_ignored() -> Result<()> {
    // This controller watches all namespaces, like the chart's, so it would interfere with the jobs
    // of other tests on a shared control plane.
    let plane = &ControlPlane::start(&Options { controller_manager: true, scheduler: true, ..Options::default() })?;
    plane.install_crds().await?;
    let (mine, theirs) = (plane.namespace("victim").await?, plane.namespace("evil").await?);
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new(&mine, 2)).await?;
    let options = ControllerOptions { arguments: vec!["--log-level=debug".into()], ..ControllerOptions::default() };
    let controller = start_controller(plane, "victim", &options)?;
    let jobs = switchyard_tests::Jobs::new(plane.client().await?, &mine);
    let scene = Scene { jobs, kubelet, controller };
    scene.create("victim", 2, "run", json!({})).await?;
    let uid = scene.jobs.wait_stage("victim", "Running").await?.uid().context("a UID")?;
    let pods = Api::<Pod>::namespaced(scene.jobs.client.clone(), &theirs);
    let unknown = "11111111-1111-1111-1111-111111111111";
    for (name, job, uid, label) in [
        ("victim-7-0", "victim", uid.as_str(), None),
        ("victim-8-0", "victim", uid.as_str(), Some(uid.as_str())),
        ("victim-2147483647-0", "victim", uid.as_str(), Some(uid.as_str())),
        ("victim-4294967295-0", "victim", uid.as_str(), Some(uid.as_str())),
        ("unheard-of-1-0", "unheard-of", unknown, None),
    ] {
        let labels = label.map_or(json!({}), |uid| json!({labels::JOB_UID: uid}));
        // The finalizer keeps the pod, which the garbage collector would rightly delete as an
        // orphan.
        let pod = json!({"metadata": {"name": name, "labels": labels, "ownerReferences": owner(job, uid), "finalizers": ["example.com/kept"]},
            "spec": {"schedulingGates": [{"name": "example.com/held"}], "containers": [{"name": "a", "image": "none"}]}});
        pods.create(&Default::default(), &serde_json::from_value(pod)?).await?;
    }
    // Once the controller has handled a later job, it has also handled the earlier events of its
    // watch.
    scene.create("later", 1, "run", json!({})).await?;
    scene.jobs.wait_stage("later", "Running").await?;
    let victim = scene.jobs.api().get("victim").await?.status.unwrap();
    assert_eq!((victim.attempt, victim.restarts.unwrap().total), (Some(1), 0));
    assert!(scene.names().await?.contains(&"victim-1-1".to_string()));
    // The garbage collector may delete an orphan, but our controller must not touch it.
    let log = std::fs::read_to_string(&scene.controller.log)?;
    assert!(!log.contains("unheard-of"), "{}", scene.controller.tail());
    scene.never_panicked()?;
    for pod in pods.list(&Default::default()).await? {
        let patch = kube::api::Patch::Merge(json!({"metadata": {"finalizers": null}}));
        pods.patch(&pod.name_any(), &Default::default(), &patch).await?;
    }
    Ok(())
}

/// Regression: a foreign NetworkPolicy with our label was taken for the job's own, and the real one
/// was never created, so any pod could reach the ranks.
#[tokio::test]
async fn foreign_objects_with_our_names_are_reported_and_no_gate_is_lifted() -> Result<()> {
    let scene = Scene::new("squatted", 2).await?;
    let policies = Api::<NetworkPolicy>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let configs = Api::<ConfigMap>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let open = json!({"metadata": {"name": "a"}, "spec": {"podSelector": {}, "ingress": [{}]}});
    policies.create(&Default::default(), &serde_json::from_value(open)?).await?;
    let config = json!({"metadata": {"name": "b-1"}, "data": {"engine.json": "{}"}});
    configs.create(&Default::default(), &serde_json::from_value(config)?).await?;
    scene.create("a", 2, "run", json!({})).await?;
    let mut job = scene.job("b", 2, "run", json!({}));
    job["spec"]["trainer"] = json!({"numNodes": 2, "resourcesPerNode": {"limits": {"cpu": "100m"}}});
    job["spec"]["engine"] = json!({
        "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
        "data": {"path": "/data"}, "steps": 3,
    });
    scene.jobs.create(job).await?;
    for (job, expected) in [("a", "NetworkPolicy a"), ("b", "ConfigMap b-1")] {
        let reported = scene.jobs.wait(job, "reported", |job| {
            condition_of(job, "Succeeded")
                .is_some_and(|c| c.message.contains(expected) && c.message.contains("does not belong to this job"))
        });
        reported.await?;
    }
    assert!(scene.names().await?.is_empty(), "pods without their NetworkPolicy or key");
    policies.delete("a", &Default::default()).await?;
    configs.delete("b-1", &Default::default()).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.jobs.wait_stage("b", "Running").await?;
    Ok(())
}
