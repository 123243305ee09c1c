//! GPUs on real nodes: exact ones by claims, and any by the device plugin.

use crate::nodes::{apply, cluster, inside, kubectl, pod, until, wait_phase};
use anyhow::{Context, Result};
use kube::ResourceExt;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use switchyard_crds::device_use::{DeviceUse, DeviceUseSource};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_tests::drivers::{ClaimDriver, DevicePlugin, VISIBLE};
use switchyard_tests::gpus::{DRIVER, GpuNodes, Machine, RESOURCE, uuids};
use switchyard_tests::nodes::Nodes;
use switchyard_tests::{Daemon, agent_program, found_async};

/// GPU UUIDs in a container's environment.
pub(crate) fn visible(nodes: &Nodes, pod: &str) -> Result<BTreeSet<String>> {
    Ok(inside(nodes, pod, &format!("echo ${VISIBLE}"))?.trim().split(',').map(str::to_string).collect())
}

/// The agent's report from the kubelet's PodResources API, once it contains this pod.
pub(crate) async fn reported_uses(nodes: &Nodes, agent_node: &str, pod: &str) -> Result<Vec<DeviceUse>> {
    let api = kube::Api::<GPUTopology>::all(nodes.plane.client().await?);
    let what = format!("reporting {pod} in the report of {agent_node}");
    let uses = found_async(&what, crate::nodes::TIMEOUT, async || {
        let report = api.get_opt(agent_node).await?;
        let uses = report.and_then(|report| report.status).map(|status| status.in_use).unwrap_or_default();
        let of_pod: Vec<DeviceUse> = uses.into_iter().filter(|entry| entry.pod == pod).collect();
        Ok(Some(of_pod).filter(|of_pod| !of_pod.is_empty()))
    });
    uses.await
}

pub(crate) fn claim(name: &str, gpus: &[String]) -> Result<Value> {
    let list = serde_json::to_string(gpus)?;
    let expression = format!("device.attributes['{DRIVER}'].?uuid.orValue('') in {list}");
    Ok(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": {
            "deviceClassName": DRIVER, "count": gpus.len(), "selectors": [{"cel": {"expression": expression}}],
        }}]}},
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_by_claim_and_by_count() -> Result<()> {
    let nodes = cluster(2)?;
    nodes.plane.install_crds().await?;
    let gpus = GpuNodes::start(nodes.plane.client().await?).await?;
    let reports: Vec<GPUTopology> = nodes.names().iter().map(|node| Machine::of("f04-h200").report(node)).collect();
    let agents = agents(&nodes)?;

    let mut drivers = Vec::new();
    for report in &reports {
        drivers.push(ClaimDriver::start(&nodes, &gpus, report).await?);
    }
    exact_gpus(&nodes, &gpus, &reports).await?;
    drop(drivers);

    let mut plugins = Vec::new();
    for report in &reports {
        plugins.push(DevicePlugin::start(&nodes, report).await?);
    }
    two_pods_share_no_gpu(&nodes, &reports[0]).await?;
    drop(agents);
    Ok(())
}

/// Starts an agent for each node, which reads this machine and queries the node's kubelet for
/// device usage.
fn agents(nodes: &Nodes) -> Result<Vec<Daemon>> {
    let start = |node: String| {
        let socket = nodes.path(&node, "/var/lib/kubelet/pod-resources/kubelet.sock")?.display().to_string();
        let kubeconfig = nodes.plane.kubeconfig("admin").display().to_string();
        let arguments = [
            ["--node-name", &node],
            ["--kubeconfig", &kubeconfig],
            ["--pod-resources", &socket],
            ["--listen", "127.0.0.1:0"],
            ["--period-seconds", "1"],
        ];
        let arguments: Vec<String> = arguments.concat().into_iter().map(String::from).collect();
        Daemon::start(agent_program(), &arguments, &[], &nodes.plane.folder().join(format!("agent-{node}.log")))
    };
    nodes.names().into_iter().map(start).collect()
}

/// Two GPUs that first-fit would not choose must be the same in the allocation, the kubelet's
/// report and the container.
async fn exact_gpus(nodes: &Nodes, gpus: &GpuNodes, reports: &[GPUTopology]) -> Result<()> {
    let report = &reports[1];
    let wanted = [3, 6].map(|index| uuids(report)[index].clone());
    apply(nodes, &claim("two", &wanted)?)?;
    let mut trainer = pod("trainer", None, "sleep 1000");
    trainer["spec"]["resourceClaims"] = json!([{"name": "gpus", "resourceClaimName": "two"}]);
    trainer["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpus"}]});
    apply(nodes, &trainer)?;
    wait_phase(nodes, "trainer", "Running")?;

    let wanted = BTreeSet::from(wanted);
    assert_eq!(gpus.allocated("default").await?["two"], wanted);
    assert_eq!(visible(nodes, "trainer")?, wanted);
    let uses = reported_uses(nodes, &report.name_any(), "trainer").await?;
    let devices: Vec<&str> = uses.iter().map(|entry| entry.device.as_str()).collect();
    assert_eq!(devices, ["gpu-3", "gpu-6"], "{uses:#?}");
    for entry in &uses {
        assert_eq!((entry.source, entry.resource.as_str()), (DeviceUseSource::DynamicResource, DRIVER));
        let claim = entry.claim.as_ref().context("no claim")?;
        assert_eq!((claim.name.as_str(), claim.pool.as_str()), ("two", report.name_any().as_str()));
    }
    // The kubelet releases them and the container's CDI file is deleted.
    let files = || anyhow::Ok(std::fs::read_dir(nodes.path(&report.name_any(), "/run/cdi")?)?.count());
    assert_eq!(files()?, 1);
    kubectl(nodes, &["delete", "pod", "trainer"])?;
    until("given back", || Ok(files()? == 0))
}

async fn two_pods_share_no_gpu(nodes: &Nodes, report: &GPUTopology) -> Result<()> {
    let node = report.name_any();
    until("eight GPUs offered", || {
        let path = "jsonpath={.status.allocatable.nvidia\\.com/gpu}";
        Ok(kubectl(nodes, &["get", "node", &node, "-o", path])? == "8")
    })?;
    let mut seen = BTreeSet::new();
    for name in ["one", "other"] {
        let mut object = pod(name, Some(&node), "sleep 1000");
        object["spec"]["containers"][0]["resources"] = json!({"limits": {RESOURCE: 3}});
        apply(nodes, &object)?;
        wait_phase(nodes, name, "Running")?;
        let gpus = visible(nodes, name)?;
        assert!(gpus.len() == 3 && gpus.iter().all(|gpu| uuids(report).contains(gpu)), "{gpus:?}");
        assert!(seen.is_disjoint(&gpus), "{name} shares some of {gpus:?}");
        let uses = reported_uses(nodes, &node, name).await?;
        let devices: BTreeSet<String> = uses.into_iter().map(|entry| entry.device).collect();
        assert_eq!(devices, gpus, "as the kubelet reports them");
        seen.extend(gpus);
    }
    // Two GPUs are left, so a third pod that requests three does not fit.
    let mut third = pod("third", Some(&node), "sleep 1000");
    third["spec"]["containers"][0]["resources"] = json!({"limits": {RESOURCE: 3}});
    apply(nodes, &third)?;
    wait_phase(nodes, "third", "Failed")?;
    let reason = kubectl(nodes, &["get", "pod", "third", "-o", "jsonpath={.status.reason}"])?;
    assert_eq!(reason, "UnexpectedAdmissionError");
    Ok(())
}
