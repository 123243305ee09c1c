//! NCCL forecasts for two nodes of every scene, based on the agent's reports.
#![forbid(unsafe_code)]

mod common;

use common::{roots, stage, status_of};
use switchyard_crds::gpu_topology::GPUTopologyStatus;
use switchyard_fabric::forecast::{Member, forecast, lines};
use switchyard_topology::xml::{Content, Severity, check, generate, parse};

/// Scenes with GPUs.
const SCENES: [&str; 14] = [
    "a30-bridges",
    "dgx-1v",
    "dgx-2",
    "dgx-a100",
    "gb200-tray",
    "gb300-tray",
    "h100-9nics",
    "h200-4nics-vm",
    "h200-4nics",
    "hgx-b200",
    "hgx-h100",
    "l40s-4",
    "nps4",
    "pcie-8",
];

/// After an intended change, run `INSTA_UPDATE=always cargo test -p switchyard-scenes --test
/// forecast`, then compare with NCCL's constants.
///
/// The report also yields a topology file that NCCL accepts unchanged. This is checked here because
/// stages are expensive to create.
#[test]
fn two_nodes_of_every_scene() {
    let shown = SCENES.map(|name| {
        let status = status_of(&roots(&stage(name)));
        assert_topology_file_round_trips(name, &status);
        let gpus: Vec<usize> = (0..status.gpus.len()).collect();
        let members = ["a", "b"].map(|node| Member { node, status: &status, gpus: &gpus });
        format!("{name}\n{}", lines(&forecast(&members, None).expect("a forecast")).join("\n"))
    });
    insta::assert_snapshot!(shown.join("\n\n"));
}

fn assert_topology_file_round_trips(name: &str, status: &GPUTopologyStatus) {
    let text = generate(status, Content::Tree).expect(name);
    let mut errors = check(&parse(&text)).into_sorted();
    errors.retain(|finding| finding.rule.severity == Severity::Error);
    assert!(errors.is_empty(), "{name}: {errors:#?}\n{text}");
}
