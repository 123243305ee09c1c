//! Placement uses the admitted pods, and the scheduler has the final decision.

use super::{Scene, message_contains};
use anyhow::Result;
use k8s_openapi::api::core::v1::{LimitRange, Node, Pod};
use kube::api::Patch;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_crds::TrainJob;
use switchyard_tests::{condition_of, merge, stage_of, template_on};

/// A foreign gate. While it is present, the test can change pods like an admission webhook.
fn held() -> Value {
    json!({"template": {"spec": {"schedulingGates": [{"name": "example.com/held"}]}}})
}

fn without_gate() -> Value {
    json!({"spec": {"schedulingGates": [{"$patch": "delete", "name": "example.com/held"}]}})
}

pub(super) async fn patch_nodes(scene: &Scene, patches: &[(usize, Value)]) -> Result<()> {
    let nodes = Api::<Node>::all(scene.jobs.client.clone());
    for (node, patch) in patches {
        nodes.patch(&scene.kubelet.nodes()[*node], &Default::default(), &Patch::Merge(patch.clone())).await?;
    }
    Ok(())
}

/// The node of the first pod, once the job runs in its first attempt.
pub(super) async fn node_of(scene: &Scene, name: &str) -> Result<String> {
    let status = scene.jobs.wait_stage(name, "Running").await?.status.unwrap();
    assert_eq!(status.attempt, Some(1), "the scheduler refused the placement: {status:?}");
    Ok(status.placement.unwrap().nodes[0].node_name.clone())
}

