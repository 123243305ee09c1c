//! Fabric decisions over a job's life cycle.

use super::super::machine::Shapes;
use super::super::tests::World;
use super::super::view::NodeView;
use super::super::{Action, WaitReason};
use crate::objects::{Kind, Object};
use crate::resources;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use switchyard_crds::gpu_topology::{GPUTopology, GPUTopologySpec, GPUTopologyStatus, Gpu, Host, Nic};
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{DeviceAllocation, Transport, conditions};

fn report(node: usize, state: &str) -> GPUTopologyStatus {
    let gpu = |index: u32| Gpu { index, uuid: format!("GPU-{node}-{index}"), ..Gpu::default() };
    let nic = |number: usize, layer: &str, state: &str| Nic {
        name: format!("ib{number}"),
        rdma_device: Some(format!("mlx5_{number}")),
        port: Some(1),
        link_layer: Some(layer.into()),
        state: Some(state.into()),
        rate_megabits_per_second: Some(400_000),
        ..Nic::default()
    };
    GPUTopologyStatus {
        gpus: (0..2).map(gpu).collect(),
        nics: vec![nic(0, "InfiniBand", state), nic(1, "InfiniBand", state), nic(2, "Ethernet", state)],
        host: Some(Host { default_route: Some(format!("eno{node}")), ..Host::default() }),
        ..GPUTopologyStatus::default()
    }
}

/// Two nodes with two GPUs each, whose InfiniBand ports have this `state`.
pub fn world(spec: Value, state: &str) -> World {
    let mut merged = json!({"trainer": {
        "framework": "Torch", "image": "i", "numNodes": 2, "resourcesPerNode": {"limits": {"cpu": "2", "nvidia.com/gpu": "2"}},
    }});
    for (key, value) in spec.as_object().unwrap() {
        merged[key] = value.clone();
    }
    let mut world = World::new(2, merged);
    set_reports(&mut world, state);
    world
}

/// A job that enforces its preflight, on `refused` nodes that fail it. Two healthy nodes come last.
pub fn mostly_refused(refused: usize) -> World {
    let mut world = world(json!({"fabric": {"preflight": {"mode": "Enforce"}}}), "Active");
    world.nodes.clear();
    (0..refused + 2).for_each(|number| world.node(&format!("n{number:02}"), "4"));
    set_reports(&mut world, "Active");
    set_limit(&mut world, refused, "65536");
    // Nodes of the same kind have the same interface names.
    let facts = world.nodes["n00"].described().unwrap().facts.clone();
    for node in world.nodes.values_mut().take(refused) {
        node.machine.as_mut().unwrap().as_mut().unwrap().facts = facts.clone();
    }
    world
}

fn set_reports(world: &mut World, state: &str) {
    let mut shapes = Shapes::default();
    for (position, node) in world.nodes.values_mut().enumerate() {
        let status = Some(report(position, state));
        let report = GPUTopology { status, ..GPUTopology::new("n", GPUTopologySpec::default()) };
        let amounts = [("cpu", "4"), ("pods", "9"), (GPU_RESOURCE, "2"), ("rdma/shared", "63")];
        let amounts = amounts.map(|(name, amount)| (name.to_string(), Quantity(amount.into())));
        let amounts = resources::of_quantities(&amounts.into());
        let (free, allocatable, machine) = (amounts.clone(), amounts, Some(shapes.machine(&report)));
        *node = NodeView { facts: node.facts.clone(), free, allocatable, machine, ..NodeView::default() };
    }
}

pub fn condition(world: &World, kind: &str) -> (String, String) {
    let status = world.job.status.as_ref().unwrap();
    let found = status.condition(kind).unwrap_or_else(|| panic!("no {kind} in {status:?}"));
    (found.status.clone(), found.message.clone())
}

#[test]
fn nccl_files_exist_before_any_gate_is_lifted() {
    let mut world = world(json!({}), "Active");
    let mut made = false;
    for _ in 0..20 {
        let done = world.step();
        for action in &done.actions {
            match action {
                Action::Create(Object::ConfigMap(map)) => {
                    assert_eq!(map.metadata.name.as_deref(), Some("a-1-fabric"));
                    let text = &map.data.as_ref().unwrap()["nccl-1.conf"];
                    assert!(text.contains("NCCL_IB_HCA==mlx5_0:1,mlx5_1:1\n"), "{text}");
                    made = true;
                }
                Action::Release { .. } => assert!(made, "the pod would wait for a missing file"),
                _ => {}
            }
        }
        if done.actions.is_empty() && done.status.is_none() {
            break;
        }
    }
    assert!(made);
    assert_eq!(world.stage(), "Running");
    let fabric = world.job.status.as_ref().unwrap().fabric.clone().unwrap();
    assert_eq!((fabric.transport, fabric.profile.as_deref()), (Some(Transport::RDMA), Some("infiniband")));
    assert_eq!(fabric.resources[0].name, "rdma/shared");
    assert_eq!(world.pods[0].requests.get("rdma/shared"), 1000, "the scheduler accounts for it");
    let (state, message) = condition(&world, conditions::FABRIC_READY);
    assert_eq!(state, "True");
    assert!(
        message.starts_with("RDMA through host memory over 2 NICs between nodes")
            && message.contains("settings derived"),
        "{message}"
    );
}

