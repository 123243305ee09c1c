//! A job and its candidate nodes, whose agents report everything. Tests change them before the
//! checks run.

use super::scenes::{JOBS, SCENES, items, manifest};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use switchyard_crds::gpu_topology::*;
use switchyard_crds::{FabricStatus, PreflightFinding, PreflightStatus};
use switchyard_ledger::offline::{Cluster, PreviousPlacement};
use switchyard_ledger::queue::QueueSettings;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::objects::Defaults;
use switchyard_tests::gpus::{Machine, RESOURCE};

/// Time of the checks.
pub const NOW: Timestamp = Timestamp::constant(1_790_000_000, 0);

/// This many minutes before [`NOW`].
pub fn before(minutes: i64) -> Time {
    Time(NOW - SignedDuration::from_mins(minutes))
}

pub struct Stage {
    pub items: Vec<Value>,
    pub job: Value,
}

impl Stage {
    /// A fixture and a job of the fabric tests, with agents that report every field and no fault.
    pub fn new(scene: &str, job: &str) -> Stage {
        let scene = SCENES.iter().find(|known| known.name == scene).unwrap_or_else(|| panic!("{scene}"));
        let job = JOBS.iter().find(|known| known.name == job).unwrap_or_else(|| panic!("{job}"));
        let mut stage = Stage { items: items(scene), job: serde_json::to_value(manifest(scene, job)).unwrap() };
        stage.all(complete);
        stage
    }

    /// Two nodes of one type with all of their GPUs, over InfiniBand if the machine has RDMA
    /// devices.
    pub fn for_machine(machine: &Machine) -> Stage {
        let mut stage = Stage { items: Vec::new(), job: Value::Null };
        let mut gpus = 0;
        for name in ["gpu-1", "gpu-2"] {
            let mut report = machine.report(name);
            let status = report.status.as_mut().unwrap();
            for nic in status.nics.iter_mut().filter(|nic| nic.rdma_device.is_some()) {
                (nic.link_layer, nic.state, nic.port) = (Some("InfiniBand".into()), Some("Active".into()), Some(1));
            }
            gpus = status.gpus.len();
            let allocatable = json!({
                "cpu": "128", "memory": "1Ti", "pods": "110", "rdma/hca": "63", RESOURCE: gpus.to_string(),
            });
            stage.items.push(json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
                "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
            }));
            let mut report = serde_json::to_value(report).unwrap();
            report["kind"] = "GPUTopology".into();
            stage.items.push(report);
        }
        let limits = json!({"cpu": "32", "memory": "256Gi", RESOURCE: gpus.to_string()});
        stage.job = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": "gpt", "namespace": "team", "uid": "11111111-2222-3333-4444-555555555555"},
            "spec": {"trainer": {
                "framework": "Torch", "numNodes": 2, "image": "pytorch:2", "command": ["torchrun", "train.py"],
                "resourcesPerNode": {"limits": limits},
            }},
        });
        stage.all(complete);
        stage
    }

    /// Changes the report of a node's agent.
    pub fn node(&mut self, node: usize, change: impl FnOnce(&mut GPUTopologyStatus)) {
        let mut reports = self.items.iter_mut().filter(|item| item["kind"] == "GPUTopology");
        let report = reports.nth(node).expect("a report of that node");
        let mut status: GPUTopologyStatus = serde_json::from_value(report["status"].clone()).unwrap();
        change(&mut status);
        report["status"] = serde_json::to_value(status).unwrap();
    }

    /// Changes the reports of all agents.
    pub fn all(&mut self, change: impl Fn(&mut GPUTopologyStatus)) {
        let nodes = self.items.iter().filter(|item| item["kind"] == "GPUTopology").count();
        (0..nodes).for_each(|node| self.node(node, &change));
    }

    /// Changes the training ports of a node.
    pub fn ports(&mut self, node: usize, change: impl Fn(&mut Nic)) {
        self.node(node, |status| status.nics.iter_mut().filter(|nic| nic.rdma_device.is_some()).for_each(change));
    }

    /// Grows to this many copies of the first node, all used by the job.
    pub fn grow(&mut self, nodes: usize) {
        let first = self.items[..2].to_vec();
        for number in self.items.len() / 2 + 1..=nodes {
            for item in &first {
                // UUIDs contain the node name.
                let text = item.to_string().replace("gpu-1-", &format!("gpu-{number}-"));
                let mut item: Value = serde_json::from_str(&text).unwrap();
                item["metadata"]["name"] = format!("gpu-{number}").into();
                self.items.push(item);
            }
        }
        self.set("/spec/trainer/numNodes", json!(nodes));
    }

    /// Removes the report of a node.
    pub fn silence(&mut self, node: usize) {
        let of_reports = (0..self.items.len()).filter(|item| self.items[*item]["kind"] == "GPUTopology").nth(node);
        self.items.remove(of_reports.expect("a report of that node"));
    }

    /// Sets a user's environment variable.
    pub fn env(&mut self, name: &str, value: &str) {
        let entry = json!({"name": name, "value": value});
        match self.job["spec"]["trainer"]["env"].as_array_mut() {
            Some(env) => env.push(entry),
            None => self.job["spec"]["trainer"]["env"] = json!([entry]),
        }
    }

    /// Sets a field of the job by JSON pointer.
    pub fn set(&mut self, pointer: &str, value: Value) {
        let mut at = &mut self.job;
        for part in pointer.trim_start_matches('/').split('/') {
            at = &mut at[part.replace("~1", "/")];
        }
        *at = value;
    }

    /// Computes the controller's fabric status.
    pub fn fabric(&self) -> Result<FabricStatus, String> {
        let mut cluster =
            Cluster::of(&self.items, Defaults::default(), Levels::default(), QueueSettings::default(), NOW).unwrap();
        let job = serde_json::from_value(self.job.clone()).unwrap();
        let verdict = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
        verdict.placement.unwrap_or_else(|why| panic!("{why}"));
        verdict.fabric.expect("the job has a use for a fabric").map(|decided| decided.status)
    }

    /// Runs the checks.
    pub fn look(&self) -> PreflightStatus {
        self.fabric().unwrap_or_else(|why| panic!("{why}")).preflight.expect("checks are on by default")
    }

    /// Findings of one check.
    pub fn found(&self, check: i32) -> Vec<PreflightFinding> {
        self.look().findings.into_iter().filter(|finding| finding.check == check).collect()
    }
}

