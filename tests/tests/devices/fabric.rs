//! The fabric of a gang on a real API server: the status records the decisions with the placement,
//! and the resulting pods are accepted under Pod Security `restricted`.

use super::{Allocation, Scene};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_crds::{DecisionOutcome, FabricStatus, ObservedVerdict, TrainJob, Transport};
use switchyard_tests::gpus::{Machine, RESOURCE, gpu_job};
use switchyard_tests::{Scene as Folder, condition_of};

/// Starts nodes whose ports are InfiniBand in this state.
async fn scene(prefix: &str, nodes: usize, state: &str) -> Result<Scene> {
    scene_with(prefix, nodes, state, json!({})).await
}

/// The same, with additional resources of the nodes.
async fn scene_with(prefix: &str, nodes: usize, state: &str, offer: Value) -> Result<Scene> {
    let machine = Machine::of("f03-h100");
    let machines = vec![(machine, ""); nodes];
    let mut scene = Scene::new(Allocation::Claims, prefix, &machines).await?;
    report(&scene, state).await?;
    let nodes = Api::<Node>::all(scene.plane.client().await?);
    let offer = json!({"status": {"capacity": offer, "allocatable": offer}});
    for node in &scene.nodes {
        nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(&offer)).await?;
    }
    // Otherwise a job that the controller sees before these changes gets a second attempt because
    // of them.
    scene.restart()?;
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
            // Different device names on every other node, as PCI slots and firmware assign them.
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
async fn a_restricted_namespace_accepts_fabric_pods() -> Result<()> {
    let scene = scene("fabric", 2, "Active").await?;
    let env = json!({"trainer": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}});
    scene.jobs.create(torch(&scene, "a", 2, env)).await?;
    let job = scene.jobs.wait_stage("a", "Running").await?;
    let found = fabric(&job);
    // These kubelets offer no RDMA device and the pods get none, which the status must report.
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
        assert_eq!(shm.empty_dir.unwrap().size_limit.unwrap().0, "536870912", "half of the memory limit");
    }
    scene.finish("a").await?;
    scene.had_all_rights()
}

#[tokio::test]
async fn a_job_that_forbids_tcp_waits_and_names_the_nodes() -> Result<()> {
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
async fn sixteen_nodes_get_their_verdict_quickly() -> Result<()> {
    let scene = scene("verdict", 16, "Active").await?;
    let begin = Instant::now();
    scene.jobs.create(torch(&scene, "a", 16, json!({}))).await?;
    let is_reported = |job: &TrainJob| condition_of(job, "FabricReady").is_some();
    let job = scene.jobs.wait("a", "FabricReady", is_reported).await?;
    println!("from apply to the verdict on 16 nodes: {:.2} s", begin.elapsed().as_secs_f64());
    let found = fabric(&job);
    let lists: Vec<_> = found.decisions.iter().filter(|decision| decision.name == "NCCL_IB_HCA").collect();
    assert_eq!(lists.len(), 2, "16 nodes of two kinds are two decisions: {lists:?}");
    let nodes: Vec<_> = lists.iter().map(|decision| decision.nodes.as_deref().unwrap()).collect();
    assert!(nodes.iter().all(|list| list.split(',').count() == 8), "{nodes:?}");
    Ok(())
}

/// NCCL 2.27 log lines about a transport between the nodes.
fn nccl(network: &str, route: &str) -> String {
    format!(
        "pod:7:7 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\npod:7:19 [0] NCCL INFO Assigned NET plugin {network} to comm\n\
         pod:7:19 [0] NCCL INFO Using network {network}\npod:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/{route}\n\
         pod:7:19 [0] NCCL INFO Connected all rings\n"
    )
}

/// Two nodes whose device plugin offers the ports, and a job whose pods print these logs.
async fn speaking(prefix: &str, spec: Value, logs: [&str; 2]) -> Result<Scene> {
    let scene = scene_with(prefix, 2, "Active", json!({"rdma/hca": "63"})).await?;
    for (rank, log) in logs.iter().enumerate() {
        scene.kubelet.set_log(&scene.jobs.namespace, &format!("a-1-{rank}"), log);
    }
    scene.jobs.create(torch(&scene, "a", 2, spec)).await?;
    Ok(scene)
}

async fn observed(scene: &Scene) -> Result<TrainJob> {
    let is_reported = |job: &TrainJob| {
        let status = job.status.as_ref();
        status.and_then(|status| status.fabric.as_ref()).is_some_and(|fabric| fabric.observed.is_some())
    };
    scene.jobs.wait("a", "with the ranks' links reported", is_reported).await
}

#[tokio::test]
async fn ranks_on_rdma_as_predicted_are_verified() -> Result<()> {
    let good = nccl("IB", "IB/0/GDRDMA");
    let scene = speaking("as-predicted", json!({"fabric": {"mode": "Required"}}), [&good, &good]).await?;
    let job = observed(&scene).await?;
    let found = fabric(&job);
    assert_eq!(
        (found.transport, found.observed.unwrap().verdict),
        (Some(Transport::RDMA), ObservedVerdict::AsForecast)
    );
    let ready = condition_of(&job, "FabricReady").unwrap();
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("True", "AsForecast"));
    scene.finish("a").await?;
    scene.had_all_rights()
}

