use super::*;
use switchyard_crds::gpu_topology::{
    Cache, CacheKind, Ecc, Fabric, FabricHealth, FabricState, FabricSummary, FactSource, GPUTopologySpec, GidFamily,
    GidGroup, GidType, Gpu, GpuHealth, Host, Link, LinkKind, Mig, MigMode, NicKind, NumaNode, NvLinks, PcieLink,
    RowRemapping, SourceState, VirtualFunctions,
};

#[cfg(test)]
pub(super) mod fixtures;
#[cfg(test)]
mod properties;

fn shown(machine: &GPUTopology, width: usize) -> String {
    render(machine, &View { width, ..View::default() })
}

fn topology(name: &str, status: GPUTopologyStatus) -> GPUTopology {
    let mut topology = GPUTopology::new(name, GPUTopologySpec {});
    topology.status = Some(status);
    topology
}

fn node(id: u32, cpus: &str, gib: u64, distances: &[u32]) -> NumaNode {
    NumaNode { id, cpus: Some(cpus.to_owned()), memory_bytes: Some(gib << 30), distances: distances.to_vec() }
}

fn cache(level: u32, kind: CacheKind, size_bytes: u64, count: u32) -> Cache {
    Cache { level, kind, size_bytes: Some(size_bytes), shared_by: (0..count).map(|cpu| cpu.to_string()).collect() }
}

fn no_gpu() -> FactSource {
    FactSource {
        facts: Facts::GPUs,
        source: "sysfs".to_owned(),
        state: SourceState::Complete,
        message: Some("no NVIDIA GPU on the PCI bus".to_owned()),
    }
}

fn path(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// A virtual machine with two cores.
fn small_box() -> GPUTopology {
    let cpus = Cpus {
        model: Some("Intel(R) Xeon(R) Processor".to_owned()),
        architecture: Some("x86_64".to_owned()),
        sockets: Some(1),
        cores: Some(2),
        threads: Some(2),
        online: Some("0-1".to_owned()),
        usable: Some("0-1".to_owned()),
        caches: vec![
            cache(1, CacheKind::Data, 48 << 10, 2),
            cache(1, CacheKind::Instruction, 32 << 10, 2),
            cache(2, CacheKind::Unified, 2 << 20, 2),
            cache(3, CacheKind::Unified, 260 << 20, 1),
        ],
        ..Cpus::default()
    };
    let nic = Nic {
        name: "eth0".to_owned(),
        bus_id: Some("0000:00:03.0".to_owned()),
        state: Some("Up".to_owned()),
        pcie_path: path("pci0000:00 0000:00:03.0"),
        ..Nic::default()
    };
    topology(
        "box",
        GPUTopologyStatus {
            gpu_count: Some(0),
            numa_node_count: Some(1),
            memory_bytes: Some(25_276_510_208),
            cpus: Some(cpus),
            numa_nodes: vec![node(0, "0-1", 23, &[10])],
            nics: vec![nic],
            host: Some(Host { default_route: Some("eth0".to_owned()), ..Host::default() }),
            sources: vec![no_gpu()],
            ..GPUTopologyStatus::default()
        },
    )
}

#[test]
fn two_cores_and_no_gpu() {
    insta::assert_snapshot!(shown(&small_box(), 80));
}

#[test]
fn two_sockets_and_no_gpu() {
    let mut machine = small_box();
    let status = machine.status.as_mut().expect("a status");
    status.numa_nodes = vec![node(0, "0-55,112-167", 503, &[10, 21]), node(1, "56-111,168-223", 504, &[21, 10])];
    status.numa_node_count = Some(2);
    status.memory_bytes = Some(1007 << 30);
    status.cpus = Some(Cpus {
        model: Some("Intel(R) Xeon(R) Platinum 8480+".to_owned()),
        sockets: Some(2),
        cores: Some(112),
        threads: Some(224),
        online: Some("0-223".to_owned()),
        usable: Some("0-7".to_owned()),
        quota_millicores: Some(3500),
        ..Cpus::default()
    });
    status.nics[0].rate_megabits_per_second = Some(25_000);
    status.nics[0].numa_node = Some(1);
    status.sources.push(FactSource {
        facts: Facts::CPUs,
        source: "sysfs, procfs".to_owned(),
        state: SourceState::Partial,
        message: Some("caches of CPU 0-223 unknown".to_owned()),
    });
    insta::assert_snapshot!(shown(&machine, 80));
}

/// Eight GPUs behind one NVSwitch, two GPUs and a NIC on each of four PCIe switches, two sockets.
fn eight_gpus() -> GPUTopology {
    let mut machine = small_box();
    let status = machine.status.as_mut().expect("a status");
    status.numa_nodes = vec![node(0, "0-55,112-167", 1007, &[10, 21]), node(1, "56-111,168-223", 1008, &[21, 10])];
    status.numa_node_count = Some(2);
    status.memory_bytes = Some(2015 << 30);
    let cpus = status.cpus.as_mut().expect("CPUs");
    cpus.model = Some("Intel(R) Xeon(R) Platinum 8480C".to_owned());
    (cpus.sockets, cpus.cores, cpus.threads) = (Some(2), Some(112), Some(224));
    cpus.caches.clear();
    status.nics.clear();
    status.sources.clear();
    status.gpu_count = Some(8);
    for index in 0..8u32 {
        let (switch, port) = (index / 2, index % 2);
        let root = format!("pci0000:{switch}0 0000:{switch}0:01.0 0000:{switch}1:00.0");
        status.gpus.push(Gpu {
            index,
            uuid: format!("GPU-{index}"),
            model: Some("NVIDIA H100 80GB HBM3".to_owned()),
            numa_node: Some(index / 4),
            pcie_path: path(&format!("{root} 0000:{switch}2:0{port}.0 0000:{switch}{}:00.0", port + 3)),
            health: Some(GpuHealth { recovery_action: if index == 5 { "GPUReset" } else { "None" }.to_owned() }),
            ..Gpu::default()
        });
        if port == 0 {
            status.nics.push(Nic {
                name: format!("ibp{switch}s0"),
                kind: NicKind::Physical,
                bus_id: Some(format!("0000:{switch}7:00.0")),
                rdma_device: Some(format!("mlx5_{switch}")),
                port: Some(1),
                link_layer: Some("InfiniBand".to_owned()),
                rate_megabits_per_second: Some(400_000),
                state: Some("Active".to_owned()),
                numa_node: Some(index / 4),
                pcie_path: path(&format!("{root} 0000:{switch}2:04.0 0000:{switch}7:00.0")),
                ..Nic::default()
            });
        }
    }
    for a in 0..8 {
        for b in a + 1..8 {
            status.links.push(Link {
                a: format!("GPU-{a}"),
                b: format!("GPU-{b}"),
                kind: LinkKind::NVLink,
                count: Some(if a == 5 || b == 5 { 17 } else { 18 }),
                via: None,
                megabytes_per_second: None,
                path_class: None,
            });
        }
    }
    machine
}

#[test]
fn eight_gpus_in_a_wide_window() {
    insta::assert_snapshot!(shown(&eight_gpus(), 120));
}

#[test]
fn eight_gpus_at_80_columns() {
    insta::assert_snapshot!(shown(&eight_gpus(), 80));
}

/// A machine with faults everywhere.
#[test]
fn all_facts_count_for_health() {
    let mut machine = eight_gpus();
    let status = machine.status.as_mut().expect("a status");
    status.gpus[0].nvlinks = Some(NvLinks { up: 16, down: vec![3, 11] });
    let narrow = PcieLink { generation: None, max_generation: Some(5), width: Some(8), max_width: Some(16) };
    status.gpus[1].pcie_link = Some(narrow.clone());
    status.gpus[2].ecc = Some(Ecc { mode: None, row_remapping: Some(RowRemapping::Failed) });
    let health = FabricHealth { summary: FabricSummary::LimitedCapacity, faults: vec!["DegradedBandwidth".to_owned()] };
    status.gpus[3].fabric = Some(Fabric {
        state: FabricState::Completed,
        result: Some("Success".to_owned()),
        cluster_uuid: None,
        clique_id: None,
        health: Some(health),
    });
    status.gpus[6].mig = Some(Mig { mode: MigMode::Enabled, instances: Vec::new() });
    status.gpus[7].health = None;
    status.nics[2].pcie_link = Some(narrow);
    status.nics[1].gids = vec![
        GidGroup { kind: GidType::RoCEv1, family: Some(GidFamily::IPv6), count: 1, first_index: 0 },
        GidGroup { kind: GidType::RoCEv2, family: Some(GidFamily::IPv4), count: 1, first_index: 3 },
    ];
    status.nics[0].virtual_functions = Some(VirtualFunctions { enabled: 4, total: 8 });
    let function = Nic { virtual_function_of: Some("0000:07:00.0".to_owned()), ..status.nics[0].clone() };
    status.nics.push(Nic { name: "ibp0s0v0".to_owned(), rdma_device: Some("mlx5_8".to_owned()), ..function });
    let condition = serde_json::json!({"type": "Reported", "status": "False", "reason": "Partial",
        "message": "NVML: two GPUs did not answer", "lastTransitionTime": "2026-11-20T11:55:00Z"});
    status.conditions = vec![serde_json::from_value(condition).expect("a condition")];
    let view = View { width: 100, full: false, seen: Some("12s ago".to_owned()) };
    insta::assert_snapshot!(render(&machine, &view));
}

#[test]
fn no_row_is_wider_than_the_window() {
    for machine in [small_box(), eight_gpus()] {
        for width in 40..160 {
            for line in shown(&machine, width).lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
                assert_eq!(line, line.trim_end());
            }
        }
    }
}

