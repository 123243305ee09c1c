//! Fixtures: cloud machines and jobs.

use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_crds::gpu_topology::*;
use switchyard_crds::{FabricStatus, TrainJob};
use switchyard_ledger::offline::{Cluster, PreviousPlacement};
use switchyard_ledger::queue::QueueSettings;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::objects::{self, Defaults};
use switchyard_plan::validate;
use switchyard_tests::gpus::{Machine, RESOURCE};

pub struct Scene {
    pub name: &'static str,
    /// Topology matrix of each node, in name order.
    machines: [&'static str; 2],
    /// Labels of each node.
    labels: &'static [(&'static str, &'static str)],
    /// Resources of each node besides CPU, memory and GPUs.
    offers: &'static [(&'static str, &'static str)],
    /// Changes the agents' reports, by node position.
    change: fn(usize, &mut GPUTopologyStatus),
}

pub struct Job {
    pub name: &'static str,
    framework: &'static str,
    nodes: u32,
    gpus: u32,
    change: fn(&mut Value),
}

const fn scene(name: &'static str, machine: &'static str, change: fn(usize, &mut GPUTopologyStatus)) -> Scene {
    Scene { name, machines: [machine, machine], labels: &[], offers: &[], change }
}

const SHARED: &[(&str, &str)] = &[("rdma/hca_shared_devices_a", "63")];

/// Nodes of common cloud platforms.
pub const SCENES: [Scene; 12] = [
    Scene { offers: SHARED, ..scene("hgx-h100-infiniband", "f03b-hgx-h100", |_, status| ports(status, "InfiniBand")) },
    Scene { offers: SHARED, ..scene("dgx-h100-with-storage-nics", "f03b-hgx-h100", storage) },
    Scene { offers: SHARED, ..scene("h200-roce-v4", "f04-h200", |_, status| roce(status, GidFamily::IPv4, 1)) },
    Scene { offers: SHARED, ..scene("gb300-roce-v6-only", "f06b-gb300", |_, status| roce(status, GidFamily::IPv6, 2)) },
    Scene {
        offers: &[("vpc.amazonaws.com/efa", "32"), ("hugepages-2Mi", "10Gi")],
        labels: &[("node.kubernetes.io/instance-type", "p5.48xlarge")],
        ..scene("aws-p5-efa", "f03b-hgx-h100", |_, status| no_rdma(status))
    },
    Scene {
        labels: &[("cloud.google.com/gke-accelerator", "nvidia-h100-mega-80gb")],
        ..scene("gcp-a3-mega-tcpxo", "f03b-hgx-h100", |_, status| no_rdma(status))
    },
    Scene {
        offers: SHARED,
        labels: &[("node.kubernetes.io/instance-type", "Standard_ND96isr_H100_v5")],
        ..scene("azure-nd-h100-flat", "f04-h200-vm", |_, status| {
            ports(status, "InfiniBand");
            flat(status);
        })
    },
    Scene {
        offers: &[("nvidia.com/sriov-rdma-vf", "16")],
        labels: &[("node.kubernetes.io/instance-type", "BM.GPU.H100.8")],
        ..scene("oci-h100-roce", "f03b-hgx-h100", |_, status| roce(status, GidFamily::IPv4, 1))
    },
    Scene {
        offers: &[("rdma/ib", "1")],
        ..scene("coreweave-h200", "f04-h200", |_, status| ports(status, "InfiniBand"))
    },
    scene("l40s-ethernet-only", "f07-l40s", |_, status| no_rdma(status)),
    Scene { offers: &[], ..scene("b200-rdma-not-offered", "f10-b200", |_, status| ports(status, "InfiniBand")) },
    Scene {
        offers: SHARED,
        ..scene("names-differ-between-nodes", "f03b-hgx-h100", |node, status| {
            storage(node, status);
            for nic in status.nics.iter_mut().filter(|_| node == 1) {
                nic.rdma_device = nic.rdma_device.as_ref().map(|name| name.replace("mlx5_", "mlx5_1"));
            }
            let host = status.host.get_or_insert_default();
            host.default_route = Some(if node == 0 { "eno1" } else { "ens3f0" }.into());
        })
    },
];

/// Jobs with common requests.
pub const JOBS: [Job; 6] = [
    Job { name: "torch", framework: "Torch", nodes: 2, gpus: 8, change: |_| {} },
    Job {
        name: "torch-host-network",
        framework: "Torch",
        nodes: 2,
        gpus: 8,
        change: |job| job["spec"]["template"]["spec"]["hostNetwork"] = true.into(),
    },
    Job {
        name: "torch-required",
        framework: "Torch",
        nodes: 2,
        gpus: 8,
        change: |job| job["spec"]["fabric"] = json!({"mode": "Required"}),
    },
    Job {
        name: "mpi-part-of-node-own-values",
        framework: "MPI",
        nodes: 2,
        gpus: 4,
        change: |job| {
            job["spec"]["trainer"]["env"] = json!([
                {"name": "NCCL_SOCKET_IFNAME", "value": "net1"},
                {"name": "NCCL_IB_HCA", "value": "mlx5_1"},
                {"name": "NCCL_FOO", "value": "1"},
            ]);
        },
    },
    Job {
        name: "horovod-tcp-on-purpose",
        framework: "Horovod",
        nodes: 2,
        gpus: 8,
        change: |job| job["spec"]["fabric"] = json!({"mode": "Disabled"}),
    },
    Job { name: "torch-one-node", framework: "Torch", nodes: 1, gpus: 8, change: |_| {} },
];

/// Sets all RDMA ports to up, with this link layer.
fn ports(status: &mut GPUTopologyStatus, layer: &str) {
    for (number, nic) in status.nics.iter_mut().enumerate() {
        // Some matrices lack device names.
        nic.rdma_device.get_or_insert_with(|| format!("mlx5_{number}"));
        (nic.link_layer, nic.state, nic.port) = (Some(layer.into()), Some("Active".into()), Some(1));
        nic.mtu_bytes = Some(if layer == "InfiniBand" { 4092 } else { 9000 });
    }
    status.host.get_or_insert_default().default_route = Some("eno1".into());
}

fn roce(status: &mut GPUTopologyStatus, family: GidFamily, count: u32) {
    ports(status, "Ethernet");
    for nic in status.nics.iter_mut().filter(|nic| nic.rdma_device.is_some()) {
        nic.gids = vec![
            GidGroup { kind: GidType::RoCEv1, family: Some(family), count, first_index: 0 },
            GidGroup { kind: GidType::RoCEv2, family: Some(family), count, first_index: 3 },
        ];
    }
}

/// The last two adapters are Ethernet storage ports, and one of the others is down.
fn storage(_: usize, status: &mut GPUTopologyStatus) {
    ports(status, "InfiniBand");
    let of_rdma: Vec<usize> = (0..status.nics.len()).filter(|nic| status.nics[*nic].rdma_device.is_some()).collect();
    for nic in &of_rdma[of_rdma.len() - 2..] {
        status.nics[*nic].link_layer = Some("Ethernet".into());
    }
    status.nics[of_rdma[0]].state = Some("Down".into());
}

fn no_rdma(status: &mut GPUTopologyStatus) {
    status.nics.clear();
    status.host.get_or_insert_default().default_route = Some("ens5".into());
}

/// A guest that does not see its PCIe switches.
fn flat(status: &mut GPUTopologyStatus) {
    for gpu in &mut status.gpus {
        gpu.pcie_path = vec!["pci0000:00".into(), gpu.bus_id.clone().unwrap_or_default()];
    }
}

/// Result of a job.
pub struct Found {
    pub fabric: Result<FabricStatus, String>,
    /// NCCL's files by name.
    pub files: Option<BTreeMap<String, String>>,
    /// Additions to node 0's pod, besides its identity.
    pub pod: Value,
}

/// The objects of a fixture.
pub fn items(scene: &Scene) -> Vec<Value> {
    let mut items = Vec::new();
    for (position, machine) in scene.machines.iter().enumerate() {
        let name = format!("gpu-{}", position + 1);
        let mut report = Machine::of(machine).report(&name);
        (scene.change)(position, report.status.as_mut().unwrap());
        let count = report.status.as_ref().unwrap().gpus.len();
        let mut allocatable = json!({"cpu": "128", "memory": "1Ti", "pods": "110", RESOURCE: count.to_string()});
        for (resource, amount) in scene.offers {
            allocatable[*resource] = json!(amount);
        }
        let labels: BTreeMap<&str, &str> = scene.labels.iter().copied().collect();
        items.push(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
        }));
        let mut report = serde_json::to_value(report).unwrap();
        report["kind"] = "GPUTopology".into();
        items.push(report);
    }
    items
}

