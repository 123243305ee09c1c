#![allow(clippy::unwrap_used)]

use super::*;
use crate::import::{self, NicRate, Options};
use crate::{matrix, report};

/// A machine of tests/fixtures/topo with 400 Gbit/s NICs.
fn fixture(name: &str, gpu_model: &str) -> GPUTopologyStatus {
    let text = match name {
        "f01" => include_str!("../../../tests/fixtures/topo/f01-dgx-1v.txt"),
        "f04" => include_str!("../../../tests/fixtures/topo/f04-h200.txt"),
        "f06" => include_str!("../../../tests/fixtures/topo/f06-gb200.txt"),
        "f09" => include_str!("../../../tests/fixtures/topo/f09-pcie-8.txt"),
        "f10" => include_str!("../../../tests/fixtures/topo/f10-b200.txt"),
        other => panic!("no fixture {other}"),
    };
    let rates = vec![NicRate { nic: None, megabits_per_second: 400_000 }];
    let options = Options { name: name.into(), gpu_model: Some(gpu_model.into()), rates };
    import::import(&matrix::parse(text).unwrap(), &options).unwrap().topology.status.unwrap()
}

fn gpu_row(name: &str, gpu_model: &str, gpu: usize) -> String {
    let status = fixture(name, gpu_model);
    let devices = report::devices(&status).unwrap().devices;
    let ways = NcclPaths::from_report(&status, &devices);
    (0..devices.gpus.len()).map(|other| ways.gpus(gpu, other).word()).collect::<Vec<_>>().join(" ")
}

fn nic_row(status: &GPUTopologyStatus, gpu: usize) -> String {
    let devices = report::devices(status).unwrap().devices;
    let ways = NcclPaths::from_report(status, &devices);
    (0..devices.nics.len()).map(|nic| ways.nic(gpu, nic).word()).collect::<Vec<_>>().join(" ")
}

#[test]
fn classes_are_ordered_as_in_nccl() {
    use NcclPath::{C2c, Loc, Nvb, Nvl, P2c, Phb, Pix, Pxb, Pxn, Sys};
    let order = [Loc, Nvl, Nvb, C2c, Pix, Pxb, P2c, Pxn, Phb, Sys];
    assert!(order.is_sorted());
    let direct: Vec<bool> = order.iter().map(|path| path.has_direct_rdma()).collect();
    assert_eq!(direct, [true, true, true, true, true, true, true, false, false, false]);
}

#[test]
fn dgx_1v_gpus_without_a_direct_link_relay_over_a_third() {
    assert_eq!(gpu_row("f01", "V100", 0), "LOC NVL NVL NVL NVL NVB NVB NVB");
    let status = fixture("f01", "V100");
    let devices = report::devices(&status).unwrap().devices;
    let ways = NcclPaths::from_report(&status, &devices);
    assert_eq!(ways.gpu_rate(0, 3), Some(40_000), "two links");
    // Over GPU1 or GPU4, which takes one link.
    assert_eq!(ways.gpu_rate(0, 5), Some(20_000));
}

#[test]
fn a_switch_relays_nothing_for_a_gpu_without_links() {
    assert_eq!(gpu_row("f10", "B200", 2), "PHB PHB LOC PHB SYS SYS SYS SYS");
    assert_eq!(gpu_row("f10", "B200", 0), "LOC NVL PHB NVL NVL NVL NVL NVL");
}

#[test]
fn host_bridges_of_one_numa_node_are_phb() {
    let status = fixture("f04", "H200");
    let devices = report::devices(&status).unwrap().devices;
    assert_eq!(devices.nic_path(0, 1), PathClass::Node);
    assert_eq!(nic_row(&status, 0), "PXB PHB SYS SYS");
    let ways = NcclPaths::from_report(&status, &devices);
    assert!(ways.nic(0, 0).has_direct_rdma() && !ways.nic(0, 1).has_direct_rdma());
    // To the NIC of GPU2 and GPU3 over GPU3, which is on its switch; to its own NIC directly.
    assert_eq!((ways.relay(0, 1), ways.relay(0, 0), ways.relay(1, 0)), (Some(3), None, None));
}

#[test]
fn nothing_relays_without_nvlink() {
    assert_eq!(gpu_row("f09", "L40S", 0), "LOC PIX PIX PIX SYS SYS SYS SYS");
    let status = fixture("f09", "L40S");
    let devices = report::devices(&status).unwrap().devices;
    let ways = NcclPaths::from_report(&status, &devices);
    assert!((0..devices.gpus.len()).all(|gpu| (0..devices.nics.len()).all(|nic| ways.relay(gpu, nic).is_none())));
}

#[test]
fn nics_of_the_coherent_cpu() {
    // nvidia-smi reports SYS for every NIC here, because a Grace has one root complex per NIC. The
    // kernel reports the NUMA node.
    let on_two_cpus = |gpu_model: &str| {
        let mut status = fixture("f06", gpu_model);
        status.nics.iter_mut().enumerate().for_each(|(nic, found)| found.numa_node = Some(u32::from(nic >= 4)));
        status
    };
    let status = on_two_cpus("GB200");
    assert_eq!(gpu_row("f06", "GB200", 0), "LOC NVL NVL NVL");
    assert_eq!(nic_row(&status, 0), "P2C P2C P2C P2C SYS SYS SYS SYS");
    assert_eq!(nic_row(&on_two_cpus("B200"), 0), "PHB PHB PHB PHB SYS SYS SYS SYS", "no C2C");
    let mut apart = status;
    apart.links.clear();
    let devices = report::devices(&apart).unwrap().devices;
    let ways = NcclPaths::from_report(&apart, &devices);
    assert_eq!((ways.gpus(0, 1), ways.gpu_rate(0, 1)), (NcclPath::C2c, None));
    assert_eq!(ways.gpus(0, 2), NcclPath::Sys);
}

#[test]
fn the_relay_is_next_to_the_nic() {
    // The only NIC of a DGX-1V is on the switch of GPU2 and GPU3, and every GPU uses it.
    let status = fixture("f01", "V100");
    let devices = report::devices(&status).unwrap().devices;
    let ways = NcclPaths::from_report(&status, &devices);
    assert_eq!(nic_row(&status, 2), "PIX");
    let relays: Vec<Option<usize>> = (0..8).map(|gpu| ways.relay(gpu, 0)).collect();
    assert_eq!(relays, [Some(2), Some(2), None, None, None, None, Some(2), None], "those with an NVLink to it");
}

#[test]
fn gpus_divide_equally_near_nics() {
    let status = fixture("f09", "L40S");
    let devices = report::devices(&status).unwrap().devices;
    let ways = NcclPaths::from_report(&status, &devices);
    let nics: Vec<Vec<usize>> = (0..4).map(|gpu| ways.nics(gpu)).collect();
    assert_eq!(nics, [[0], [1], [0], [1]]);
    let alone = devices.only(&[1]);
    assert_eq!(NcclPaths::new(&alone, 0).nics(0), [0, 1], "a GPU by itself has both");
    assert_eq!([0, 1, 2, 3, 4].map(|value| mirrored(value, 4)), [0, 2, 1, 3, 0]);
}
