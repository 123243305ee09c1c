//! Other users remove labels and gates from pods, in a cluster without our admission policies.

use super::{Scene, message_contains};
use anyhow::Result;
use kube::ResourceExt;
use kube::api::Patch;
use serde_json::{Value, json};
use switchyard_crds::labels;
use switchyard_tests::{Command, ControlPlane, ControllerOptions, condition_of, start_controller};

impl Scene {
    async fn strip(&self, pod: &str) -> Result<()> {
        let none: Value = [labels::JOB_UID, labels::JOB_NAME, labels::ATTEMPT]
            .map(|label| (label, Value::Null))
            .into_iter()
            .collect();
        let patch = Patch::Merge(json!({"metadata": {"labels": none}}));
        self.jobs.pods_api().patch(pod, &Default::default(), &patch).await?;
        Ok(())
    }

    async fn has_labels_again(&self, pod: &str) -> Result<()> {
        let is_labelled = |pod: &k8s_openapi::api::core::v1::Pod| {
            [labels::JOB_UID, labels::JOB_NAME, labels::ATTEMPT].iter().all(|label| pod.labels().contains_key(*label))
        };
        let all = self
            .jobs
            .wait_pods("labelled", |pods| pods.iter().any(|other| other.name_any() == pod && is_labelled(other)));
        all.await?;
        Ok(())
    }
}

/// Regression: the job said "Running, 1 of 2 nodes train" forever, and under the next leader a
/// finished training restarted.
#[tokio::test]
async fn removed_pod_labels_are_restored_across_leaders() -> Result<()> {
    let mut scene = Scene::new("stripped", 2).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.strip("a-1-1").await?;
    scene.has_labels_again("a-1-1").await?;
    scene.controller.kill();
    scene.strip("a-1-0").await?;
    for pod in ["a-1-0", "a-1-1"] {
        scene.send(pod, Command::Exit(0, String::new()))?;
    }
    let namespace = scene.jobs.namespace.clone();
    let options = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    scene.controller = start_controller(ControlPlane::shared(), &namespace, &options)?;
    let complete = scene.jobs.wait_stage("a", "Complete").await?;
    let status = complete.status.unwrap();
    assert_eq!((status.attempt, status.restarts.unwrap().total), (Some(1), 0));
    scene.has_labels_again("a-1-0").await?;
    scene.never_panicked()
}

/// Regression: the ungated pod trained alone, and the job was reported as complete.
#[tokio::test]
async fn a_pod_ungated_by_others_restarts_with_its_gang() -> Result<()> {
    let scene = Scene::new("ungated", 2).await?;
    let other = json!({"template": {"spec": {"schedulingGates": [{"name": "example.com/other"}]}}});
    scene.create("a", 2, "run", other).await?;
    scene.jobs.wait("a", "held", message_contains("another scheduling gate holds pod")).await?;
    let open = Patch::Merge(json!({"spec": {"schedulingGates": []}}));
    let api = scene.jobs.pods_api();
    api.patch("a-1-0", &Default::default(), &open).await?;
    let reported = scene
        .jobs
        .wait("a", "reported", message_contains("because another client removed its scheduling gate"))
        .await?;
    assert_eq!(condition_of(&reported, "Placed").map(|placed| placed.reason.as_str()), Some("GateRemoved"));
    let note = &scene.jobs.events("a", "GateRemoved").await?[0];
    assert!(note.starts_with("pod a-1-0 ") && note.contains("without its gang"), "{note}");
    scene.jobs.wait_pods("deleted", |pods| pods.iter().all(|pod| pod.name_any() != "a-1-0")).await?;
    let both = |pods: &[k8s_openapi::api::core::v1::Pod]| {
        ["a-2-0", "a-2-1"].iter().all(|name| pods.iter().any(|pod| pod.name_any() == *name))
    };
    scene.jobs.wait_pods("recreated", both).await?;
    for pod in ["a-2-0", "a-2-1"] {
        let ours = Patch::Merge(json!({"spec": {"schedulingGates": [{"name": labels::GANG_GATE}]}}));
        api.patch(pod, &Default::default(), &ours).await?;
    }
    let status = scene.jobs.wait_stage("a", "Running").await?.status.unwrap();
    assert_eq!((status.attempt, status.restarts.unwrap().total), (Some(2), 0));
    scene.never_panicked()
}