#[tokio::test]
async fn a_tcp_fallback_is_reported_and_fails_the_job_if_forbidden() -> Result<()> {
    let (good, bad) = (nccl("IB", "IB/0/GDRDMA"), nccl("Socket", "Socket/0"));
    let scene = speaking("falls-back", json!({"fabric": {"mode": "Required"}}), [&good, &bad]).await?;
    let job = observed(&scene).await?;
    let ready = condition_of(&job, "FabricReady").unwrap();
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "TransportDiffers"));
    for words in ["forecast RDMA", scene.nodes[1].as_str(), "7[7] -> 8[0] [send] via NET/Socket/0"] {
        assert!(ready.message.contains(words), "{words}: {}", ready.message);
    }
    assert!(condition_of(&job, "Failed").is_none(), "only reported");
    scene.had_all_rights()?;
    let fails = json!({"fabric": {"mode": "Required", "onFallback": "Fail"}});
    let scene = speaking("falls-back", fails, [&good, &bad]).await?;
    let job = scene.jobs.wait_stage("a", "Failed").await?;
    let failed = condition_of(&job, "Failed").unwrap();
    assert!(failed.reason == "TransportDiffers" && failed.message.contains("NET/Socket"), "{failed:?}");
    scene.had_all_rights()
}

#[tokio::test]
async fn doctor_explains_a_job_with_the_facts_of_its_gang() -> Result<()> {
    let memlock =
        "2026-11-20T14:07:31Z pod:7:19 [3] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory\n";
    let follows = "2026-11-20T14:07:32Z pod:7:19 [0] NCCL WARN Call to recv from 10.0.0.3<4711> failed : Connection reset by peer\n";
    let scene = speaking("doctor-job", json!({}), [follows, memlock]).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let folder = Folder::new();
    let doctor = |more: &[&str]| {
        let kubeconfig = scene.plane.kubeconfig("admin").display().to_string();
        let mut line = vec!["doctor", "a", "--namespace", &scene.jobs.namespace, "--kubeconfig", &kubeconfig];
        line.extend(more);
        folder.switchyard(line.iter().copied()).run(switchyard_tests::TIMEOUT)
    };
    let ended = doctor(&[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let text = ended.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "first error of attempt 1: rdma-memlock",
        &format!("here pod a-1-1 on {}", scene.nodes[1]),
        "check preflight check 8",
        "connection-closed on",
    ] {
        assert!(text.contains(words), "{words}: {}", ended.stdout);
    }
    let data: Value = serde_json::from_str(&doctor(&["-o", "json"]).stdout)?;
    assert_eq!(data["attempts"][0]["facts"][0]["about"], "here");
    let missing = folder
        .switchyard(["doctor", "no-such-job", "--kubeconfig", &scene.plane.kubeconfig("admin").display().to_string()])
        .run(switchyard_tests::TIMEOUT);
    assert_eq!((missing.code, missing.stdout.as_str()), (Some(2), ""));
    assert!(missing.stderr.contains("no such file, folder or TrainJob"), "{}", missing.stderr);
    Ok(())
}