/// The manifest of a job, with at most as many GPUs as the machine has.
pub fn manifest(scene: &Scene, job: &Job) -> TrainJob {
    let status = Machine::of(scene.machines[0]).report("x").status.unwrap();
    let gpus = (job.gpus as usize).min(status.gpus.len() / if job.gpus < 8 { 2 } else { 1 });
    let mut value = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
        "metadata": {"name": "gpt", "namespace": "team", "uid": "11111111-2222-3333-4444-555555555555"},
        "spec": {"trainer": {
            "framework": job.framework, "numNodes": job.nodes, "image": "pytorch:2", "command": ["torchrun", "train.py"],
            "resourcesPerNode": {"limits": {"cpu": "32", "memory": "256Gi", RESOURCE: gpus.to_string()}},
        }},
    });
    (job.change)(&mut value);
    serde_json::from_value(value).unwrap()
}

/// Computes the controller's decisions.
pub fn look(scene: &Scene, job: &Job) -> Found {
    look_at(&items(scene), manifest(scene, job), Defaults::default())
}

pub fn look_at(items: &[Value], mut job: TrainJob, defaults: Defaults) -> Found {
    let mut cluster =
        Cluster::of(items, defaults.clone(), Levels::default(), QueueSettings::default(), Timestamp::UNIX_EPOCH)
            .unwrap();
    let verdict = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
    let placed = verdict.placement.unwrap_or_else(|why| panic!("{why}"));
    let fabric = verdict.fabric.map(|found| found.map(|decided| decided.status));
    let fabric = fabric.unwrap_or_else(|| Ok(FabricStatus::default()));
    let status = job.status.get_or_insert_default();
    (status.placement, status.fabric) = (Some(placed.status), fabric.clone().ok());
    let valid = validate(&job).unwrap();
    let pod = objects::pod(&job, &valid, &defaults, 1, 0);
    let spec = serde_json::to_value(pod.spec.unwrap()).unwrap();
    let trainer = &spec["containers"][0];
    let is_identity = |entry: &&Value| !entry["name"].as_str().unwrap().starts_with("SWITCHYARD_");
    let env: Vec<&Value> = trainer["env"].as_array().unwrap().iter().filter(is_identity).collect();
    let init: Vec<&Value> = spec["initContainers"].as_array().into_iter().flatten().collect();
    let init: Vec<Value> =
        init.iter().map(|c| json!({"name": c["name"], "image": c["image"], "mounts": c["volumeMounts"]})).collect();
    let pod = json!({
        "env": env, "limits": trainer["resources"]["limits"], "mounts": trainer["volumeMounts"], "volumes": spec["volumes"],
        "initContainers": init, "dnsPolicy": spec["dnsPolicy"],
    });
    let mut files = objects::fabric_configs(&job, &valid, 1).pop().and_then(|config| config.data);
    // reasons.txt repeats the decisions for the log.
    if let Some(reasons) = files.as_mut().and_then(|files| files.remove("reasons.txt")) {
        let decisions = fabric.as_ref().map_or(&[][..], |fabric| &fabric.decisions);
        let lines: Vec<&str> = reasons.lines().collect();
        assert_eq!(lines.len(), decisions.len(), "{reasons}");
        for (line, decision) in lines.iter().zip(decisions) {
            assert!(line.starts_with(&decision.name) && line.ends_with(&decision.reason), "{line}");
        }
    }
    Found { fabric, files, pod }
}