/// Adds fields that the agent of a healthy machine reports in addition to the matrix.
pub fn complete(status: &mut GPUTopologyStatus) {
    status.agent_version = Some("0.1.0".into());
    status.observed_time = Some(before(1));
    let nvlinks = |uuid: &str| {
        let own =
            status.links.iter().filter(|link| link.kind == LinkKind::NVLink && (link.a == uuid || link.b == uuid));
        own.filter_map(|link| link.count).max()
    };
    let counts: Vec<Option<u32>> = status.gpus.iter().map(|gpu| nvlinks(&gpu.uuid)).collect();
    let is_switched = counts.iter().flatten().any(|count| *count >= 12);
    let is_grace = status.gpus.iter().any(|gpu| gpu.model.as_deref().is_some_and(|model| model.contains("GB")));
    status.cpus.get_or_insert_default().architecture = Some(if is_grace { "aarch64" } else { "x86_64" }.into());
    for (gpu, count) in status.gpus.iter_mut().zip(counts) {
        gpu.pcie_link = link();
        gpu.nvlinks = count.map(|up| NvLinks { up, down: Vec::new() });
        gpu.ecc = Some(Ecc { mode: Some(EccMode::Enabled), row_remapping: Some(RowRemapping::Clean) });
        gpu.health = Some(GpuHealth { recovery_action: "None".into() });
        gpu.fabric = is_switched.then(registered);
    }
    if is_switched {
        status.nvswitch = Some(NvSwitch { devices: Some(4), gpus: Some(status.gpus.len() as u32) });
        status.fabric = Some(registered());
    }
    for nic in status.nics.iter_mut().filter(|nic| nic.rdma_device.is_some()) {
        nic.pcie_link = link();
        nic.firmware = Some("28.39.2048".into());
        nic.char_device = Some(CharDevice { path: "infiniband/uverbs0".into(), state: FileState::Present });
        nic.port_watch = Some(PortWatch { since: Some(before(600)), ..PortWatch::default() });
    }
    let present = |path: String| CharDevice { path, state: FileState::Present };
    let files = ["nvidiactl".to_string(), "nvidia-uvm".to_string()].into_iter();
    let files = files.chain(status.gpus.iter().map(|gpu| format!("nvidia{}", gpu.index)));
    let host = status.host.get_or_insert_default();
    *host = Host {
        kernel: Some("6.8.0-45-generic".into()),
        driver: Some("570.124.06".into()),
        cuda_version: Some("12.8".into()),
        driver_module: Some(DriverModule::Open),
        peermem: Some(ModuleState::Loaded),
        dma_buf: Some(DmaBuf::Likely),
        acs: Some(Acs::default()),
        locked_memory_limit: Some("Unlimited".into()),
        open_files_limit: Some("1048576".into()),
        stack_limit: Some("8388608".into()),
        shared_memory_bytes: Some(64 << 20),
        device_files: files.map(present).collect(),
        kubelet: serde_json::from_value(json!({"cpuManager": "static", "topologyManager": "best-effort"})).unwrap(),
        ..std::mem::take(host)
    };
}

fn link() -> Option<PcieLink> {
    Some(PcieLink { generation: Some(5), max_generation: Some(5), width: Some(16), max_width: Some(16) })
}

/// A GPU's registration with the fabric manager of a standalone machine.
pub fn registered() -> Fabric {
    Fabric {
        state: FabricState::Completed,
        result: Some("Success".into()),
        cluster_uuid: None,
        clique_id: None,
        health: Some(FabricHealth { summary: FabricSummary::Healthy, faults: Vec::new() }),
    }
}