/// Regression: jobs stayed Queued because of a taint that their pods tolerated, or went to nodes
/// that their namespace's selector excludes.
#[tokio::test]
async fn tolerations_selectors_and_affinities_of_admission_count() -> Result<()> {
    let scene = Scene::new("admitted", 3).await?;
    let taint = |key: &str| json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
    let team = json!({"metadata": {"labels": {"example.com/team": "a"}}, "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}});
    patch_nodes(&scene, &[(0, taint("others")), (2, team)]).await?;
    scene.create("a", 1, "run", held()).await?;
    let waits = |job: &TrainJob| condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("gate holds pod"));
    scene.jobs.wait("a", "held", waits).await?;
    let pods = scene.jobs.pods_api();
    let mut pod = pods.get("a-1-0").await?;
    let spec = pod.spec.as_mut().unwrap();
    spec.tolerations.get_or_insert_default().push(serde_json::from_value(json!({"key": "gpu", "operator": "Exists"}))?);
    spec.node_selector.get_or_insert_default().insert("example.com/team".into(), "a".into());
    let affinity = spec.affinity.as_mut().and_then(|affinity| affinity.node_affinity.as_mut()).unwrap();
    let terms = affinity.required_during_scheduling_ignored_during_execution.as_mut().unwrap();
    let own = json!({"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]});
    terms.node_selector_terms[0].match_expressions.get_or_insert_default().push(serde_json::from_value(own)?);
    pod.metadata.managed_fields = None;
    pods.replace("a-1-0", &Default::default(), &pod).await?;
    pods.patch("a-1-0", &Default::default(), &Patch::Strategic(without_gate())).await?;
    assert_eq!(node_of(&scene, "a").await?, scene.kubelet.nodes()[2]);
    let bound = pods.get("a-1-0").await?.spec.unwrap().affinity.unwrap().node_affinity.unwrap();
    let terms = bound.required_during_scheduling_ignored_during_execution.unwrap().node_selector_terms;
    assert_eq!(terms[0].match_expressions.as_ref().map(Vec::len), Some(2), "the admission's terms are kept: {terms:?}");
    Ok(())
}

/// A sidecar without requests requests nothing in the template, and the LimitRange defaults in the
/// pod.
#[tokio::test]
async fn defaults_of_a_limit_range_count() -> Result<()> {
    let scene = Scene::new("limits", 2).await?;
    let ranges = Api::<LimitRange>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let range = json!({"metadata": {"name": "defaults"}, "spec": {"limits": [
        {"type": "Container", "defaultRequest": {"cpu": "6"}, "default": {"cpu": "6"}},
    ]}});
    ranges.create(&Default::default(), &serde_json::from_value(range)?).await?;
    let sidecar = json!({"template": {"spec": {"containers": [{"name": "proxy", "image": "none"}]}}});
    scene.create("a", 1, "run", sidecar.clone()).await?;
    let first = node_of(&scene, "a").await?;
    scene.jobs.verdict("defaults of a LimitRange", "runs", "a")?;
    scene.create("b", 1, "run", sidecar.clone()).await?;
    assert_ne!(node_of(&scene, "b").await?, first);
    scene.create("c", 1, "run", sidecar).await?;
    let waits = scene.jobs.wait_stage("c", "Queued").await?;
    scene.jobs.verdict("defaults of a LimitRange leave no room", "waits, cause named", "c")?;
    let message = &condition_of(&waits, "Placed").unwrap().message;
    assert!(message.contains("no node has room for cpu 6100m"), "{message}");
    Ok(())
}

/// Binds a pod that conflicts with a job's anti-affinity to this node.
async fn stranger(scene: &Scene, node: usize) -> Result<()> {
    let name = format!("stranger-{node}");
    let pod = json!({"metadata": {"name": name, "labels": {"keep": "away"}},
        "spec": {"nodeSelector": {"kubernetes.io/hostname": scene.kubelet.nodes()[node]}, "containers": [{"name": "a", "image": "none"}]}});
    let pods = Api::<Pod>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    pods.create(&Default::default(), &serde_json::from_value(pod)?).await?;
    let bound = |pods: &[Pod]| {
        pods.iter().any(|pod| pod.name_any() == name && pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()))
    };
    scene.jobs.wait_pods("bound", bound).await?;
    Ok(())
}

/// Regression: the planner chose the same refused placement every 310 s forever, and kept its GPUs
/// reserved 97 % of the time.
#[tokio::test]
async fn a_refused_placement_is_released_at_once_and_the_next_is_tried() -> Result<()> {
    let scene = Scene::new("refused", 3).await?;
    let anti = json!({"template": {"spec": {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"keep": "away"}}, "topologyKey": "kubernetes.io/hostname"}]}}}}});
    stranger(&scene, 0).await?;
    stranger(&scene, 1).await?;
    scene.create("a", 1, "run", anti.clone()).await?;
    scene.jobs.wait("a", "with the scheduler's message", message_contains("anti-affinity")).await?;
    scene.jobs.verdict("an anti-affinity that two of three nodes break", "starts, cause named", "a")?;
    let runs = scene.jobs.wait("a", "running", |job| stage_of(job) == Some("Running")).await?.status.unwrap();
    scene.jobs.verdict("an anti-affinity that two of three nodes break", "runs on the third node", "a")?;
    assert_eq!((runs.attempt, runs.restarts.unwrap().total), (Some(3), 0), "each node is tried once, without a charge");
    assert_eq!(runs.placement.unwrap().nodes[0].node_name, scene.kubelet.nodes()[2]);
    let notes = scene.jobs.events("a", "GangRolledBack").await?;
    assert!(
        notes.iter().any(|note| note.contains(&scene.kubelet.nodes()[0]) && note.contains("anti-affinity")),
        "{notes:?}"
    );
    // Without an alternative placement, the job waits, reports the reason, and reserves nothing.
    let mut job = scene.job("b", 1, "run", anti);
    merge(&mut job["spec"], json!({"template": template_on(&scene.kubelet.nodes()[..2])}));
    scene.jobs.create(job).await?;
    let waits = scene
        .jobs
        .wait("b", "waiting with the scheduler's message", |job| {
            stage_of(job) == Some("Queued")
                && condition_of(job, "Placed").is_some_and(|c| {
                    c.message.contains("no node has room") && c.message.contains("the scheduler refused it")
                })
        })
        .await?;
    assert_eq!(waits.status.unwrap().attempt, Some(3));
    Ok(())
}
