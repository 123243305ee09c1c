//! Nodes with GPUs: the chart's agents report each node's mock machine, a driver offers its GPUs,
//! and jobs get exactly the planned GPUs.

use crate::e2e::{Cluster, TEAM, claims, isolation};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use switchyard_crds::gpu_topology::GPUTopology;
// Named so that cargo builds the shared library.
use switchyard_nvml_mock as _;
use switchyard_scenes::{Scene, Stage};
use switchyard_tests::Program;
use switchyard_tests::drivers::ClaimDriver;
use switchyard_tests::gpus::{GpuNodes, uuids};
use switchyard_tests::history::Recorder;

/// Mock machines of the nodes, in node order: an NVLink mesh, where the choice of GPUs matters, and
/// one with NVSwitch.
const SCENES: [&str; 2] = ["dgx-1v", "h200-4nics"];
/// Agents that read their node's mock machine and query its kubelet for device usage.
const VALUES: &str = "--values tests/tests/chart/values/test-bed.yaml --set nodeAgent.hostPaths.podResources=/var/lib/kubelet/pod-resources";

/// Nodes whose GPUs are offered through claims.
pub(crate) struct GpuCluster {
    pub cluster: Cluster,
    pub gpus: GpuNodes,
    /// Agent reports from before any GPU was in use.
    pub reports: Vec<GPUTopology>,
    /// Records all changes from then on.
    pub recorder: Recorder,
    _drivers: Vec<ClaimDriver>,
}

impl GpuCluster {
    async fn start() -> Result<GpuCluster> {
        let cluster = Cluster::start(SCENES.len() as u8)?;
        let mut stages = Vec::new();
        for (node, scene) in cluster.nodes.names().iter().zip(SCENES) {
            let stage = Stage::new(Scene::shipped(scene)?)?;
            let (from, to) = (stage.tree.path(""), cluster.nodes.path(node, "/var/lib/scene")?);
            let arguments = ["-a", &from.display().to_string(), &to.display().to_string()];
            let copied = Program::new("cp".as_ref(), cluster.folder.path(), arguments).run(crate::e2e::TIMEOUT);
            ensure!(copied.code == Some(0), "{}", copied.stderr);
            stages.push(stage);
        }
        cluster.install_with(VALUES)?;
        let reports = shown(&cluster, &stages)?;
        let client = cluster.nodes.plane.client().await?;
        let gpus = GpuNodes::start(client.clone()).await?;
        let mut drivers = Vec::new();
        for report in &reports {
            drivers.push(ClaimDriver::start(&cluster.nodes, &gpus, report).await?);
        }
        cluster.team(TEAM)?;
        let recorder = Recorder::start(client).await?;
        Ok(GpuCluster { cluster, gpus, reports, recorder, _drivers: drivers })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_get_only_their_own_gpus() -> Result<()> {
    let nodes = GpuCluster::start().await?;
    claims::the_container_gets_the_planned_gpus(&nodes).await?;
    claims::two_jobs_compete_for_one_node(&nodes).await?;
    claims::no_gpu_was_shared(&nodes).await?;
    isolation::a_running_agent_can_write_only_its_own_report(&nodes.cluster)?;
    isolation::workers_reject_foreign_connections(&nodes.cluster)
}

/// Checks that a user sees the mock machines; returns the reports in node order.
fn shown(cluster: &Cluster, stages: &[Stage]) -> Result<Vec<GPUTopology>> {
    let list = || -> Result<Vec<GPUTopology>> {
        let list: Value =
            serde_json::from_str(&cluster.sh("kubectl get gputopologies.training.switchyard.dev -o json")?)?;
        Ok(serde_json::from_value(list["items"].clone())?)
    };
    cluster.until("all agents report GPUs", || {
        let reports = list()?;
        Ok(reports.len() == stages.len() && reports.iter().all(|report| !uuids(report).is_empty()))
    })?;
    let reports = list()?;
    let table = cluster.sh("kubectl get gputopologies.training.switchyard.dev")?;
    for ((node, stage), report) in cluster.nodes.names().iter().zip(stages).zip(&reports) {
        let machine = &stage.machine;
        let expected: Vec<&str> = machine.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        ensure!(uuids(report) == expected, "{node}: got {:?}, expected {expected:?}", uuids(report));
        let status = report.status.as_ref().context("no status")?;
        let nics: BTreeSet<&str> = status.nics.iter().filter_map(|nic| nic.rdma_device.as_deref()).collect();
        let ports: BTreeSet<&str> = machine.ports.iter().map(|port| port.name.as_str()).collect();
        ensure!(nics == ports && !status.links.is_empty(), "{node}: got {nics:?}, expected {ports:?}");
        let row: Vec<&str> =
            table.lines().find(|line| line.starts_with(node.as_str())).context("no row")?.split_whitespace().collect();
        ensure!(row.get(1) == Some(&machine.gpus.len().to_string().as_str()), "{node}: {table}");
    }
    println!("{table}");
    Ok(reports)
}
