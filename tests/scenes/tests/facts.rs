//! Reports of facts that scenes contain in addition to the matrix.
#![allow(clippy::unwrap_used)]

mod common;

use common::{gpu, link, message, nic, roots, source, stage, status, status_of};
use switchyard_crds::gpu_topology::{
    DmaBuf, DriverModule, EccMode, FabricState, FabricSummary, Facts, FileState, GidFamily, GidGroup, GidType,
    LinkKind, LinkVia, MeasuredLink, MigMode, ModuleState, PathClass, RowRemapping, SourceState,
};
use switchyard_node_agent::Roots;

#[test]
fn an_h100_in_full() {
    let status = status(&stage("hgx-h100"));
    assert_eq!((status.gpu_count, status.gpus.len()), (Some(8), 8));
    let first = gpu(&status, 0);
    assert_eq!((first.model.as_deref(), first.memory_bytes), (Some("NVIDIA H100 80GB HBM3"), Some(80 << 30)));
    assert_eq!(first.bus_id.as_deref(), Some("0000:1b:00.0"));
    assert_eq!(first.numa_node, Some(0), "by the driver: the kernel says -1");
    assert_eq!((first.pcie_root.as_deref(), first.pcie_path.len()), (Some("pci0000:15"), 5));
    let pcie = first.pcie_link.as_ref().unwrap();
    assert_eq!(
        (pcie.generation, pcie.max_generation, pcie.width, pcie.max_width),
        (Some(5), Some(5), Some(16), Some(16))
    );
    let nvlinks = first.nvlinks.as_ref().unwrap();
    assert_eq!((nvlinks.up, nvlinks.down.as_slice()), (18, &[][..]));
    let ecc = first.ecc.as_ref().unwrap();
    assert_eq!((ecc.mode, ecc.row_remapping), (Some(EccMode::Enabled), Some(RowRemapping::Clean)));
    let fabric = status.fabric.as_ref().unwrap();
    assert_eq!((fabric.state, fabric.result.as_deref()), (FabricState::Completed, Some("Success")));
    assert_eq!((&fabric.cluster_uuid, fabric.clique_id), (&None, None), "a machine by itself");
    assert_eq!(fabric.health.as_ref().unwrap().summary, FabricSummary::Healthy, "0xaa");
    let nvswitch = status.nvswitch.as_ref().unwrap();
    assert_eq!((nvswitch.devices, nvswitch.gpus), (Some(4), Some(8)));
    let between = link(&status, 0, 7, LinkKind::NVLink).unwrap();
    assert_eq!(
        (between.count, between.via, between.megabytes_per_second),
        (Some(18), Some(LinkVia::Switch), Some(478_116))
    );

    let host = status.host.as_ref().unwrap();
    assert_eq!((host.driver.as_deref(), host.nvml_version.as_deref()), (Some("580.82.07"), Some("13.580.82.07")));
    assert_eq!((host.cuda_version.as_deref(), host.driver_module), (Some("13.0"), Some(DriverModule::Open)));
    assert_eq!((host.peermem, host.dma_buf), (Some(ModuleState::Loaded), Some(DmaBuf::Likely)));
    assert_eq!(host.rdma_cm.as_ref().map(|device| device.state), Some(FileState::Present));
    assert_eq!(host.acs, None, "nobody asked");
}

#[test]
fn limits_and_device_files() {
    let stage = stage("hgx-h100");
    let host = status(&stage).host.unwrap();
    assert_eq!((host.open_files_limit.as_deref(), host.stack_limit.as_deref()), (Some("1048576"), Some("8388608")));
    let paths: Vec<&str> = host.device_files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!((&paths[..3], paths.len()), (&["nvidiactl", "nvidia-uvm", "nvidia0"][..], 10));
    assert!(host.device_files.iter().all(|file| file.state == FileState::Present));
    // The GPU operator calls this ready regardless (gpu-operator#2685).
    std::fs::remove_file(stage.tree.path("dev/nvidia3")).unwrap();
    let files = status(&stage).host.unwrap().device_files;
    let missing: Vec<&str> =
        files.iter().filter(|file| file.state == FileState::Missing).map(|file| file.path.as_str()).collect();
    assert_eq!(missing, ["nvidia3"]);
    let none = status(&common::stage("no-gpu")).host.unwrap();
    assert_eq!(none.device_files, [], "without the driver the expected files are unknown");
}

