//! The report of a scene, printed as the matrix of `nvidia-smi topo -m`, equals the text of the
//! real machine.
//!
//! The scenes are hand-written: models, links and addresses as far as they are known for these
//! machines, the rest chosen to explain the text. Currently no cell differs. Four texts can only be
//! explained by facts that a kernel or driver does not report, and the scenes say so: no NUMA nodes
//! for NICs (F3, F6, F15) or for any PCI device (F3b), and a driver that reports every pair as SYS
//! (F15).
#![allow(clippy::unwrap_used)]

mod common;

use common::{stage, status};
use switchyard_crds::gpu_topology::{GPUTopologyStatus, SourceState};
use switchyard_scenes::Scene;
use switchyard_topology::cells;
use switchyard_topology::matrix;

const TEXTS: [(&str, &str); 14] = [
    ("dgx-1v", include_str!("../../fixtures/topo/f01-dgx-1v.txt")),
    ("dgx-a100", include_str!("../../fixtures/topo/f02-dgx-a100.txt")),
    ("h100-9nics", include_str!("../../fixtures/topo/f03-h100.txt")),
    ("hgx-h100", include_str!("../../fixtures/topo/f03b-hgx-h100.txt")),
    ("h200-4nics", include_str!("../../fixtures/topo/f04-h200.txt")),
    ("h200-4nics-vm", include_str!("../../fixtures/topo/f04-h200-vm.txt")),
    ("gb200-tray", include_str!("../../fixtures/topo/f06-gb200.txt")),
    ("gb300-tray", include_str!("../../fixtures/topo/f06b-gb300.txt")),
    ("l40s-4", include_str!("../../fixtures/topo/f07-l40s.txt")),
    ("a30-bridges", include_str!("../../fixtures/topo/f08-a30.txt")),
    ("pcie-8", include_str!("../../fixtures/topo/f09-pcie-8.txt")),
    ("hgx-b200", include_str!("../../fixtures/topo/f10-b200.txt")),
    ("dgx-2", include_str!("../../fixtures/topo/f12-dgx-2.txt")),
    ("nps4", include_str!("../../fixtures/topo/f15-nps4.txt")),
];

/// GPUs by index, then RDMA devices by name, as nvidia-smi orders them.
fn devices(status: &GPUTopologyStatus) -> Vec<(Option<&str>, cells::Device<'_>)> {
    let names = status.gpus.iter().map(|_| None).chain(cells::nics(status).map(|nic| nic.rdma_device.as_deref()));
    let all = names.zip(cells::devices(status));
    let mut devices: Vec<_> = all.filter(|(name, device)| device.gpu.is_some() || name.is_some()).collect();
    devices.sort_by_key(|(name, _)| *name);
    devices
}

/// All differences between a report and a text.
fn differences(status: &GPUTopologyStatus, text: &matrix::Matrix) -> Vec<String> {
    let devices = devices(status);
    let mut found = Vec::new();
    if (status.gpus.len(), devices.len()) != (text.gpus.len(), text.devices()) {
        return vec![format!("{} GPUs of {} devices", status.gpus.len(), devices.len())];
    }
    for a in 0..devices.len() {
        for b in 0..devices.len() {
            let (ours, theirs) = (cells::cell(status, &devices[a].1, &devices[b].1), text.cell(a, b));
            if theirs.is_some_and(|theirs| theirs != ours) {
                found.push(format!("{}-{}: {} for {theirs:?}", text.label(a), text.label(b), ours.word()));
            }
        }
    }
    for (ours, theirs) in devices.iter().skip(text.gpus.len()).zip(&text.nics) {
        if theirs.device.as_deref().is_some_and(|name| Some(name) != ours.0) {
            found.push(format!("{:?} for {}", ours.0, theirs.name()));
        }
    }
    for (ours, theirs) in status.gpus.iter().zip(&text.gpus) {
        let node = status.numa_nodes.iter().find(|node| Some(node.id) == ours.numa_node);
        let cpus = node.and_then(|node| node.cpus.clone());
        if theirs.cpus.as_ref().is_some_and(|list| Some(list.to_string()) != cpus) {
            found.push(format!("GPU{}: CPUs {cpus:?} for {:?}", ours.index, theirs.cpus));
        }
        // A list on machines whose GPU memory is a NUMA node. The first entry is the node with
        // CPUs.
        if theirs.numa.as_ref().is_some_and(|list| list.first() != ours.numa_node) {
            found.push(format!("GPU{}: NUMA node {:?} for {:?}", ours.index, ours.numa_node, theirs.numa));
        }
        if theirs.memory_numa != ours.memory_numa_node {
            found.push(format!("GPU{}: {:?} for {:?}", ours.index, ours.memory_numa_node, theirs.memory_numa));
        }
    }
    found
}

#[test]
fn every_scene_matches_the_text_of_its_machine() {
    let names = Scene::names().unwrap();
    assert_eq!(names.len(), TEXTS.len() + 1, "all but no-gpu have a text");
    for name in names {
        let stage = stage(&name);
        let status = status(&stage);
        if let Some((_, text)) = TEXTS.iter().find(|(known, _)| *known == name) {
            let text = matrix::parse(text).unwrap();
            assert_eq!(differences(&status, &text), Vec::<String>::new(), "{name}");
        }
        assert_eq!(common::status(&stage), status, "{name}: again");
        for source in &status.sources {
            let has_old_driver = !stage.machine.scene.without.is_empty();
            let note = source.message.as_deref().unwrap_or_default();
            let expected = note.is_empty() && source.state == SourceState::Complete
                || has_old_driver && note.contains("memory unknown")
                || name == "no-gpu" && note == "no NVIDIA GPU on the PCI bus"
                // A stage has no tmpfs of its own.
                || note.contains("dev/shm") && !note.contains(';');
            assert!(expected, "{name}: {source:?}");
        }
    }
}

#[test]
fn injected_differences_are_detected() {
    let text = matrix::parse(TEXTS[8].1).unwrap();
    let mut status = status(&stage("l40s-4"));
    status.gpus[1].pcie_path = status.gpus[2].pcie_path.clone();
    status.gpus[3].numa_node = Some(0);
    let found = differences(&status, &text);
    assert!(found.iter().any(|line| line.starts_with("GPU3-NIC0: SYS for")), "{found:#?}");
    assert!(found.iter().any(|line| line.starts_with("GPU3: NUMA node Some(0)")), "{found:#?}");
    assert!(differences(&status, &matrix::parse(TEXTS[0].1).unwrap())[0].contains("4 GPUs"));
}
