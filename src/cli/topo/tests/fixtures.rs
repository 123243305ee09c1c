//! Renders every machine in tests/fixtures/topo.
#![allow(clippy::unwrap_used)]

use super::*;
use std::path::Path;
use switchyard_topology::import::{self, NicRate, Options};
use switchyard_topology::matrix;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/topo");

/// GPU model of each machine, and the rate of its NICs in Gbit/s.
const MACHINES: [(&str, &str, u64); 14] = [
    ("f01-dgx-1v", "V100", 100),
    ("f02-dgx-a100", "A100", 200),
    ("f03-h100", "H100", 400),
    ("f03b-hgx-h100", "H100", 400),
    ("f04-h200-vm", "H200", 400),
    ("f04-h200", "H200", 400),
    ("f06-gb200", "GB200", 400),
    ("f06b-gb300", "GB300", 800),
    ("f07-l40s", "L40S", 200),
    ("f08-a30", "A30", 100),
    ("f09-pcie-8", "L40S", 400),
    ("f10-b200", "B200", 400),
    ("f12-dgx-2", "V100", 100),
    ("f15-nps4", "H100", 400),
];

/// Loads a machine by its file name.
pub(in super::super) fn machine(name: &str) -> GPUTopology {
    let (_, gpu_model, gbps) = MACHINES.iter().find(|(known, ..)| *known == name).unwrap();
    let text = std::fs::read_to_string(Path::new(FIXTURES).join(format!("{name}.txt"))).unwrap();
    let rates = vec![NicRate { nic: None, megabits_per_second: gbps * 1000 }];
    let options = Options { name: name.into(), gpu_model: Some((*gpu_model).into()), rates };
    import::import(&matrix::parse(&text).unwrap(), &options).unwrap().topology
}

#[test]
fn every_machine_at_100_columns() {
    let files = std::fs::read_dir(FIXTURES)
        .unwrap()
        .filter(|file| file.as_ref().unwrap().path().extension() == Some("txt".as_ref()));
    assert_eq!(files.count(), MACHINES.len(), "every file of {FIXTURES} is in the table of this test");
    for (name, ..) in MACHINES {
        insta::assert_snapshot!(name, shown(&machine(name), 100));
    }
}

#[test]
fn sixteen_gpus_at_80_columns() {
    insta::assert_snapshot!(shown(&machine("f12-dgx-2"), 80));
}

#[test]
fn complete_matrices() {
    let view = View { width: 100, full: true, ..View::default() };
    insta::assert_snapshot!("f10-b200-full", render(&machine("f10-b200"), &view));
    insta::assert_snapshot!("f12-dgx-2-full", render(&machine("f12-dgx-2"), &view));
}
