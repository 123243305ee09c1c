//! Properties of whole gangs: missing facts, folded faults, GPUs inside and outside the gang, and
//! the effect of the mode.

use crate::preflight::checks::{BY_HAND, INFINIBAND, describe};
use crate::preflight::stage::{NOW, Stage};
use serde_json::json;
use switchyard_core::quantity::Resources;
use switchyard_crds::PreflightSeverity::{Block, Warn};
use switchyard_crds::gpu_topology::*;
use switchyard_crds::{FabricMode, Framework, PreflightFinding, PreflightStatus};
use switchyard_fabric::{Gang, Member, preflight};

/// Runs the checks on two pods with 4 GPUs each. The first has GPUs 0 to 3 of its node.
pub fn by_hand(resources: &[&str], second: &[usize], change: impl FnOnce(&mut GPUTopologyStatus)) -> PreflightStatus {
    let mut limits: std::collections::BTreeMap<&str, &str> = resources.iter().map(|name| (*name, "1")).collect();
    limits.insert("nvidia.com/gpu", "4");
    let container = json!({"name": "trainer", "resources": {"limits": limits}});
    let pod = serde_json::from_value(json!({"containers": [container]})).unwrap();
    let stage = Stage::new(INFINIBAND.0, INFINIBAND.1);
    let mut facts: GPUTopologyStatus = serde_json::from_value(stage.items[1]["status"].clone()).unwrap();
    change(&mut facts);
    let allocatable = Resources::default();
    let member =
        |name, gpus| Member { name, facts: Some(&facts), silence: "", is_old: false, gpus, allocatable: &allocatable };
    let name = if second[0] == 0 { "gpu-2" } else { "gpu-1" };
    let gang = Gang {
        framework: Framework::Torch,
        mode: FabricMode::Auto,
        pod: &pod,
        own: Default::default(),
        gpus: 4,
        processes: 4,
        members: vec![member("gpu-1", &[0, 1, 2, 3]), member(name, second)],
        profile: None,
        now: NOW,
    };
    preflight::run(&gang, &[]).status
}

pub fn finding_for(status: &PreflightStatus, check: i32) -> &PreflightFinding {
    status
        .findings
        .iter()
        .find(|finding| finding.check == check)
        .unwrap_or_else(|| panic!("{check}: {}", describe(status)))
}

#[test]
fn two_pods_of_a_gang_on_one_node_are_reported() {
    let shared = |resources: &[&str]| finding_for(&by_hand(resources, &[4, 5, 6, 7], |_| {}), BY_HAND).clone();
    assert_eq!(shared(&["rdma/ib"]).severity, Warn);
    assert_eq!(shared(&[]).severity, Block, "silently over TCP");
    let apart = by_hand(&["rdma/ib"], &[0, 1, 2, 3], |_| {});
    assert!(apart.findings.iter().all(|finding| finding.check != BY_HAND));
}

#[test]
fn gpu_faults_in_the_gang_block() {
    let finding = |check, change: fn(&mut Gpu)| {
        let status = by_hand(&["rdma/ib"], &[0, 1, 2, 3], |facts| change(&mut facts.gpus[2]));
        let found = finding_for(&status, check);
        (found.severity, found.message.clone())
    };
    for (check, change, message) in [
        (
            11,
            (|gpu| gpu.fabric.as_mut().unwrap().state = FabricState::NotStarted) as fn(&mut Gpu),
            "both nodes: GPU 2: the Fabric Manager has not spoken yet",
        ),
        (
            14,
            |gpu| gpu.health.as_mut().unwrap().recovery_action = "NodeReboot".into(),
            "both nodes: GPU 2: the driver asks for NodeReboot",
        ),
        (
            14,
            |gpu| gpu.ecc.as_mut().unwrap().row_remapping = Some(RowRemapping::Failed),
            "both nodes: GPU 2: a row of memory could not be replaced",
        ),
    ] {
        assert_eq!(finding(check, change), (Block, message.to_string()));
    }
}

#[test]
fn missing_facts_pass_no_check() {
    let mut stage = Stage::new("hgx-h100-infiniband", "torch");
    stage.all(|status| {
        status.host = None;
        status.nics.iter_mut().for_each(|nic| nic.port_watch = None);
    });
    let status = stage.look();
    let skipped: Vec<i32> = status.skipped.iter().map(|skip| skip.check).collect();
    for check in [8, 9, 10, 21, 24, 25, 26] {
        assert!(skipped.contains(&check), "check {check}: {skipped:?}");
    }
    assert_eq!(describe(&status), "");
    assert!(status.skipped.iter().all(|skip| skip.reason.len() > 5));
}

