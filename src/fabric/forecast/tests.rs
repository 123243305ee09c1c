#![allow(clippy::unwrap_used)]

use super::*;
use switchyard_crds::gpu_topology::{Cpus, Host};
use switchyard_topology::import::{NicRate, Options, import};
use switchyard_topology::matrix::parse;

/// Matrices of tests/fixtures/topo with their GPUs and the rate of their NICs in Gbit/s.
const MACHINES: [(&str, &str, u64, &str); 14] = [
    ("DGX-1V", "V100", 100, include_str!("../../../tests/fixtures/topo/f01-dgx-1v.txt")),
    ("DGX A100", "A100", 200, include_str!("../../../tests/fixtures/topo/f02-dgx-a100.txt")),
    ("H100", "H100", 400, include_str!("../../../tests/fixtures/topo/f03-h100.txt")),
    ("HGX H100", "H100", 400, include_str!("../../../tests/fixtures/topo/f03b-hgx-h100.txt")),
    ("H200", "H200", 400, include_str!("../../../tests/fixtures/topo/f04-h200.txt")),
    ("H200 in a VM", "H200", 400, include_str!("../../../tests/fixtures/topo/f04-h200-vm.txt")),
    ("GB200", "GB200", 400, include_str!("../../../tests/fixtures/topo/f06-gb200.txt")),
    ("GB300", "GB300", 800, include_str!("../../../tests/fixtures/topo/f06b-gb300.txt")),
    ("4 L40S", "L40S", 200, include_str!("../../../tests/fixtures/topo/f07-l40s.txt")),
    ("A30 with bridges", "A30", 100, include_str!("../../../tests/fixtures/topo/f08-a30.txt")),
    ("8 GPUs on PCIe", "L40S", 200, include_str!("../../../tests/fixtures/topo/f09-pcie-8.txt")),
    ("B200 with one GPU off the fabric", "B200", 400, include_str!("../../../tests/fixtures/topo/f10-b200.txt")),
    ("DGX-2", "V100", 100, include_str!("../../../tests/fixtures/topo/f12-dgx-2.txt")),
    ("NPS4", "L40S", 200, include_str!("../../../tests/fixtures/topo/f15-nps4.txt")),
];

fn machine(name: &str) -> GPUTopologyStatus {
    let (_, model, gigabits, text) = MACHINES.iter().find(|(known, ..)| *known == name).unwrap();
    let rates = vec![NicRate { nic: None, megabits_per_second: gigabits * 1000 }];
    let options = Options { name: "box".into(), gpu_model: Some((*model).into()), rates };
    import(&parse(text).unwrap(), &options).unwrap().topology.status.unwrap()
}

/// A gang on nodes of one kind.
fn gang(status: &GPUTopologyStatus, nodes: &[&str], gpus: &[usize], level: Option<Level>) -> Forecast {
    let members: Vec<Member<'_>> = nodes.iter().map(|node| Member { node, status, gpus }).collect();
    forecast(&members, level).unwrap()
}

fn all(status: &GPUTopologyStatus) -> Vec<usize> {
    (0..status.gpus.len()).collect()
}

/// After an intended change, run `INSTA_UPDATE=always cargo test -p switchyard --lib forecast`,
/// then compare with NCCL's constants.
#[test]
fn two_nodes_of_every_matrix() {
    let shown = MACHINES.map(|(name, ..)| {
        let status = machine(name);
        format!("{name}\n{}", lines(&gang(&status, &["a", "b"], &all(&status), None)).join("\n"))
    });
    insta::assert_snapshot!(shown.join("\n\n"));
}

#[test]
fn nccl_ignores_gpus_without_a_rank() {
    let status = machine("DGX-1V");
    // 0 and 5 have no direct link; 1 and 4 join them if they are in the job.
    let pair = |gpus: &[usize]| gang(&status, &["a"], gpus, None).nodes[0].paths.pair(0, 1).path;
    assert_eq!(pair(&[0, 5, 1]), NcclPath::Nvb);
    assert_eq!(pair(&[0, 5]), NcclPath::Sys);
}

#[test]
fn ranks_keep_their_order_and_gpus_theirs() {
    let status = machine("H200");
    let forward = gang(&status, &["a"], &[0, 2, 4, 6], None).nodes.remove(0).paths;
    let backward = gang(&status, &["a"], &[6, 4, 2, 0], None).nodes.remove(0).paths;
    let reversed: Vec<Exit> = backward.exits.into_iter().rev().collect();
    let without_relay =
        |exits: &[Exit]| exits.iter().map(|exit| (exit.gpu, exit.nics.clone(), exit.path)).collect::<Vec<_>>();
    assert_eq!(without_relay(&forward.exits), without_relay(&reversed));
}