#[test]
fn a_job_that_must_not_use_tcp_waits_until_the_ports_are_up() {
    let mut world = world(json!({"fabric": {"mode": "Required"}}), "Down");
    world.run();
    assert_eq!(world.stage(), "Queued");
    let (state, message) = condition(&world, conditions::FABRIC_READY);
    assert_eq!(state, "False");
    assert!(message.contains("data would go over TCP"), "{message}");
    assert!(world.message().contains("fabric.mode is Required"), "{}", world.message());
    assert!(world.job.status.as_ref().unwrap().placement.is_none());
    assert!(world.pods.iter().all(|pod| pod.gated), "nothing may start");
    set_reports(&mut world, "Active");
    // The waiting pods request no RDMA device, because none was usable when they were created. They
    // are recreated.
    world.run();
    assert_eq!(world.stage(), "Running", "{}", world.message());
    let status = world.job.status.as_ref().unwrap();
    assert_eq!(
        (status.attempt, status.restarts.as_ref().unwrap().total),
        (Some(2), 0),
        "it does not count as a restart"
    );
    assert_eq!(condition(&world, conditions::FABRIC_READY).0, "True");
}

/// Sets the locked-memory limit of containers on the first nodes.
fn set_limit(world: &mut World, nodes: usize, limit: &str) {
    let mut shapes = Shapes::default();
    for (position, node) in world.nodes.values_mut().take(nodes).enumerate() {
        let mut status = report(position, "Active");
        status.host.as_mut().unwrap().locked_memory_limit = Some(limit.into());
        let report = GPUTopology { status: Some(status), ..GPUTopology::new("n", GPUTopologySpec::default()) };
        node.machine = Some(shapes.machine(&report));
    }
}

#[test]
fn a_job_that_enforces_its_preflight_waits_until_nothing_blocks() {
    let mut world = world(json!({"fabric": {"preflight": {"mode": "Enforce"}}}), "Active");
    set_limit(&mut world, 2, "65536");
    world.run();
    assert_eq!(world.stage(), "Queued");
    let (state, message) = condition(&world, conditions::FABRIC_READY);
    assert_eq!(state, "False");
    let first = "preflight check 8 (locked memory): both nodes: containers may lock 64 KiB of memory; RDMA needs all of it; set LimitMEMLOCK";
    assert!(message.starts_with(first), "{message}");
    assert!(world.pods.iter().all(|pod| pod.gated), "nothing may start");
    let status = world.job.status.clone().unwrap();
    assert!(status.placement.is_none());
    let findings = status.fabric.and_then(|fabric| fabric.preflight).unwrap().findings;
    assert_eq!(findings[0].check, 8, "findings are visible while the job waits");
    assert!(world.step().status.is_none(), "an unchanged status is not rewritten");
    set_limit(&mut world, 2, "Unlimited");
    world.run();
    assert_eq!(world.stage(), "Running", "{}", world.message());
    assert_eq!(condition(&world, conditions::FABRIC_READY).0, "True");
}

/// Regression test: the refused node was proposed repeatedly while free nodes stayed idle.
#[test]
fn a_node_that_fails_preflight_is_excluded_and_the_next_placement_is_tried() {
    let mut world = world(json!({"fabric": {"preflight": {"mode": "Enforce"}}}), "Active");
    world.node("n2", "4");
    set_reports(&mut world, "Active");
    set_limit(&mut world, 1, "65536");
    world.run();
    let used: Vec<Option<&str>> = world.pods.iter().map(|pod| pod.node.as_deref()).collect();
    assert_eq!((world.stage(), used), ("Running", vec![Some("n1"), Some("n2")]), "{}", world.message());
    // If there is no other placement, the fault of the best one is reported.
    let mut world = self::world(json!({"fabric": {"preflight": {"mode": "Enforce"}}}), "Active");
    set_limit(&mut world, 1, "65536");
    world.run();
    let (_, message) = condition(&world, conditions::FABRIC_READY);
    assert!(message.starts_with("preflight check 8 (locked memory): n0: containers may lock 64 KiB"), "{message}");
    assert_eq!((world.stage(), world.plan().wait_reason), ("Queued", Some(WaitReason::Fabric)), "it reserves nothing");
}

#[test]
fn a_job_that_only_reports_starts_and_counts_blocking_findings() {
    let mut world = world(json!({}), "Active");
    set_limit(&mut world, 2, "65536");
    world.run();
    assert_eq!(world.stage(), "Running");
    let (state, message) = condition(&world, conditions::FABRIC_READY);
    assert_eq!(state, "True");
    assert!(message.contains("; preflight: 1 finding would block"), "{message}");
}

#[test]
fn host_network_pods_get_their_own_interface() {
    let mut world = world(json!({"template": {"spec": {"hostNetwork": true}}}), "Active");
    let mut interfaces = Vec::new();
    for _ in 0..20 {
        let done = world.step();
        for action in &done.actions {
            if let Action::Release { patch, .. } = action {
                let name = "/metadata/annotations/training.switchyard.dev~1socket-interface";
                interfaces.push(patch.pointer(name).unwrap().as_str().unwrap().to_string());
            }
        }
    }
    interfaces.sort();
    assert_eq!(interfaces, ["eno0", "eno1"]);
}

#[test]
fn engine_jobs_and_single_pods_without_gpus_have_no_fabric() {
    let mut world = World::new(1, json!({}));
    world.run();
    assert_eq!(world.stage(), "Running");
    assert_eq!(world.job.status.as_ref().unwrap().fabric, None);
    assert!(world.objects.keys().all(|(kind, _)| *kind != Kind::ConfigMap));
}

#[test]
fn gates_wait_for_both_claims_and_files() {
    let mut world = world(json!({}), "Active");
    for node in world.nodes.values_mut() {
        node.offered = Some(0b11);
    }
    world.run();
    assert_eq!(world.job.status.as_ref().unwrap().device_allocation, Some(DeviceAllocation::Claims));
    assert_eq!(world.stage(), "Running", "{}", world.message());
    assert!(world.objects.contains_key(&(Kind::ConfigMap, "a-1-fabric".to_string())));
}
