//! The fabric of a gang on a real API server: what is decided is in the status with the place, and the pods that come of it are accepted where
//! Pod Security `restricted` is enforced.

use super::{Scene, Way};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_crds::{DecisionOutcome, FabricStatus, TrainJob, Transport};
use switchyard_tests::condition_of;
use switchyard_tests::gpus::{Machine, RESOURCE, gpu_job};

/// Nodes whose ports are InfiniBand in this state.
async fn scene(prefix: &str, nodes: usize, state: &str) -> Result<Scene> {
    let machine = Machine::of("f03-h100");
    let machines = vec![(machine, ""); nodes];
    let scene = Scene::new(Way::Claims, prefix, &machines).await?;
    report(&scene, state).await?;
    let labels = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let namespaces = Api::<Namespace>::all(scene.plane.client().await?);
    namespaces.patch(&scene.jobs.namespace, &PatchParams::default(), &Patch::Merge(labels)).await?;
    Ok(scene)
}

async fn report(scene: &Scene, state: &str) -> Result<()> {
    for (position, report) in scene.reports.iter().enumerate() {
        let mut report = report.clone();
        let status = report.status.as_mut().unwrap();
        for (number, nic) in status.nics.iter_mut().enumerate() {
            // Other names on every other node, as PCI slots and firmware give them.
            nic.rdma_device = Some(format!("mlx5_{}", number + position % 2));
            (nic.link_layer, nic.port) = (Some("InfiniBand".into()), Some(1));
            nic.state = Some(if number == 0 { "Down" } else { state }.into());
        }
        scene.gpus.report(&report).await?;
    }
    Ok(())
}

fn torch(scene: &Scene, name: &str, nodes: u32, spec: Value) -> Value {
    let mut job = gpu_job(name, nodes, 8, "run");
    job["spec"]["trainer"]["framework"] = "Torch".into();
    job["spec"]["trainer"]["resourcesPerNode"]["limits"] = json!({"cpu": "1", "memory": "1Gi", RESOURCE: "8"});
    switchyard_tests::merge(&mut job["spec"], json!({"template": switchyard_tests::template_on(&scene.nodes)}));
    switchyard_tests::merge(&mut job["spec"], spec);
    job
}

fn fabric(job: &TrainJob) -> FabricStatus {
    job.status.as_ref().and_then(|status| status.fabric.clone()).unwrap()
}

#[tokio::test]
async fn a_restricted_namespace_takes_pods_with_all_that_the_fabric_needs() -> Result<()> {
    let scene = scene("fabric", 2, "Active").await?;
    let env = json!({"trainer": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}});
    scene.jobs.create(torch(&scene, "a", 2, env)).await?;
    let job = scene.jobs.wait_stage("a", "Running").await?;
    let found = fabric(&job);
    // The kubelets of this bench offer no RDMA device, and none is given: told, and not guessed.
    assert_eq!((found.transport, found.profile.as_deref()), (Some(Transport::TCP), Some("infiniband")));
    let decision = |name: &str| found.decisions.iter().find(|decision| decision.name == name).cloned().unwrap();
    assert_eq!(decision("NCCL_DEBUG").outcome, DecisionOutcome::User);
    assert_eq!(decision("NCCL_IB_DISABLE").value.as_deref(), Some("1"));
    let maps = Api::<ConfigMap>::namespaced(scene.plane.client().await?, &scene.jobs.namespace);
    let map = maps.get("a-1-fabric").await?;
    let text = &map.data.context("no files")?["nccl-1.conf"];
    assert!(text.contains("NCCL_IB_HCA==mlx5_2:1,") && !text.contains("NCCL_DEBUG"), "{text}");
    for pod in scene.jobs.pods().await? {
        let spec = pod.spec.unwrap();
        let init = &spec.init_containers.unwrap()[0];
        assert_eq!((init.name.as_str(), init.image.as_deref()), ("switchyard-fabric", Some("bench/none:1")));
        let env = spec.containers[0].env.as_ref().unwrap();
        let value = |name: &str| env.iter().find(|entry| entry.name == name).and_then(|entry| entry.value.clone());
        assert_eq!(value("NCCL_CONF_FILE").as_deref(), Some("/etc/switchyard/fabric/nccl.conf"));
        assert_eq!(value("NCCL_DEBUG").as_deref(), Some("INFO"));
        let shm = spec.volumes.unwrap().into_iter().find(|volume| volume.name == "switchyard-shm").unwrap();
        assert_eq!(shm.empty_dir.unwrap().size_limit.unwrap().0, "536870912", "half of the memory that it counts to");
    }
    scene.finish("a").await?;
    scene.had_all_rights()
}

#[tokio::test]
async fn a_job_that_must_not_use_tcp_waits_and_says_which_nodes() -> Result<()> {
    let scene = scene("no-tcp", 2, "Down").await?;
    scene.jobs.create(torch(&scene, "a", 2, json!({"fabric": {"mode": "Required"}}))).await?;
    let waits = |job: &TrainJob| condition_of(job, "FabricReady").is_some_and(|found| found.status == "False");
    let job = scene.jobs.wait("a", "FabricReady=False", waits).await?;
    let message = &condition_of(&job, "FabricReady").unwrap().message;
    assert!(message.contains("data would go over TCP"), "{message}");
    assert!(scene.jobs.pods().await?.iter().all(|pod| pod.spec.as_ref().unwrap().scheduling_gates.is_some()));
    scene.had_all_rights()
}

#[tokio::test]
async fn sixteen_nodes_have_their_verdict_soon() -> Result<()> {
    let scene = scene("verdict", 16, "Active").await?;
    let begin = Instant::now();
    scene.jobs.create(torch(&scene, "a", 16, json!({}))).await?;
    let told = |job: &TrainJob| condition_of(job, "FabricReady").is_some();
    let job = scene.jobs.wait("a", "FabricReady", told).await?;
    println!("from apply to the verdict on 16 nodes: {:.2} s", begin.elapsed().as_secs_f64());
    let found = fabric(&job);
    let lists: Vec<_> = found.decisions.iter().filter(|decision| decision.name == "NCCL_IB_HCA").collect();
    assert_eq!(lists.len(), 2, "16 nodes of two kinds are two decisions: {lists:?}");
    let nodes: Vec<_> = lists.iter().map(|decision| decision.nodes.as_deref().unwrap()).collect();
    assert!(nodes.iter().all(|list| list.split(',').count() == 8), "{nodes:?}");
    Ok(())
}