#[test]
fn counters_of_ports() {
    let stage = stage("hgx-h100");
    let read = || switchyard_node_agent::counters::read_ports(&stage.tree.path("sys"));
    let before = read();
    let first = &before[0];
    assert_eq!((first.device.as_str(), first.port, first.link_downed), ("mlx5_0", 1, Some(0)));
    assert_eq!(first.errors, [("symbol_error", 0), ("packet_seq_err", 0)].into(), "what is not counted is absent");
    stage.tree.file("sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "2");
    assert_eq!(read()[0].link_downed, Some(2));
    assert_eq!(status(&stage).nics, status(&stage).nics, "a description has no counters");
}

#[test]
fn virtual_functions_are_not_rails() {
    let status = status(&stage("hgx-h100"));
    let (port, function) = (nic(&status, "mlx5_0"), nic(&status, "mlx5_0v1"));
    assert_eq!(port.virtual_function_of, None);
    let functions = port.virtual_functions.as_ref().unwrap();
    assert_eq!((functions.enabled, functions.total), (2, 16));
    assert_eq!(
        (port.node_guid.as_deref(), port.firmware.as_deref()),
        (Some("a088:c203:00ab:0000"), Some("28.39.1002"))
    );
    assert_eq!(function.virtual_function_of.as_deref(), Some("0000:18:00.0"));
    assert_eq!(function.bus_id.as_deref(), Some("0000:18:00.2"));
    let rails = switchyard_topology::report::devices(&status).unwrap().nics;
    assert_eq!(rails.len(), 8, "those beside the GPUs; 2 for storage and 16 virtual functions are not among them");
}

#[test]
fn addresses_of_ethernet_and_infiniband() {
    let status = status(&stage("dgx-a100"));
    let group = |kind, family, count, first_index| GidGroup { kind, family, count, first_index };
    assert_eq!(nic(&status, "mlx5_0").gids, [group(GidType::IB, None, 1, 0)]);
    let roce = nic(&status, "mlx5_8");
    assert_eq!(
        roce.gids,
        [
            group(GidType::RoCEv1, Some(GidFamily::IPv4), 2, 2),
            group(GidType::RoCEv1, Some(GidFamily::IPv6), 1, 0),
            group(GidType::RoCEv2, Some(GidFamily::IPv4), 2, 3),
            group(GidType::RoCEv2, Some(GidFamily::IPv6), 1, 1),
        ]
    );
    assert_eq!((roce.mtu_bytes, roce.name.as_str()), (Some(9000), "net_mlx5_8"));
    let device = roce.char_device.as_ref().unwrap();
    assert_eq!((device.path.as_str(), device.state), ("infiniband/uverbs8", FileState::Present));
}

#[test]
fn missing_char_device() {
    let stage = stage("pcie-8");
    std::fs::remove_file(stage.tree.path("dev/infiniband/uverbs1")).unwrap();
    std::fs::remove_file(stage.tree.path("dev/infiniband/rdma_cm")).unwrap();
    let status = status(&stage);
    let state = |device| nic(&status, device).char_device.as_ref().map(|device| device.state);
    assert_eq!((state("mlx5_0"), state("mlx5_1")), (Some(FileState::Present), Some(FileState::Missing)));
    let manager = status.host.as_ref().and_then(|host| host.rdma_cm.as_ref());
    assert_eq!(manager.map(|device| device.state), Some(FileState::Missing));
}

#[test]
fn bridges_and_meshes_are_direct() {
    let bridges = status(&stage("a30-bridges"));
    let pair = link(&bridges, 0, 1, LinkKind::NVLink).unwrap();
    assert_eq!((pair.count, pair.via, pair.megabytes_per_second), (Some(4), Some(LinkVia::Direct), Some(100_000)));
    assert!(link(&bridges, 1, 2, LinkKind::NVLink).is_none());
    assert_eq!(link(&bridges, 2, 3, LinkKind::PCIe).unwrap().path_class, Some(PathClass::PXB));
    assert_eq!(bridges.nvswitch, None);

    let mesh = status(&stage("dgx-1v"));
    let up: Vec<u32> = mesh.gpus.iter().map(|gpu| gpu.nvlinks.as_ref().unwrap().up).collect();
    assert_eq!(up, [6; 8], "all links of a V100");
    assert_eq!(link(&mesh, 0, 4, LinkKind::NVLink).unwrap().count, Some(2));
    assert!(link(&mesh, 0, 5, LinkKind::NVLink).is_none());
    assert_eq!(mesh.fabric, None);
    assert_eq!(gpu(&mesh, 0).memory_bytes, None, "version 2 of the call came with driver 510");
    let host = mesh.host.as_ref().unwrap();
    assert_eq!((host.driver_module, host.dma_buf), (Some(DriverModule::Proprietary), Some(DmaBuf::Unlikely)));
}

#[test]
fn a_gpu_without_nvlinks_among_others_with_them() {
    let status = status(&stage("hgx-b200"));
    let lone = gpu(&status, 2);
    let nvlinks = lone.nvlinks.as_ref().unwrap();
    assert_eq!((nvlinks.up, nvlinks.down.clone()), (0, (0..18).collect::<Vec<u32>>()));
    assert_eq!(lone.health.as_ref().unwrap().recovery_action, "GPUReset");
    assert!((0..8).filter(|other| *other != 2).all(|other| {
        let (a, b) = (other.min(2), other.max(2));
        link(&status, a, b, LinkKind::NVLink).is_none() && link(&status, a, b, LinkKind::PCIe).is_some()
    }));
    assert_eq!(link(&status, 0, 7, LinkKind::NVLink).unwrap().count, Some(18));
    let nvswitch = status.nvswitch.as_ref().unwrap();
    assert_eq!((nvswitch.devices, nvswitch.gpus), (Some(2), Some(7)));
}

#[test]
fn one_tray_of_a_rack() {
    let status = status(&stage("gb200-tray"));
    let fabric = status.fabric.as_ref().unwrap();
    assert_eq!(fabric.cluster_uuid.as_deref(), Some("7b0c3d5e-9a1f-4c22-86d1-e04f5a6b7c8d"));
    assert_eq!(fabric.clique_id, Some(32_766));
    assert_eq!(fabric.health.as_ref().unwrap().faults, Vec::<String>::new(), "0x1aa");
    assert_eq!(source(&status, Facts::Fabric).state, SourceState::Complete);
    let nvswitch = status.nvswitch.as_ref().unwrap();
    assert_eq!((nvswitch.devices, nvswitch.gpus), (None, Some(4)), "the switches are in other trays");
    assert_eq!(status.host.as_ref().unwrap().imex_channels, [0, 1, 2, 3]);
    let memory: Vec<_> = status.gpus.iter().map(|gpu| gpu.memory_numa_node).collect();
    assert_eq!(memory, [Some(2), Some(10), Some(18), Some(26)]);
    assert_eq!(gpu(&status, 3).bus_id.as_deref(), Some("0019:01:00.0"));
}

#[test]
fn instances_and_saved_power() {
    let status = status(&stage("a30-bridges"));
    let mig = gpu(&status, 0).mig.as_ref().unwrap();
    let profiles: Vec<_> = mig.instances.iter().map(|instance| instance.profile.as_deref().unwrap()).collect();
    assert_eq!((mig.mode, profiles), (MigMode::Enabled, vec!["1g.6gb", "1g.6gb", "2g.12gb"]));
    assert!(mig.instances.iter().all(|instance| instance.uuid.starts_with("MIG-")));
    let whole = gpu(&status, 1).mig.as_ref().unwrap();
    assert_eq!((whole.mode, whole.instances.len()), (MigMode::Disabled, 0));
    let pcie = gpu(&status, 1).pcie_link.as_ref().unwrap();
    assert_eq!(
        (pcie.generation, pcie.max_generation, pcie.width),
        (None, Some(4), Some(16)),
        "Gen1 when idle says nothing"
    );
}

#[test]
fn acs_is_read_only_on_request() {
    let stage = stage("pcie-8");
    let told = Roots { read_acs: true, ..roots(&stage) };
    // Without permission, the kernel shows only the first 64 bytes.
    let cut = status_of(&told);
    assert_eq!(cut.host.as_ref().unwrap().acs, None);
    assert!(message(&cut, Facts::Host).contains("ACS of 0000:16:01.0 unknown"), "{}", message(&cut, Facts::Host));
    let bridges: Vec<String> =
        cut.gpus.iter().flat_map(|gpu| gpu.pcie_path[1..gpu.pcie_path.len() - 1].to_vec()).collect();
    let nics = cut.nics.iter().filter(|nic| nic.rdma_device.is_some());
    for bridge in bridges.iter().chain(nics.flat_map(|nic| &nic.pcie_path[1..nic.pcie_path.len() - 1])) {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&[0x0d, 0, 1, 0]);
        // Source validation alone does not redirect.
        config[0x106] = if bridge == "0000:99:02.0" { 0x1d } else { 0x01 };
        std::fs::write(stage.tree.path(&format!("sys/bus/pci/devices/{bridge}/config")), config).unwrap();
    }
    let status = status_of(&told);
    assert_eq!(status.host.unwrap().acs.unwrap().redirecting, ["0000:99:02.0"]);
}

#[test]
fn measured_speeds_come_from_a_file() {
    let stage = stage("l40s-4");
    let path = stage.tree.path("measured.yaml");
    let told = Roots { measured: Some(path.clone()), ..roots(&stage) };
    std::fs::write(&path, "- {link: PCIe, megabytesPerSecond: 24100, source: nvbandwidth}\n- {link: NIC, megabytesPerSecond: 0, source: x}\n").unwrap();
    let status = status_of(&told);
    let speeds: Vec<_> = status.measured.iter().map(|entry| (entry.link, entry.megabytes_per_second)).collect();
    assert_eq!(speeds, [(MeasuredLink::PCIe, 24_100)]);
    assert_eq!(source(&status, Facts::Measured).state, SourceState::Partial);
    assert!(message(&status, Facts::Measured).contains("[1].megabytesPerSecond: got 0"));
    std::fs::remove_file(&path).unwrap();
    let without = status_of(&told);
    assert_eq!((without.measured.len(), source(&without, Facts::Measured).state), (0, SourceState::Unavailable));
    assert_eq!(without.gpus, status.gpus);
}