#[test]
fn amd_pairs_can_use_p2p_across_sockets() {
    let mut status = machine("8 GPUs on PCIe");
    let within = |status: &GPUTopologyStatus, gpus: &[usize]| gang(status, &["a"], gpus, None).summary.within;
    assert_eq!(within(&status, &[0, 4]), [IntraNode::Host]);
    status.cpus = Some(Cpus { vendor: Some("AuthenticAMD".into()), ..Cpus::default() });
    assert_eq!(within(&status, &[0, 4]), [IntraNode::Pcie]);
    assert_eq!(within(&status, &[0, 1, 4]), [IntraNode::Pcie, IntraNode::Host], "two GPUs only");
}

#[test]
fn gpudirect_needs_a_module_or_dma_buf() {
    let mut status = machine("DGX A100");
    let direct = |status: &GPUTopologyStatus| gang(status, &["a", "b"], &[0], None).nodes[0].paths.exits[0].direct;
    assert_eq!(direct(&status), Direct::Unknown);
    for (peermem, dma_buf, expected) in [
        (Some(ModuleState::Loaded), None, Direct::Yes),
        (None, Some(DmaBuf::Likely), Direct::Yes),
        (Some(ModuleState::NotLoaded), None, Direct::Unknown),
        (Some(ModuleState::NotLoaded), Some(DmaBuf::Likely), Direct::Yes),
        (Some(ModuleState::NotLoaded), Some(DmaBuf::Unlikely), Direct::NoModule),
    ] {
        status.host = Some(Host { peermem, dma_buf, ..Host::default() });
        assert_eq!(direct(&status), expected, "{peermem:?} {dma_buf:?}");
    }
}

#[test]
fn one_node_without_rdma_moves_all_to_tcp() {
    let with = machine("DGX A100");
    let mut without = with.clone();
    without.sources.clear();
    without.nics.iter_mut().for_each(|nic| nic.rdma_device = None);
    without.host = Some(Host { default_route: Some("eth0".into()), ..Host::default() });
    let gpus = [0, 1];
    let members = [&with, &without].map(|status| Member { node: "a", status, gpus: &gpus });
    let mixed = forecast(&members, None).unwrap();
    assert_eq!(mixed.summary.between, Some(InterNode::Tcp { interface: None }));
    let both = gang(&without, &["a", "b"], &gpus, None);
    assert_eq!(both.summary.between, Some(InterNode::Tcp { interface: Some("eth0".into()) }));
    without.nics.clear();
    let none = gang(&without, &["a", "b"], &gpus, None);
    assert_eq!((none.summary.outward, none.nodes[0].paths.exits[0].rate), (None, None), "unknown is absent");
    assert!(lines(&none).iter().any(|line| line.contains("ranks 0-1: no NIC is known")));
}

#[test]
fn level_share_scales_the_rate() {
    let status = machine("H200");
    let outward = |level| gang(&status, &["a", "b"], &all(&status), level).summary.outward;
    assert_eq!(outward(None), Some(192_000));
    assert_eq!(outward(Some(Level { share: 500, nvlink: false })), Some(96_000));
    let joined = gang(&status, &["a", "b"], &all(&status), Some(Level { share: 1000, nvlink: true })).summary;
    assert_eq!((joined.between, joined.outward), (Some(InterNode::NvLink), None));
    let alone = gang(&status, &["a"], &all(&status), None).summary;
    assert_eq!((alone.between, alone.outward), (None, None));
}

#[test]
fn equal_nodes_are_one_entry() {
    let (one, other) = (machine("HGX H100"), machine("H200"));
    let gpus: Vec<usize> = (0..8).collect();
    let members = [("a", &one), ("b", &other), ("c", &one)].map(|(node, status)| Member { node, status, gpus: &gpus });
    let forecast = forecast(&members, None).unwrap();
    assert_eq!(forecast.nodes.len(), 2);
    assert_eq!(
        (&forecast.nodes[0].names[..], &forecast.nodes[0].first_ranks[..]),
        (&["a".into(), "c".into()][..], &[0, 16][..])
    );
    assert!(lines(&forecast).contains(&"a (ranks 0-7), c (ranks 16-23)".to_string()));
}

#[test]
fn unpredictable_input_is_rejected() {
    let status = machine("4 L40S");
    let refused =
        |gpus: &[usize]| forecast(&[Member { node: "a", status: &status, gpus }], None).unwrap_err().to_string();
    assert_eq!(refused(&[4]), "node a: got GPU 4: expected each of 4 GPUs at most once");
    assert!(refused(&[1, 1]).contains("got GPU 1"));
    let mut broken = status.clone();
    broken.gpus[1].uuid = broken.gpus[0].uuid.clone();
    let error = forecast(&[Member { node: "a", status: &broken, gpus: &[0] }], None).unwrap_err();
    assert!(error.to_string().starts_with("GPUTopology a: status.gpus[1].uuid"));
    assert_eq!(forecast(&[], None).unwrap().summary.slowest, None);
}