#[test]
fn single_node_machines_with_unplaced_devices() {
    let mut machine = eight_gpus();
    let status = machine.status.as_mut().expect("a status");
    status.links.clear();
    status.numa_nodes.truncate(1);
    status.gpus.iter_mut().for_each(|gpu| gpu.numa_node = None);
    status.nics.iter_mut().for_each(|nic| nic.numa_node = None);
    let screen = shown(&machine, 160);
    assert!(!screen.contains("SYS") && screen.contains("PHB via CPU, same NUMA node (nvidia-smi: NODE)"), "{screen}");
}

#[test]
fn a_description_without_facts() {
    let mut machine = topology("empty", GPUTopologyStatus::default());
    assert_eq!(shown(&machine, 80), "empty\nno GPU  the description does not say why\n");
    machine.status = None;
    assert_eq!(shown(&machine, 80), "empty   not reported yet\n");
}

#[test]
fn numbers() {
    assert_eq!(speed(400_000), "400 Gbit/s (50 GB/s)");
    assert_eq!(speed(2_500), "2.5 Gbit/s (0.31 GB/s)");
    assert_eq!(binary(48 << 10), "48 KiB");
    assert_eq!(binary(8_160_437_862), "7.6 GiB");
    assert_eq!(short_list("0-3,8"), "0-3,8");
    assert_eq!(short_list("0-1,4-5,8-9,12-13,16-17,20-21,24-25"), "14 CPUs");
    assert_eq!(short_name("AMD EPYC 9654 96-Core Processor"), "EPYC 9654");
    assert_eq!(short_name("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz"), "Xeon E5-2680 v4");
    assert_eq!(truncate("abcdefgh", 6), "ab..gh");
}