#[test]
fn a_node_without_a_report_is_named_and_passes_no_check() {
    let mut stage = Stage::new("hgx-h100-infiniband", "torch");
    let before = stage.look();
    stage.silence(1);
    let after = stage.look();
    assert!(after.passed < before.passed, "{} {}", after.passed, before.passed);
    assert!(
        describe(&after).contains("gpu-2: not checked as it is now: no node agent reports it"),
        "{}",
        describe(&after)
    );
    assert!(
        describe(&after).starts_with("1 Block"),
        "no pack fits with a silent node, and no pod requests RDMA: {}",
        describe(&after)
    );
    let skip = after.skipped.iter().find(|skip| skip.check == 26).expect("half of the facts are missing");
    assert_eq!(skip.reason, "gpu-2: no node agent reports it");
}

#[test]
fn equal_faults_on_many_nodes_are_merged() {
    let mut stage = eight_nodes();
    (0..6).for_each(|node| {
        stage.node(node, |status| status.host.as_mut().unwrap().locked_memory_limit = Some("65536".into()))
    });
    stage.node(7, |status| status.host.as_mut().unwrap().driver = Some("535.161.08".into()));
    let found = stage.found(8);
    assert_eq!(found.len(), 1);
    assert!(
        found[0].message.starts_with("6 of 8 nodes (gpu-1, gpu-2, gpu-3 and 3 more): containers may lock 64 KiB"),
        "{}",
        found[0].message
    );
    let mixed = stage.found(23);
    assert_eq!(
        mixed[0].message,
        "driver: 570.124.06 on 7 of 8 nodes (gpu-1, gpu-2, gpu-3 and 4 more), 535.161.08 on gpu-8"
    );
}

/// Eight equal nodes.
pub fn eight_nodes() -> Stage {
    let mut stage = Stage::new("hgx-h100-infiniband", "torch");
    stage.grow(8);
    stage
}

#[test]
fn the_mode_determines_the_outcome() {
    let mut stage = Stage::new("hgx-h100-infiniband", "torch");
    stage.all(|status| status.host.as_mut().unwrap().locked_memory_limit = Some("65536".into()));
    stage.set("/spec/fabric", json!({"preflight": {"mode": "Enforce"}}));
    let why = stage.fabric().unwrap_err();
    assert!(
        why.starts_with("preflight check 8 (locked memory): both nodes: containers may lock 64 KiB")
            && why.contains("LimitMEMLOCK"),
        "{why}"
    );
    stage.set("/spec/fabric", json!({"preflight": {"mode": "None"}}));
    assert_eq!(stage.fabric().unwrap().preflight, None);
    stage.set("/spec/fabric", json!({"preflight": {"mode": "Report"}}));
    assert_eq!(stage.look().findings[0].check, 8);
    // A warning does not block the start.
    let mut stage = Stage::new("hgx-h100-infiniband", "torch");
    stage.ports(1, |nic| nic.mtu_bytes = Some(2044));
    stage.set("/spec/fabric", json!({"preflight": {"mode": "Enforce"}}));
    assert_eq!(stage.look().findings[0].check, 4);
}

#[test]
fn node_specific_faults_hide_no_other_fault() {
    let mut stage = eight_nodes();
    (0..8).for_each(|node| {
        let limit = 65_536 * (node + 1);
        stage.node(node, |status| status.host.as_mut().unwrap().locked_memory_limit = Some(limit.to_string()));
    });
    stage.ports(1, |nic| nic.mtu_bytes = Some(2044));
    assert_eq!(stage.found(8).len(), 4);
    let last = stage.found(8).pop().unwrap().message;
    assert!(last.starts_with("gpu-4: ") && last.ends_with("; and 4 more findings of this check"), "{last}");
    assert_eq!(stage.found(4).len(), 1);
}

#[test]
fn outdated_silent_and_contradictory_reports_are_named() {
    let messages = |check, change: fn(&mut GPUTopologyStatus)| {
        let mut stage = Stage::new(INFINIBAND.0, INFINIBAND.1);
        stage.node(1, change);
        stage.found(check).into_iter().map(|finding| finding.message).collect::<Vec<_>>().join("; ")
    };
    let old = messages(23, |status| status.agent_version = Some("0.0.9".into()));
    assert!(old.contains("gpu-2: its node agent is 0.0.9, and this program"), "{old}");
    let silent = messages(23, |status| status.observed_time = Some(crate::preflight::stage::before(90)));
    assert!(silent.contains("gpu-2: not checked as it is now: its node agent is silent"), "{silent}");
    let lost = messages(13, |status| {
        let condition = json!({
            "type": "Consistent", "status": "False", "reason": "Contradiction", "lastTransitionTime": "2026-01-01T00:00:00Z",
            "message": "gpuCount: got 8; expected 9, the NVIDIA GPUs on the PCI bus",
        });
        status.conditions = vec![serde_json::from_value(condition).unwrap()];
    });
    assert_eq!(lost, "gpu-2: the driver has lost a GPU");
}
